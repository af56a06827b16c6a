"""Warnings at a limited rate, for what a peer can make happen a thousand times a second."""

import logging
import time
from collections.abc import Callable

MAX_KEYS = 256


class RateLimitedLog:
    """At most one line a key in each ``period_s``; the next one says how many were left out.

    Beyond ``MAX_KEYS`` keys the one seen first is forgotten, so that memory stays flat. ``clock`` gives monotonic
    seconds.
    """

    def __init__(self, logger: logging.Logger, period_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger, self._period_s, self._clock = logger, period_s, clock
        self._keys: dict[str, tuple[float, int]] = {}

    def warning(self, key: str, message: str, *args: object, exc_info: bool = False) -> None:
        now_s = self._clock()
        last_s, suppressed = self._keys.get(key, (float("-inf"), 0))
        if now_s - last_s < self._period_s:
            self._keys[key] = (last_s, suppressed + 1)
            return
        if key not in self._keys and len(self._keys) >= MAX_KEYS:
            del self._keys[next(iter(self._keys))]
        self._keys[key] = (now_s, 0)
        text = message % args if args else message
        if suppressed:
            text = f"{text} ({suppressed} more suppressed)"
        self._logger.warning("%s", text, exc_info=exc_info, stacklevel=2)
