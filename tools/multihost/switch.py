"""An Ethernet switch of one process between TAP devices, with delay, loss, a rate and links that can be cut.

It stands in for the kernel's netem, which not every kernel has. Run as `python switch.py TAP ...`: it makes the
devices, prints "ready", and reads a JSON object a line from its input: {"port": 1, "delay": 0.2}. It ends with that.
"""

import fcntl
import heapq
import json
import os
import random
import select
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

_SET_DEVICE = 0x400454CA  # TUNSETIFF of linux/if_tun.h
_TAP_WITHOUT_HEADER = 0x0002 | 0x1000  # IFF_TAP | IFF_NO_PI
_FRAME = 1 << 16
_QUEUE_SECONDS = 2.0  # a frame that would wait longer for a slow link is dropped, as a full queue does


@dataclass
class Port:
    """A TAP device and its link. The device exists as long as `file` is open.

    Attributes:
        file: descriptor of the device.
        delay: seconds that a frame takes from or to this port.
        loss: share of frames that are lost.
        rate: bits a second; 0 for no limit.
        down: nothing passes.
        free_at: when a slow link can send the next frame.
    """

    file: int
    delay: float = 0.0
    loss: float = 0.0
    rate: float = 0.0
    down: bool = False
    free_at: float = 0.0

    def passes(self, frame: bytes, at: float, draw: random.Random) -> float | None:
        """When a frame that comes at `at` has passed the link; None if it is lost."""
        if self.down or draw.random() < self.loss:
            return None
        if self.rate:
            if self.free_at - at > _QUEUE_SECONDS:
                return None
            self.free_at = at = max(self.free_at, at) + 8 * len(frame) / self.rate
        return at + self.delay


def main(names: list[str]) -> None:
    """Make the devices, forward frames by MAC address (its last byte is the port), change links as told."""
    ports = [Port(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)) for _ in names]
    for port, name in zip(ports, names, strict=True):
        fcntl.ioctl(port.file, _SET_DEVICE, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_HEADER))
    print("ready", flush=True)
    draw, commands, number = random.Random(0), b"", 0
    waiting: list[tuple[float, int, int, bytes]] = []  # (due, number, port, frame)
    files = [port.file for port in ports]
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, target, frame = heapq.heappop(waiting)
            _try(os.write, ports[target].file, frame)
        timeout = max(waiting[0][0] - now, 0.0) if waiting else None
        for file in select.select([*files, 0], [], [], timeout)[0]:
            if file == 0:
                *lines, commands = (commands + (read := os.read(0, _FRAME))).split(b"\n")
                if not read:
                    return
                for change in map(json.loads, lines):
                    index = change.pop("port")
                    ports[index] = replace(ports[index], **change, free_at=0.0)
                continue
            source = files.index(file)
            for _ in range(64):
                if not (frame := _try(os.read, file, _FRAME)):
                    break
                everyone = set(range(len(ports)))
                for target in (everyone if frame[0] & 1 else everyone & {frame[5]}) - {source}:
                    at = ports[source].passes(frame, time.monotonic(), draw)
                    due = None if at is None else ports[target].passes(frame, at, draw)
                    if due is not None:
                        number += 1
                        heapq.heappush(waiting, (due, number, target, frame))


def _try(call: Callable[..., Any], *arguments: Any) -> Any:
    """Read or write a frame; b"" if there is none, the device is down, its queue full or its namespace gone."""
    try:
        return call(*arguments)
    except OSError:
        return b""


if __name__ == "__main__":
    main(sys.argv[1:])
