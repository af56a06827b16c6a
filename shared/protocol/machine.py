"""The three state machines of a hand-over, as literal tables. Nothing else decides what may follow what.

Rules that the tables encode; the tests name them, the random walk tries to break them:

1. A request (decode) has exactly one ending: the one transition into DONE or FAILED carries END, and nothing leaves
   those states.
2. A lease (decode) is freed only on proof: it was never announced, its owner is done with it, its writer says that it
   has stopped and that no write through the session ever failed, or decode fenced the session. Giving up, a time-out
   or a lost peer only quarantine it (S66); so does a writer that stopped after a failure, whose bytes may still lie in
   this side's socket buffers.
3. A lease and the request that it was made for part when an attempt fails: the request may go on with a fresh lease
   while the old one waits for its proof. Or without one: decode may compute a prompt itself, in pages of its own.
4. A sender (prefill) frees its pages only when neither a forward nor a transfer touches them. Layers are written while
   later ones compute, so what ends before its metadata row is DROPped first: nothing more is submitted, what was is
   waited for. A failed write has not stopped: DRAIN comes first (the engine's -1 is no proof).
5. Every attempt that prefill has accepted ends in Completed, Failed or AbortAck, each of them sent only after the
   last byte. Completed and Failed are repeated until Ack; decode repeats Abort until any of the three answers. GivenUp
   only says that no result will come, so that nobody waits for it; it frees nothing.
6. An event that a state does not list is a defect and raises StateError. What a network may repeat or reorder is
   listed, mostly as a transition to the same state.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

from shared.errors import StateError


class Do(Enum):
    """Instructions: what a transition asks its shell to carry out."""

    SEND_PREFILL = "send Prefill"
    SEND_ABORT = "send Abort"
    SEND_ACK = "send Ack"
    SEND_ABORT_ACK = "send AbortAck"
    SEND_RESULT = "send Completed or Failed"
    SEND_GIVEN_UP = "send GivenUp"
    DIGEST = "compute the digest of what landed"
    QUARANTINE = "quarantine pages and slot"
    FREE = "free pages and slot"
    FREE_SLOT = "free slot"
    PREBUILD = "run the prebuilt step"
    WRITE = "write what is left, then the metadata row"
    SWEEP = "write the chunk's layers that are left"
    HALT = "write no more"
    DROP = "wait for what is being written"
    DRAIN = "retire the sending engine"
    END = "end the client's request"


class RequestState(Enum):
    """decode: what the client's request is waiting for."""

    WAITING = "waiting"  # for pages, a slot and a peer
    REQUESTED = "requested"  # from a prefill peer
    LANDED = "landed"  # committed; its metadata row not consumed yet
    COMPUTING = "computing"  # its prompt, by decode itself
    RUNNING = "running"  # in the decode batch
    DONE = "done"
    FAILED = "failed"


class RequestEvent(Enum):
    ADMIT = "admit"
    COMMIT = "commit"
    LOSE = "lose attempt"  # and try once more
    PREBUILT = "prebuilt step done"
    ADMIT_LOCAL = "admit without a prefill"
    COMPUTED = "decode has computed its prompt"
    FINISH = "finish"
    CANCEL = "client cancels"
    FAIL = "fail"


class LeaseState(Enum):
    """decode: who may write to one attempt's landing pages and slot."""

    HELD = "held"  # nobody was told
    EXPOSED = "exposed"  # announced: its writer may write at any time
    VERIFYING = "verifying"  # proven complete, its content being compared
    QUARANTINED = "quarantined"  # given up, its writer may still write
    OWNED = "owned"  # proven complete; the request's alone
    FREE = "free"


class LeaseEvent(Enum):
    ANNOUNCE = "announce"
    VERIFY = "completion proves coverage, digest asked for"
    PROVE = "proven complete"
    DISCARD = "complete, but not what was sent or not wanted"
    STOPPED = "writer stopped cleanly"
    ABANDON = "give up"
    REPEAT = "abort timer"
    FENCED = "session fenced"
    RELEASE = "owner is done"


class SenderState(Enum):
    """prefill: what one attempt's pages are in use for."""

    QUEUED = "queued"  # for its first forward: nothing of it was written
    COMPUTING = "computing"  # in the forward that runs now, its finished layers perhaps being written
    PARTIAL = "partial"  # between two chunks, the earlier ones perhaps being written
    WRITING = "writing"
    DRAINING = "draining"  # a write failed; will end in Failed
    FAILING = "failing"  # stopped on this side with a forward or a transfer still running; will end in Failed
    ABORTING = "aborting"  # aborted with a forward or a transfer still running; will end in AbortAck
    ANNOUNCED = "announced"  # result sent, not acknowledged
    RELEASED = "released"


