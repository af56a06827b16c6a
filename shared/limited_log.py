"""Warnings at a limited rate, for what a peer can make happen a thousand times a second."""

import logging
import time
from collections.abc import Callable, Mapping

MAX_KEYS = 256


class RateLimitedLog:
    """At most one line a key in each ``period_s``; the next one says how many were left out.

    Of more than ``MAX_KEYS`` keys in that time the later ones are left out: a key may be a stranger's word.
    ``clock`` gives monotonic seconds.
    """

    def __init__(self, logger: logging.Logger, period_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger, self._period_s, self._clock = logger, period_s, clock
        self._keys: dict[str, tuple[float, int]] = {}

    def warning(
        self,
        key: str,
        message: str,
        *args: object,
        exc_info: bool = False,
        extra: Mapping[str, object] | None = None,
    ) -> None:
        now_s = self._clock()
        last_s, suppressed = self._keys.get(key, (float("-inf"), 0))
        if now_s - last_s < self._period_s:
            self._keys[key] = (last_s, suppressed + 1)
            return
        self._keys.pop(key, None)
        if len(self._keys) >= MAX_KEYS:
            oldest = next(iter(self._keys))
            if now_s - self._keys[oldest][0] < self._period_s:
                return
            del self._keys[oldest]
        self._keys[key] = (now_s, 0)
        text = message % args if args else message
        if suppressed:
            text = f"{text} ({suppressed} more suppressed)"
        self._logger.warning("%s", text, exc_info=exc_info, stacklevel=2, extra=extra)
