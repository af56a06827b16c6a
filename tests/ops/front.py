"""A front in a process of its own, for the tests that need one: ``python front.py ROLE METHOD``.

It prints the engine's pid, then one line for what it sees.
"""

import asyncio
import ctypes
import os
import signal
import sys
import time

from shared.ops.supervise import EngineProcess, StartMethod


def engine(role: str) -> None:
    if role == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)
    if role == "no kernel":
        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # PR_SET_PDEATHSIG: none
    if role == "describe":
        ignored = [signal.getsignal(n) is signal.SIG_IGN for n in (signal.SIGINT, signal.SIGTERM)]
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        print(os.nice(0), *ignored, len(blocked), os.environ["OMP_WAIT_POLICY"], flush=True)
        return
    time.sleep(60)


def main(role: str, method: StartMethod) -> None:
    process = EngineProcess.start(engine, (role,), method=method)
    print(process.pid, flush=True)
    if role in ("hang", "frozen", "no kernel"):
        time.sleep(60)
    if role == "crash":
        raise SystemExit(7)
    print(asyncio.run(process.died()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], "fork" if sys.argv[2] == "fork" else "spawn")
