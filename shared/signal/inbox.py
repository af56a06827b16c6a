"""What both channels do with frames that arrive. Nothing that goes wrong in here goes any further: an exception that
reaches the transport would silence it for good."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Generic

from shared.errors import MessageError
from shared.limited_log import RateLimitedLog
from shared.protocol.codec import Codec
from shared.signal.channel import ChannelCounters, Handler, M

LOG_PERIOD_S = 10.0


class Inbox(Generic[M]):
    """Decodes, counts and hands over. ``name`` tells one inbox's log lines from another's."""

    def __init__(self, codec: Codec[M], handler: Handler[M], name: str) -> None:
        self._codec, self._handler, self._name = codec, handler, name
        self.counters = ChannelCounters()
        self._log = RateLimitedLog(logging.getLogger(__name__), LOG_PERIOD_S)

    def deliver(self, frames: Sequence[bytes]) -> None:
        """One message. Raises nothing but what ends the process."""
        try:
            message = self._codec.decode(frames)
        except MessageError as error:
            self.counters.malformed += 1
            self._log.warning("malformed", "%s: dropped what a peer sent: %s", self._name, error.message)
            return
        self.counters.received += 1
        try:
            self._handler(message)
        except (Exception, asyncio.CancelledError) as error:
            self.counters.handler_errors += 1
            key = type(error).__name__
            self._log.warning(key, "%s: handling %s failed", self._name, type(message).__name__, exc_info=True)
