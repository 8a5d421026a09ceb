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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

Process = subprocess.Popen[bytes]

SHARED = Path("/mnt/shared")
_SPACES = "--net --uts --mount --pid"
_NEEDED = ("ip", "unshare", "nsenter", "mount", "setpriv")
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
    command = f"unshare {_SPACES} --fork mount -t tmpfs none /mnt".split()
    tried = subprocess.run(command, capture_output=True, text=True)
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


class Host:
    """One host: the namespaces of a process that holds them.

    Args:
        name: its host name.
        port: of the switch; its address is 10.77.0.(port + 1).
    """

    def __init__(self, name: str, port: int, names: Path, shared: Path, switch: Process) -> None:
        self.name, self._port, self._switch = name, port, switch
        # setpriv ends it with the process that started it, however that ends.
        command = f"setpriv --pdeathsig KILL unshare {_SPACES} --fork --kill-child --mount-proc sh -c".split()
        self._holder = _start([*command, _SET_UP, name, str(shared), str(names)], stdin=subprocess.DEVNULL)
        self._started = [self._holder]
        try:
            children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
            self._init = int(_when_ready(self._holder, children.read_text))
            self._enter = f"nsenter --target {self._init} {_SPACES}".split()
            move = f"ip link set tap{port} address 02:00:00:00:00:{port:02x} netns {self._init}"
            _run([*f"nsenter --target {switch.pid} --net".split(), *move.split()])
            for line in (
                f"link set tap{port} name eth0",
                "link set lo up",
                f"address add {address_of(port)}/24 dev eth0",
                "link set eth0 up",
            ):
                self.run("ip", *line.split())
        except BaseException:
            self.kill()
            raise

    def start(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> Process:
        """Run a command on this host, in its temporary folder; append its output to `log`."""
        temporary = SHARED.parent / "tmp"
        variables = {**os.environ, "TMPDIR": str(temporary), **(environment or {})}
        with log.open("ab") as file:
            entered = [*self._enter, f"--wdns={temporary}", *command]
            running = subprocess.Popen(
                entered, env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )
        self._started.append(running)
        return running

    def run(self, *command: str) -> None:
        """Run a command on this host and wait; raises RuntimeError if it fails."""
        _run([*self._enter, *command])

    def link(self, **change: float) -> None:
        """Change attributes of this host's `Port`: delay, loss, rate, down."""
        assert self._switch.stdin is not None
        self._switch.stdin.write(json.dumps({"port": self._port, **change}).encode() + b"\n")
        self._switch.stdin.flush()

    def processes(self) -> list[int]:
        """Ids, outside, of all processes of this host but the one that holds it."""
        namespace = os.stat(f"/proc/{self._init}/ns/pid").st_ino
        processes = []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.stat(f"/proc/{entry}/ns/pid").st_ino == namespace and int(entry) != self._init:
                    processes.append(int(entry))
            except OSError:  # ended meanwhile
                continue
        return processes

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of this host: SIGSTOP freezes it, SIGCONT thaws it."""
        for pid in self.processes():
            os.kill(pid, number)
        for process in self._started[1:]:  # nsenter stops when its child does, and stays so
            process.send_signal(number)

    def kill(self) -> None:
        """End all its processes at once. With its link down before, others see what they see of a power cut."""
        self._holder.kill()  # takes the first process of its PID namespace with it, and the kernel all others
        for process in self._started:
            process.wait()
        _close(self._holder)


@contextmanager
def Hosts(names: Sequence[str], shared: Path) -> Iterator[list[Host]]:  # noqa: N802  # reads as a type
    """Hosts joined by a switch, which have the folder `shared` as `SHARED`; all are gone on leaving."""
    with ExitStack() as closing:
        file = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="hosts-"))) / "hosts"
        rows = [f"{address_of(port)} {name}" for port, name in enumerate(names)]
        file.write_text("\n".join(["127.0.0.1 localhost", *rows, ""]))
        script, devices = str(Path(__file__).with_name("switch.py")), [f"tap{n}" for n in range(len(names))]
        switch = _start(["unshare", "--net", sys.executable, "-S", script, *devices], stdin=subprocess.PIPE)
        closing.callback(_close, switch)
        _when_ready(switch, str)
        hosts = []
        for port, name in enumerate(names):
            hosts.append(Host(name, port, file, shared, switch))
            closing.callback(hosts[-1].kill)
        yield hosts


def address_of(port: int) -> str:
    """The address of the host at a port of the switch."""
    return f"10.77.0.{port + 1}"


def wait_until(seconds: float, happened: Callable[[], bool], what: str) -> None:
    """Look ten times a second until `happened()` is true. Raises TimeoutError."""
    begin = time.monotonic()
    while not happened():
        if time.monotonic() - begin > seconds:
            raise TimeoutError(f"no {what} within {seconds:g} s")
        time.sleep(0.1)


def _start(command: Sequence[str], stdin: int) -> Process:
    return subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE)


def _when_ready(process: Process, then: Callable[[], str]) -> str:
    assert process.stdout is not None
    if process.stdout.readline().strip() != b"ready":
        raise RuntimeError(f"{process.args!r} ended with status {process.wait()}")
    return then()


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


def _close(process: Process) -> None:
    process.kill()
    process.wait()
    for stream in filter(None, (process.stdin, process.stdout)):
        stream.close()