class SenderEvent(Enum):
    START = "forward starts"
    CHUNK = "chunk computed, more to come"
    COMPUTED = "last chunk computed"
    COMPUTE_FAILED = "forward failed"
    WRITTEN = "all that was sent has landed"
    WRITE_FAILED = "transfer failed"
    DRAINED = "sending engine retired"
    REFUSE = "cannot be served"
    STOP = "stopped by the operator, or too late"
    ABORT = "abort, or decode is lost"
    ACK = "acknowledged"
    REPEAT = "result timer"


S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)
Step = tuple[S, tuple[Do, ...]]


class Table(Generic[S, E]):
    """A literal transition table. ``step`` looks up; ``diagram`` draws it for the documentation."""

    def __init__(self, name: str, rows: Mapping[S, Mapping[E, Step[S]]]) -> None:
        self.name, self.rows = name, rows

    def step(self, state: S, event: E) -> Step[S]:
        """(next state, instructions in order). Raises StateError for an event that the state does not list."""
        try:
            return self.rows[state][event]
        except KeyError:
            raise StateError(f"{self.name}: {event.value!r} cannot happen in state {state.value!r}") from None

    def diagram(self) -> str:
        """Mermaid text, one line a transition, in the order of the table."""
        lines = ["stateDiagram-v2"]
        for state, row in self.rows.items():
            for event, (after, todo) in row.items():
                does = f" / {', '.join(do.value for do in todo)}" if todo else ""
                lines.append(f"    {state.name} --> {after.name}: {event.value}{does}")
        return "\n".join(lines)


_R, _RE = RequestState, RequestEvent
REQUEST: Table[RequestState, RequestEvent] = Table(
    "request",
    {
        _R.WAITING: {
            _RE.ADMIT: (_R.REQUESTED, ()),
            _RE.ADMIT_LOCAL: (_R.COMPUTING, ()),
            _RE.CANCEL: (_R.DONE, (Do.END,)),
            _RE.FAIL: (_R.FAILED, (Do.END,)),
        },
        _R.REQUESTED: {
            _RE.COMMIT: (_R.LANDED, (Do.PREBUILD,)),
            _RE.LOSE: (_R.WAITING, ()),
            _RE.CANCEL: (_R.DONE, (Do.END,)),
            _RE.FAIL: (_R.FAILED, (Do.END,)),
        },
        _R.LANDED: {
            _RE.PREBUILT: (_R.RUNNING, (Do.FREE_SLOT,)),
            _RE.CANCEL: (_R.DONE, (Do.FREE, Do.END)),
            _RE.FAIL: (_R.FAILED, (Do.FREE, Do.END)),
        },
        _R.COMPUTING: {
            _RE.COMPUTED: (_R.RUNNING, ()),
            _RE.CANCEL: (_R.DONE, (Do.FREE, Do.END)),
            _RE.FAIL: (_R.FAILED, (Do.FREE, Do.END)),
        },
        _R.RUNNING: {
            _RE.FINISH: (_R.DONE, (Do.FREE, Do.END)),
            _RE.CANCEL: (_R.DONE, (Do.FREE, Do.END)),
            _RE.FAIL: (_R.FAILED, (Do.FREE, Do.END)),
        },
        _R.DONE: {},
        _R.FAILED: {},
    },
)

_L, _LE = LeaseState, LeaseEvent
LEASE: Table[LeaseState, LeaseEvent] = Table(
    "lease",
    {
        _L.HELD: {
            _LE.ANNOUNCE: (_L.EXPOSED, (Do.SEND_PREFILL,)),
            _LE.RELEASE: (_L.FREE, (Do.FREE,)),
        },
        _L.EXPOSED: {
            _LE.VERIFY: (_L.VERIFYING, (Do.SEND_ACK, Do.DIGEST)),
            _LE.PROVE: (_L.OWNED, (Do.SEND_ACK,)),
            _LE.STOPPED: (_L.FREE, (Do.SEND_ACK, Do.FREE)),
            _LE.ABANDON: (_L.QUARANTINED, (Do.QUARANTINE, Do.SEND_ABORT)),
            _LE.FENCED: (_L.FREE, (Do.FREE,)),
        },
        _L.VERIFYING: {
            _LE.PROVE: (_L.OWNED, ()),
            _LE.STOPPED: (_L.VERIFYING, (Do.SEND_ACK,)),
            _LE.DISCARD: (_L.FREE, (Do.FREE,)),
            _LE.FENCED: (_L.VERIFYING, ()),
        },
        _L.QUARANTINED: {
            _LE.STOPPED: (_L.FREE, (Do.SEND_ACK, Do.FREE)),
            _LE.FENCED: (_L.FREE, (Do.FREE,)),
            _LE.ABANDON: (_L.QUARANTINED, ()),
            _LE.REPEAT: (_L.QUARANTINED, (Do.SEND_ABORT,)),
        },
        _L.OWNED: {
            _LE.STOPPED: (_L.OWNED, (Do.SEND_ACK,)),
            _LE.FENCED: (_L.OWNED, ()),
            _LE.RELEASE: (_L.FREE, (Do.FREE,)),
        },
        _L.FREE: {},
    },
)

