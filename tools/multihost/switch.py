"""An Ethernet switch of one process between TAP devices, with delay, loss, a rate and links that can be cut.

    host 1: eth0 <-- TAP --> port 0 \
                                     forwards by MAC address, 02:00:00:00:00:PORT
    host 2: eth0 <-- TAP --> port 1 /

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
from dataclasses import dataclass, field, replace

_SET_DEVICE = 0x400454CA  # TUNSETIFF of linux/if_tun.h
_TAP_WITHOUT_HEADER = 0x0002 | 0x1000  # IFF_TAP | IFF_NO_PI
_FRAME = 1 << 16
_QUEUE_SECONDS = 2.0  # what waits longer for a slow link is dropped, as a full queue does


@dataclass(frozen=True)
class Link:
    """How a port treats frames, in both directions together.

    Attributes:
        delay: seconds that a frame takes from or to this port.
        loss: share of frames that are lost.
        rate: bits a second; 0 for no limit.
        down: nothing passes.
    """

    delay: float = 0.0
    loss: float = 0.0
    rate: float = 0.0
    down: bool = False


@dataclass
class Port:
    """A TAP device: its file, its link, and when a slow link is free again."""

    file: int
    link: Link = field(default_factory=Link)
    free_at: float = 0.0

    def passes(self, nbytes: int, at: float, draw: random.Random) -> float | None:
        """When a frame that comes at `at` has passed the link; None if it is lost."""
        link = self.link
        if link.down or draw.random() < link.loss:
            return None
        if link.rate:
            if self.free_at - at > _QUEUE_SECONDS:
                return None
            self.free_at = at = max(self.free_at, at) + 8 * nbytes / link.rate
        return at + link.delay


def open_tap(name: str) -> int:
    """Make a TAP device; it is there as long as the file is open. Raises OSError where that is not allowed."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(file, _SET_DEVICE, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_HEADER))
    except OSError:
        os.close(file)
        raise
    return file


def mac_of(port: int) -> str:
    """The address by which a port is known."""
    return f"02:00:00:00:00:{port:02x}"


def forward(ports: list[Port]) -> None:
    """Forward frames, and change links as told on standard input, until that ends."""
    draw = random.Random(0)
    waiting: list[tuple[float, int, int, bytes]] = []  # (due, number, port, frame)
    number = 0
    poll = select.epoll()
    by_file = {port.file: index for index, port in enumerate(ports)}
    for file in (*by_file, sys.stdin.fileno()):
        poll.register(file, select.EPOLLIN)
    told = b""
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _write(ports[waiting[0][2]].file, heapq.heappop(waiting)[3])
        for file, _ in poll.poll(max(waiting[0][0] - now, 0.0) if waiting else None):
            if file not in by_file:
                got = os.read(file, _FRAME)
                if not got:
                    return
                *lines, told = (told + got).split(b"\n")
                for line in lines:
                    change = json.loads(line)
                    port = ports[change.pop("port")]
                    port.link, port.free_at = replace(port.link, **change), 0.0
                continue
            source = by_file[file]
            for frame in _frames(file):
                for target in _targets(frame, source, len(ports)):
                    at = ports[source].passes(len(frame), time.monotonic(), draw)
                    due = None if at is None else ports[target].passes(len(frame), at, draw)
                    if due is not None:
                        number += 1
                        heapq.heappush(waiting, (due, number, target, frame))


def _frames(file: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < 64:
        try:
            found.append(os.read(file, _FRAME))
        except OSError:  # none left, or the device's namespace is gone
            break
    return found


def _targets(frame: bytes, source: int, ports: int) -> list[int]:
    """Where a frame goes: to the port of its address; to all others if it is for many."""
    if frame[0] & 1:
        return [port for port in range(ports) if port != source]
    target = frame[5]
    return [target] if target < ports and target != source else []


def _write(file: int, frame: bytes) -> None:
    try:
        os.write(file, frame)
    except OSError:  # its device is down, or its queue full: lost
        return


def main(names: list[str]) -> None:
    """Make the devices and forward between them."""
    ports = [Port(open_tap(name)) for name in names]
    print("ready", flush=True)
    forward(ports)


if __name__ == "__main__":
    main(sys.argv[1:])
