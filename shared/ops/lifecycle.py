"""How a service's front lives: until a signal, with a bounded end; and how it reports the operator's mistakes."""

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from shared.errors import Blame, HandoffError

log = logging.getLogger(__name__)

Work = Callable[[], Coroutine[Any, Any, None]]
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def run_service(start: Work, drain: Work, *, limit_s: float) -> int:
    """Run ``start``, wait for SIGTERM or SIGINT, run ``drain``; returns the exit status 0. Main thread only.

    ``start`` returns when the service is up; a signal meanwhile cancels it. ``drain`` ends the service whatever state
    it is in, also after a failed start, and is cancelled after ``limit_s`` or by a second signal; a third one kills.
    Raises what ``start`` or, failing that, ``drain`` raises.
    """
    loop = asyncio.get_running_loop()
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal(name: str) -> None:
        log.info("%s: %s", name, "stopping at once" if stop.is_set() else "draining")
        if stop.is_set():
            hurry.set()
            release()
        stop.set()

    def release() -> None:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal, number.name)
    failure: Exception | None = None
    try:
        try:
            if await _run_until(stop, start()):
                await stop.wait()
        except Exception as error:
            failure = error
        try:
            if not await _run_until(hurry, drain(), limit_s):
                log.warning("stopped before everything had ended")
        except Exception:
            if failure is None:
                raise
            log.warning("cleaning up after a failed start failed too", exc_info=True)
    finally:
        release()
    if failure is not None:
        raise failure
    return 0


async def _run_until(event: asyncio.Event, work: Coroutine[Any, Any, None], limit_s: float | None = None) -> bool:
    """True where the work ended, False where the event or the limit came first and it was cancelled."""
    task, waiter = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, waiter}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
        ended = not task.cancel()
        await asyncio.wait({task, waiter})
    if ended:
        task.result()
    return ended


def main_guard(name: str, main: Callable[[], int]) -> int:
    """Exit status of ``main``; one line on stderr and 2 for what the operator can mend, 1 for what may be over at the
    next start (the engine was killed while it loaded); 130 for an early Ctrl-C. Defects keep their traceback."""
    try:
        return main()
    except HandoffError as error:
        if error.blame is not Blame.OPERATOR and not error.retryable:
            raise
        print(f"{name}: error: {' '.join(error.message.split())}", file=sys.stderr)
        return 2 if error.blame is Blame.OPERATOR else 1
    except KeyboardInterrupt:
        return 130
