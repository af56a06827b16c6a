"""Receive sessions: one transfer engine for each writer incarnation, over the same memory. Retiring it is the fence."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from shared.errors import HandoffError
from shared.ids import PeerAddress
from shared.limited_log import RateLimitedLog
from shared.ops.host import Host
from shared.transfer.engine import TransferEngine
from shared.transfer.sender import open_engine

log = logging.getLogger(__name__)
RETRY_S = 1.0
LOG_PERIOD_S = 10.0


class ReceiveSessions:
    """``memory``: (address, bytes) of all that writers may be given. Nothing here blocks the loop."""

    def __init__(self, host: Host, make: Callable[[], TransferEngine], memory: Sequence[tuple[int, int]]) -> None:
        self._host, self._make, self._memory = host, make, memory
        self._limited = RateLimitedLog(log, LOG_PERIOD_S)
        self._engines: dict[tuple[PeerAddress, int], TransferEngine] = {}

    async def open(self, address: PeerAddress, registration: int) -> str:
        """The session's name; tried again until the memory can be registered."""
        while True:
            try:
                engine = await self._host.blocking(open_engine, self._make, self._memory)
                break
            except HandoffError as error:
                self._limited.warning(address, "cannot open a receive session for %s: %s", address, error.message)
                await asyncio.sleep(RETRY_S)
        self._engines[address, registration] = engine
        return engine.session

    async def fence(self, address: PeerAddress, registration: int) -> float:
        """Returns, once no byte can land through it any more, the seconds that took."""
        started_s = time.monotonic()
        engine = self._engines.pop((address, registration), None)
        if engine is not None:
            await self._host.blocking(engine.retire)
        took_s = time.monotonic() - started_s
        log.warning("fenced prefill %s (session %d) in %.3f s", address, registration, took_s)
        return took_s
