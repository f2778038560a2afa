"""The module becomes the program named, after it has asked the kernel to kill it when its parent dies.

    python -I -S guard.py PARENT_PID PROGRAM [ARGUMENT...]

So not even ``kill -9`` of a supervisor leaves its children behind. It is a wrapper, because code between fork and exec
of a process with threads may deadlock; the request survives the exec. It works on Linux only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent_pid: int, command: list[str]) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    # A parent that died before the request took hold would otherwise go unnoticed.
    if os.getppid() != parent_pid:
        sys.exit("the supervisor is gone")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot run {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
