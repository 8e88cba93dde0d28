"""The vllm.general_plugins entry point: engine cores and workers die with the process that started them.

vLLM calls `register` in each of its processes. A front end that is SIGKILLed can't stop its engine core,
which would live on with its memory and its ports, so the kernel is asked to do it.
"""

import atexit
import ctypes
import gc
import multiprocessing
import os
import signal
import sys

PARENT_ENV = "KVLOOP_ENGINE_PARENT_PID"
"""Set by a process that starts an engine, to its own pid. Without it nothing is done.

The kernel sends the signal when the *thread* that started the child ends, so start engines from a thread
that lives as long as the process.
"""

_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Called by vLLM in every process of an engine, its front end included."""
    owner = os.environ.get(PARENT_ENV, "")
    parent = multiprocessing.parent_process()
    if not owner.isdecimal() or int(owner) == os.getpid() or parent is None or parent.pid is None:
        return
    if sys.platform != "linux":
        return
    die_with(parent.pid)
    # Everything is torn down by then; the last garbage collection of a heap this size takes seconds.
    atexit.register(gc.freeze)


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies; die at once if it is dead already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
