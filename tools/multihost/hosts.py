"""Hosts on one machine: namespaces with a network, a host name, processes and a temporary folder of their own.

    with Hosts(["alpha", "beta"], shared) as (alpha, beta):
        running = beta.start(["hostname"], log)
        beta.link(delay=0.2)

What hosts share is the machine's files, read to run programs, and the folder `shared`, which each has as /mnt/shared.
They reach each other through `switch.py` alone. Nothing of the machine's own network is touched. Needs root.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from .switch import mac_of

SHARED = Path("/mnt/shared")
_SWITCH = Path(__file__).with_name("switch.py")
_NEEDED = ("ip", "unshare", "nsenter", "mount", "setpriv")
_WITH_US = ("setpriv", "--pdeathsig", "KILL")  # ends with the process that started it, however that ends
_SET_UP = """
set -e
echo "$0" > /proc/sys/kernel/hostname
mount --make-rprivate /
mount --bind "$2" /etc/hosts
mount -t tmpfs none "{shm}"
mount -t tmpfs none "{mnt}"
mkdir "{mnt}/shared" "{mnt}/tmp"
mount --bind "$1" "{mnt}/shared"
echo ready
exec sleep infinity
""".format(shm="/dev/shm", mnt=SHARED.parent)


def obstacle() -> str:
    """Why there can be no hosts on this machine, or ""."""
    missing = [name for name in _NEEDED if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "no /dev/net/tun, or not allowed to open it"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "mount", "-t", "tmpfs", "none", "/mnt"],
        capture_output=True,
        text=True,
    )
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


class Host:
    """One host: the namespaces of a process that holds them.

    Args:
        name: what it calls itself.
        port: of the switch; its address is 10.77.0.(port + 1).
    """

    def __init__(self, name: str, port: int, folder: Path, shared: Path, switch: "subprocess.Popen[bytes]"):
        self.name, self.port, self._switch = name, port, switch
        self.address = address_of(port)
        self._started: list[subprocess.Popen[bytes]] = []
        flags = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        names = folder / "hosts"
        command = [*_WITH_US, "unshare", *flags, "sh", "-c", _SET_UP, name, str(shared), str(names)]
        self._holder = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        try:
            _wait_ready(self._holder)
            with open(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children") as file:
                self._init = int(file.read())
            self._plug_in()
        except BaseException:
            self.kill()
            raise

    def _plug_in(self) -> None:
        device = device_of(self.port)
        move = ["ip", "link", "set", device, "address", mac_of(self.port), "netns", str(self._init)]
        _run(["nsenter", "--target", str(self._switch.pid), "--net", *move])
        for line in (
            f"link set {device} name eth0",
            "link set lo up",
            f"address add {self.address}/24 dev eth0",
            "link set eth0 up",
        ):
            _run([*self._enter(), "ip", *line.split()])

    def _enter(self) -> list[str]:
        return ["nsenter", "--target", str(self._init), "--net", "--uts", "--mount", "--pid"]

    def start(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Run a command on this host, in its temporary folder; what it prints is added to `log`."""
        temporary = SHARED.parent / "tmp"
        variables = {**os.environ, "TMPDIR": str(temporary), **(environment or {})}
        with log.open("ab") as file:
            running = subprocess.Popen(
                [*self._enter(), f"--wdns={temporary}", *command],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self._started.append(running)
        return running

    def run(self, *command: str) -> None:
        """Run a command on this host and wait; raises RuntimeError if it fails."""
        _run([*self._enter(), *command])

    def link(self, **change: object) -> None:
        """Change what is named of this host's `Link`: delay, loss, rate, down."""
        assert self._switch.stdin is not None
        self._switch.stdin.write(json.dumps({"port": self.port, **change}).encode() + b"\n")
        self._switch.stdin.flush()

    def processes(self) -> list[int]:
        """All processes of this host, by their numbers outside, without the one that holds it."""
        namespace = os.stat(f"/proc/{self._init}/ns/pid").st_ino
        processes = []
        for entry in os.listdir("/proc"):
            try:
                if entry.isdigit() and os.stat(f"/proc/{entry}/ns/pid").st_ino == namespace:
                    processes.append(int(entry))
            except OSError:  # ended meanwhile
                continue
        return [pid for pid in processes if pid != self._init]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of this host: SIGSTOP freezes it, SIGCONT thaws it."""
        for pid in self.processes():
            os.kill(pid, number)
        for process in self._started:  # nsenter stops when its child does, and stays so
            process.send_signal(number)

    def kill(self) -> None:
        """End all its processes at once. With its link down before, others see what they see of a power cut."""
        self._holder.kill()  # takes the first process of its PID namespace with it, and the kernel all others
        for process in (self._holder, *self._started):
            process.wait()
        if self._holder.stdout is not None:
            self._holder.stdout.close()


class Hosts:
    """Hosts joined by a switch; all are gone on leaving.

    Args:
        names: of the hosts.
        shared: a folder that all of them have as `SHARED`.
    """

    def __init__(self, names: Sequence[str], shared: Path) -> None:
        self._names, self._shared = names, shared
        self._closing = ExitStack()

    def __enter__(self) -> list[Host]:
        with ExitStack() as closing:
            folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="hosts-")))
            rows = [f"{address_of(port)} {name}" for port, name in enumerate(self._names)]
            (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *rows, ""]))
            devices = [device_of(port) for port in range(len(self._names))]
            command = ["unshare", "--net", sys.executable, "-S", str(_SWITCH), *devices]
            switch = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            closing.callback(_end, switch)
            _wait_ready(switch)
            hosts = []
            for port, name in enumerate(self._names):
                hosts.append(Host(name, port, folder, self._shared, switch))
                closing.callback(hosts[-1].kill)
            self._closing = closing.pop_all()
            return hosts

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()


def address_of(port: int) -> str:
    """The address of the host at a port of the switch."""
    return f"10.77.0.{port + 1}"


def device_of(port: int) -> str:
    """The name of a port's TAP device, in the switch's own network namespace."""
    return f"tap{port}"


def wait_until(seconds: float, happened: "object", what: str) -> float:
    """Look ten times a second until `happened()` is true; returns the seconds. Raises TimeoutError."""
    assert callable(happened)
    begun = time.monotonic()
    while not happened():
        if time.monotonic() - begun > seconds:
            raise TimeoutError(f"no {what} within {seconds:g} s")
        time.sleep(0.1)
    return time.monotonic() - begun


def _wait_ready(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdout is not None
    if process.stdout.readline().strip() != b"ready":
        raise RuntimeError(f"{process.args!r} ended with status {process.wait()}")


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
