"""A process that imports torch once and forks ranks: a rank costs milliseconds and shares the imported pages.

It has one thread and no process group, so forking is safe. Commands arrive over a socket, one message each:
``fork`` (with the rank's own socket as a file descriptor) is answered with a pid, ``wait <pid>`` with an exit status.
When the socket closes, the test process has ended, and this one ends too.
"""

import contextlib
import gc
import os
import socket
import sys
import threading

_MESSAGE = 4096  # bytes at most, either way


def main(control_fd: int, modules: list[str]) -> None:
    """Serve forks until the control socket closes."""
    import importlib

    import torch.distributed.checkpoint
    import torch.distributed.tensor  # noqa: F401

    import ragged_shard.testing._worker as worker
    from ragged_shard._torch_compat import IMPORTED_LATE

    control = socket.socket(fileno=control_fd)
    for name in (*IMPORTED_LATE, *modules):
        try:
            importlib.import_module(name)
        except Exception as error:
            control.send(f"cannot import {name}: {error}".encode()[:_MESSAGE])
            raise
        if threading.active_count() > 1:
            control.send(f"importing {name} started a thread: it cannot be preloaded".encode()[:_MESSAGE])
            os._exit(1)
    gc.collect()
    gc.freeze()  # collections in the ranks pass over imported objects, and leave its pages shared
    control.send(b"ready")
    while True:
        message, fds, _, _ = socket.recv_fds(control, _MESSAGE, 1)
        if not message:
            os._exit(0)
        command, _, argument = message.decode().partition(" ")
        if command == "fork":
            pid = os.fork()
            if pid == 0:
                control.close()
                worker.main(fds[0], argument)
                os._exit(0)
            os.close(fds[0])
            control.send(str(pid).encode())
        elif command == "wait":
            status = 0
            with contextlib.suppress(ChildProcessError):
                status = os.waitstatus_to_exitcode(os.waitpid(int(argument), 0)[1])
            control.send(str(status).encode())


if __name__ == "__main__":
    sys.path[:] = sys.argv[2].split(os.pathsep)
    main(int(sys.argv[1]), [name for name in sys.argv[3].split(",") if name])
