"""The machine that figures come from: what it is, whether it is quiet enough to tell, a process's memory.

A time is kept only if the machine was quiet. Three looks, each of them cheap:

    before      the share of all CPU time that is in use, over one second
    calibration a fixed loop, timed before every measurement: its spread
    meanwhile   CPU time of everybody minus that of the ranks themselves, over each measurement
"""

import datetime
import os
import platform
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUSY_BEFORE = 0.15  # of all cores
CALIBRATION_SPREAD = 0.10  # interquartile range over median
FOREIGN = 0.10  # of all cores, in the median measurement


def describe() -> dict[str, Any]:
    """What a results file says about where and when."""
    import torch

    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "gpus": torch.cuda.device_count(),
        "os": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True)
class CpuTimes:
    """Seconds since boot, all cores together."""

    busy: float
    total: float

    @classmethod
    def now(cls) -> "CpuTimes":
        fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        tick = os.sysconf("SC_CLK_TCK")
        idle = fields[3] + fields[4]  # waiting for disk is idle too; stolen time is busy
        return cls((sum(fields) - idle) / tick, sum(fields) / tick)


def busy_share(seconds: float = 1.0) -> float:
    """The share of all CPU time in use by whoever, over so many seconds."""
    before = CpuTimes.now()
    time.sleep(seconds)
    after = CpuTimes.now()
    return (after.busy - before.busy) / max(after.total - before.total, 1e-9)


def calibrate() -> float:
    """Seconds of a fixed piece of single-threaded work: the best of five, so that one interruption is no verdict."""
    return min(_fixed_work() for _ in range(5))


def _fixed_work() -> float:
    import torch

    a = torch.ones(192, 192)
    start = time.perf_counter()
    for _ in range(30):
        a = (a @ a).div_(192.0)
    return time.perf_counter() - start


def verdict(before: float, calibration: list[float], foreign: list[float]) -> list[str]:
    """Why the machine was too busy to tell; empty where it was quiet."""
    reasons = []
    if before > BUSY_BEFORE:
        reasons.append(f"{before:.0%} of its CPU time was in use before the start (limit {BUSY_BEFORE:.0%})")
    if (measured := spread(calibration)) > CALIBRATION_SPREAD:
        reasons.append(f"a fixed loop varied by {measured:.0%} (limit {CALIBRATION_SPREAD:.0%})")
    if foreign and (measured := statistics.median(foreign)) > FOREIGN:
        reasons.append(f"others used {measured:.0%} of the CPUs meanwhile (limit {FOREIGN:.0%})")
    return reasons


def spread(values: list[float]) -> float:
    """Interquartile range over median; of fewer than four values the whole range."""
    if len(values) < 4:
        return (max(values) - min(values)) / statistics.median(values)
    first, middle, third = statistics.quantiles(values, n=4)
    return (third - first) / middle


def reset_peak_rss() -> bool:
    """Let the kernel count this process's peak memory from here on; False where it does not allow that."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_rss() -> int:
    """Bytes: this process's peak of resident memory since the start or the last reset."""
    return _field("status", "VmHWM")


def rss() -> int:
    """Bytes: this process's resident memory."""
    return _field("status", "VmRSS")


def pss() -> int:
    """Bytes: this process's memory now, where pages that n processes have count 1/n."""
    return _field("smaps_rollup", "Pss")


def _field(file: str, field: str) -> int:
    for line in Path(f"/proc/self/{file}").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/{file} has no {field}")
