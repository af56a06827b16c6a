"""Sending a chunk layer by layer while later layers are still computed.

Three threads meet here, and share nothing but what is named below. The event loop opens a ``Context`` for each chunk
of the next forward, collects them in a ``Step``, and later asks for their end. The compute thread calls
``Step.layer_end``, which costs O(1) but for the last layer of a group. The peer's worker submits and waits
(``Outgoing``).

Hand-over sentence: what an ``Outgoing`` has submitted may be read until ``settle`` has returned, or, if it raised,
until the engine is retired. Contexts belong to one step: a layer's end reaches no chunk of another forward (S18).
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shared.errors import TransferFailed
from shared.ids import AttemptKey
from shared.transfer.engine import Batch, Blocks, TransferEngine
from shared.transfer.plan import Pairing, Runs

Wait = Callable[[], None]
"""Returns when the layer's rows are in memory."""
Open = Callable[[], TransferEngine]
"""The worker's engine, made at the first call. Raises TransferFailed."""
Work = Callable[[Open, str], None]
Post = Callable[[Work], None]
"""Gives the worker something to do, after all that it was given before; from any thread, at once."""


def at_once() -> None:
    """Nothing to wait for."""


class LayerGroups:
    """Consecutive groups of ``size`` layers (S23). ``layers`` names the layer of each region, in region order."""

    def __init__(self, layers: Sequence[int], size: int) -> None:
        distinct = list(dict.fromkeys(layers))
        self.count = len(layers)
        self.position = {layer: i for i, layer in enumerate(distinct)}
        self.groups = [range(i, min(i + size, len(distinct))) for i in range(0, len(distinct), size)]
        self.closes = {group[-1]: group for group in self.groups}
        """Position of a group's last layer → that group's positions."""
        at = np.array([self.position[layer] for layer in layers])
        self._regions = [np.flatnonzero(at == i) for i in range(len(distinct))]

    def regions(self, positions: Sequence[int]) -> npt.NDArray[np.intp]:
        """The regions of these layers."""
        return np.concatenate([self._regions[i] for i in positions])


@dataclass
class Outgoing:
    """All that is sent for one attempt. Only its peer's worker touches it, but for ``halted``."""

    halted: bool = False
    """Set by the loop when nobody wants the rest: no more is submitted."""
    error: Exception | None = None
    """The first failure; nothing is submitted after it."""
    sent_bytes: int = 0
    first_s: float = 0.0
    _engine: TransferEngine | None = None
    _batches: deque[Batch] = field(default_factory=deque)

    def submit(self, open_engine: Open, session: str, blocks: Blocks) -> None:
        if self.halted or self.error is not None or not len(blocks):
            return
        try:
            engine = self._same(open_engine())
            self.first_s = self.first_s or time.monotonic()
            self._batches.append(engine.submit(session, blocks))
            self.sent_bytes += blocks.total_bytes
        except Exception as error:
            self.error = error

    def settle(self, open_engine: Open) -> None:
        """Wait for everything that was submitted. Raises the first failure. After a batch that failed the others are
        not waited for: each might take a time-out of its own, and all of them end with the engine."""
        if self._batches:
            engine = self._same(open_engine())
            while self._batches:
                engine.wait(self._batches.popleft())
        if self.error is not None:
            raise self.error

    def _same(self, engine: TransferEngine) -> TransferEngine:
        if self._engine is None:
            self._engine = engine
        if self._engine is not engine:
            raise TransferFailed("the engine that earlier layers went through was retired")
        return engine


class Context:
    """One chunk on its way to one session: its runs are known (S13), its layers come one group after the other."""

    def __init__(self, outgoing: Outgoing, pairing: Pairing, runs: Runs, post: Post) -> None:
        self.outgoing, self.post = outgoing, post
        self._pairing, self._runs = pairing, runs
        self._left = np.ones(len(pairing.bases), bool)
        """Regions that were not submitted yet. The worker's."""

    def send(self, regions: npt.NDArray[np.intp], ready: Wait, open_engine: Open, session: str) -> None:
        """In the worker: wait until these regions' rows are there, then submit them, each at most once (S15)."""
        if self.outgoing.halted or self.outgoing.error is not None:
            return
        try:  # whatever goes wrong here must be heard at the end: nobody waits for this call
            regions = regions[self._left[regions]]
            if len(regions):
                ready()
                self.outgoing.submit(open_engine, session, self._pairing.blocks(self._runs, regions))
                self._left[regions] = False
        except Exception as error:
            self.outgoing.error = error

    def sweep(self, ready: Wait, open_engine: Open, session: str) -> None:
        """In the worker, once the forward has ended: all that no layer's end has sent, in one submit (S22)."""
        self.send(np.flatnonzero(self._left), ready, open_engine, session)


class Step:
    """The contexts of one forward (S18). ``record`` marks a point in the device's work and gives a wait for it."""

    def __init__(self, groups: LayerGroups, record: Callable[[], Wait], contexts: Sequence[Context]) -> None:
        self._groups, self._record, self._contexts = groups, record, contexts
        self._ended = [False] * len(groups.position)
        self.submits = 0

    def layer_end(self, layer: int) -> None:
        """In the compute thread, when a layer's last component is written. A group goes when its last layer ends, with
        those of its layers that did; the others are left to the sweep."""
        position = self._groups.position.get(layer)
        if position is None or self._ended[position]:
            return
        self._ended[position] = True
        group = self._groups.closes.get(position)
        if group is None or not self._contexts:
            return
        regions = self._groups.regions([i for i in group if self._ended[i]])
        ready = self._record()  # one event for all contexts
        for context in self._contexts:
            self.submits += 1
            context.post(_Send(context, regions, ready))


@dataclass(frozen=True)
class _Send:
    context: Context
    regions: npt.NDArray[np.intp]
    ready: Wait

    def __call__(self, open_engine: Open, session: str) -> None:
        self.context.send(self.regions, self.ready, open_engine, session)


class ActiveContexts:
    """Open contexts of each attempt in the order of their chunks (S19). The loop's alone."""

    def __init__(self) -> None:
        self._open: dict[AttemptKey, tuple[Outgoing, deque[tuple[int, Context]]]] = {}

    def register(self, key: AttemptKey, chunk: int, make: Callable[[Outgoing], Context]) -> Context | None:
        """A context for the chunk that begins at token ``chunk``; None where it has one (S20)."""
        outgoing, contexts = self._open.setdefault(key, (Outgoing(), deque()))
        if any(known == chunk for known, _ in contexts):
            return None
        context = make(outgoing)
        contexts.append((chunk, context))
        return context

    def finish(self, key: AttemptKey, chunk: int) -> Context | None:
        """The context of a chunk whose forward has ended, if it is the first in the queue; it is forgotten here."""
        _, contexts = self._open.get(key, (None, deque()))
        return contexts.popleft()[1] if contexts and contexts[0][0] == chunk else None

    def halt(self, key: AttemptKey) -> None:
        """Nothing more of this attempt is submitted."""
        if key in self._open:
            self._open[key][0].halted = True

    def outgoing(self, key: AttemptKey) -> Outgoing:
        """All that was sent for the attempt so far."""
        return self._open.setdefault(key, (Outgoing(), deque()))[0]

    def drop(self, key: AttemptKey) -> None:
        """Forget an attempt that is settled, and contexts that nobody finished."""
        self._open.pop(key, None)

    def __len__(self) -> int:
        return len(self._open)


def one_destination(real: Sequence[bool]) -> bool:
    """S26: may a room go by layer? Only if exactly one of its destinations is no dummy."""
    return sum(real) == 1
