"""A front in a process of its own, for the tests that need one: ``python front.py ROLE METHOD``.

The first line that it prints is the engine's pid; the engine itself prints it in roles that wait for it to be ready.
"""

import asyncio
import ctypes
import os
import signal
import sys
import time

from shared.ops.supervise import EngineProcess, StartMethod

WHEN_READY = ("hang", "frozen", "no kernel")


def engine(role: str) -> None:
    if role == "no kernel":
        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # PR_SET_PDEATHSIG: none
    if role in WHEN_READY:
        print(os.getpid(), flush=True)
    if role == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)
    if role == "describe":
        ignored = [signal.getsignal(n) is signal.SIG_IGN for n in (signal.SIGINT, signal.SIGTERM)]
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        print(os.nice(0), *ignored, len(blocked), os.environ["OMP_WAIT_POLICY"], flush=True)
        return
    time.sleep(60)


def main(role: str, method: StartMethod) -> None:
    process = EngineProcess.start(engine, (role,), method=method)
    if role in WHEN_READY:
        time.sleep(60)
    print(process.pid, flush=True)
    if role == "crash":
        raise SystemExit(7)
    print(asyncio.run(process.died()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], "fork" if sys.argv[2] == "fork" else "spawn")