_S, _SE = SenderState, SenderEvent
SENDER: Table[SenderState, SenderEvent] = Table(
    "sender",
    {
        _S.QUEUED: {
            _SE.START: (_S.COMPUTING, ()),
            _SE.REFUSE: (_S.ANNOUNCED, (Do.FREE, Do.SEND_RESULT)),
            _SE.STOP: (_S.ANNOUNCED, (Do.FREE, Do.SEND_RESULT)),
            _SE.ABORT: (_S.RELEASED, (Do.FREE, Do.SEND_ABORT_ACK)),
        },
        _S.COMPUTING: {
            _SE.CHUNK: (_S.PARTIAL, (Do.SWEEP,)),
            _SE.COMPUTED: (_S.WRITING, (Do.WRITE,)),
            _SE.COMPUTE_FAILED: (_S.FAILING, (Do.DROP,)),
            _SE.STOP: (_S.FAILING, (Do.HALT, Do.SEND_GIVEN_UP)),
            _SE.ABORT: (_S.ABORTING, (Do.HALT,)),
        },
        _S.PARTIAL: {
            _SE.START: (_S.COMPUTING, ()),
            _SE.REFUSE: (_S.FAILING, (Do.SEND_GIVEN_UP, Do.DROP)),
            _SE.STOP: (_S.FAILING, (Do.SEND_GIVEN_UP, Do.DROP)),
            _SE.ABORT: (_S.ABORTING, (Do.DROP,)),
        },
        _S.WRITING: {
            _SE.WRITTEN: (_S.ANNOUNCED, (Do.FREE, Do.SEND_RESULT)),
            _SE.WRITE_FAILED: (_S.DRAINING, (Do.DRAIN,)),
            _SE.STOP: (_S.FAILING, (Do.HALT, Do.SEND_GIVEN_UP)),
            _SE.ABORT: (_S.ABORTING, (Do.HALT,)),
        },
        _S.DRAINING: {
            _SE.DRAINED: (_S.ANNOUNCED, (Do.FREE, Do.SEND_RESULT)),
            _SE.ABORT: (_S.ABORTING, ()),
        },
        _S.FAILING: {
            _SE.CHUNK: (_S.FAILING, (Do.DROP,)),
            _SE.COMPUTED: (_S.FAILING, (Do.DROP,)),
            _SE.COMPUTE_FAILED: (_S.FAILING, (Do.DROP,)),
            _SE.WRITTEN: (_S.ANNOUNCED, (Do.FREE, Do.SEND_RESULT)),
            _SE.WRITE_FAILED: (_S.DRAINING, (Do.DRAIN,)),
            _SE.REPEAT: (_S.FAILING, (Do.SEND_GIVEN_UP,)),
            _SE.ABORT: (_S.ABORTING, ()),
        },
        _S.ABORTING: {
            _SE.CHUNK: (_S.ABORTING, (Do.DROP,)),
            _SE.COMPUTED: (_S.ABORTING, (Do.DROP,)),
            _SE.COMPUTE_FAILED: (_S.ABORTING, (Do.DROP,)),
            _SE.WRITTEN: (_S.RELEASED, (Do.FREE, Do.SEND_ABORT_ACK)),
            _SE.WRITE_FAILED: (_S.ABORTING, (Do.DRAIN,)),
            _SE.DRAINED: (_S.RELEASED, (Do.FREE, Do.SEND_ABORT_ACK)),
            _SE.ABORT: (_S.ABORTING, ()),
        },
        _S.ANNOUNCED: {
            _SE.ACK: (_S.RELEASED, ()),
            _SE.REPEAT: (_S.ANNOUNCED, (Do.SEND_RESULT,)),
            _SE.ABORT: (_S.RELEASED, (Do.SEND_ABORT_ACK,)),
        },
        _S.RELEASED: {},
    },
)
