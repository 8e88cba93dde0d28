"""Runs as the first program of every part: ties its life to the supervisor's, then becomes the part.

    python launch.py SUPERVISOR_PID PROGRAM ARGUMENT...

The parent-death signal survives exec, so even a SIGKILL of the supervisor takes the part along. A program
of its own rather than a function between fork and exec: gRPC's threads make code after fork unsafe.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask for SIGKILL at the parent's death and exec the part."""
    supervisor, program = int(sys.argv[1]), sys.argv[2]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # The supervisor may have died before the signal was asked for.
        if os.getppid() != supervisor:
            sys.exit(1)
    os.execv(program, sys.argv[2:])


if __name__ == "__main__":
    main()
