"""Decode's view of its prefill peers: who may be asked, through which session they write, who is lost.

Hand-over sentence: each peer incarnation writes through one receive session of its own. The session is opened here,
offered by Register, and retired by Fence when the peer is lost; a later incarnation gets a fresh one. So a fence
ends one writer and disturbs no other.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from decode_svc.effects import Effect, Fence, OpenSession, Send, Up
from shared.ids import Epoch, PeerAddress
from shared.protocol.local import PeerStatus
from shared.protocol.messages import Difference, Heartbeat, Refused, Region, Register, Registered

HEARTBEAT_S = 0.5
LOST_S = 3.5
"""A frozen peer is noticed within five seconds."""
SUSPECT_S = 0.75
"""Patience with a peer whose connection has just ended: if its process died, clients hear of it within two seconds."""
SUSPICION_S = 3.0
STALL_S = 0.75
"""A loop that did not tick for so long judges nobody before it has listened again."""
REGISTER_S = 1.0
HOPE_S = 3.0
"""How long requests wait for a peer that was heard from and is about to register again."""
GRACE_S = 1.0
"""How long a new request waits for a peer that is not there: twice what a link needs to find one that is back, so that
the first request after a restart finds it."""
RETRY_GRACE_S = 0.5
"""How long one waits whose attempt was lost: clients hear of a death within two seconds."""


SESSIONS_A_MINUTE = 30
"""A session takes ports that nobody else gets for a while: a peer that comes and goes may not use them up."""


class PeerState(Enum):
    CONNECTING = "connecting"  # session open or opening, Register not answered
    REGISTERED = "registered"
    REFUSED = "refused"  # the pair does not match; asked again, because the other side may be restarted
    LOST = "lost"  # being fenced; CONNECTING again afterwards


@dataclass
class Peer:
    address: PeerAddress
    state: PeerState = PeerState.CONNECTING
    epoch: Epoch = Epoch(0)
    registration: int = 0
    session: str = ""
    capacity_tokens: int = 0
    differences: list[Difference] = field(default_factory=list)
    last_seen_s: float = float("-inf")
    away_since_s: float = 0.0
    suspect_until_s: float = float("-inf")
    next_register_s: float = 0.0
    opened_s: deque[float] = field(default_factory=lambda: deque(maxlen=SESSIONS_A_MINUTE))
    """When its latest sessions were opened."""
    open_at_s: float = float("inf")
    """When a session that has to wait may be opened."""
    draining: bool = False
    """It says that it takes nothing new."""
    outstanding_tokens: int = 0
    """Prompt tokens asked for and not answered: the load that ``pick`` balances."""

    def __str__(self) -> str:
        differences = f" ({'; '.join(map(str, self.differences))})" if self.differences else ""
        return f"{self.address} is {self.status().state}{differences}"

    def status(self) -> PeerStatus:
        if self.draining and self.state is PeerState.REGISTERED:
            return PeerStatus(self.address, "draining", self.epoch, self.capacity_tokens)
        return PeerStatus(self.address, self.state.value, self.epoch, self.capacity_tokens, self.differences)


class PeerBook:
    """All configured peers. Methods are synchronous; times are seconds of one monotonic clock."""

    def __init__(
        self,
        addresses: Sequence[PeerAddress],
        *,
        epoch: Epoch,
        reply_to: PeerAddress,
        fingerprint: dict[str, str],
        regions: list[Region],
    ) -> None:
        self.peers = {address: Peer(address) for address in addresses}
        self._epoch, self._reply_to = epoch, reply_to
        self._fingerprint, self._regions = fingerprint, regions
        self._last_tick_s: float | None = None
        self._next_beat_s = 0.0
        self.beats = 0
        """Number of the last heartbeat sent."""

    def start(self, now_s: float) -> list[Effect]:
        for peer in self.peers.values():
            peer.away_since_s = now_s
        return [effect for peer in self.peers.values() for effect in self._open(peer, now_s)]

    def session_ready(self, address: PeerAddress, registration: int, session: str) -> None:
        """The shell has opened it; Register goes out with the next tick."""
        peer = self.peers[address]
        if peer.registration == registration:
            peer.session, peer.next_register_s = session, 0.0

    def fenced(self, address: PeerAddress, registration: int, now_s: float) -> list[Effect]:
        """The session is retired; a fresh one replaces it."""
        peer = self.peers[address]
        return self._open(peer, now_s) if peer.registration == registration else []

    def find(self, epoch: Epoch) -> Peer | None:
        """The peer whose registered incarnation this is."""
        return next((p for p in self.peers.values() if p.epoch == epoch and p.state is PeerState.REGISTERED), None)

    def pick(self, prompt_tokens: int, avoid: PeerAddress | None = None) -> Peer | None:
        """The registered peer that can take the prompt and has least to do; ``avoid`` only if there is no other. None
        that is draining."""
        able = [p for p in self.peers.values() if self._able(p, prompt_tokens)]
        return min(able, key=lambda p: (p.address == avoid, p.outstanding_tokens), default=None)

    def hopeful(self, prompt_tokens: int, now_s: float, patience_s: float = 0.0) -> bool:
        """Does any peer take this prompt, or may one soon: it was heard from lately and is about to register again?
        With ``patience_s`` left, any that may still answer at all will do."""
        return any(
            self._able(p, prompt_tokens)
            or (
                p.state in (PeerState.CONNECTING, PeerState.LOST) and (patience_s > 0 or now_s - p.last_seen_s < HOPE_S)
            )
            for p in self.peers.values()
        )

    def largest_capacity_tokens(self) -> int:
        """The longest prompt that a registered peer takes; 0: there is none."""
        return max((p.capacity_tokens for p in self.peers.values() if p.state is PeerState.REGISTERED), default=0)

    def named(self, registration: int) -> Peer | None:
        return next((p for p in self.peers.values() if p.registration == registration), None)

    def on_registered(self, message: Registered, now_s: float) -> tuple[list[Peer], list[Effect]]:
        """(peers that this makes lost, what to do). Lost is another name of the same prefill: the newer registration is
        the one that it knows."""
        peer = self.named(message.registration)
        if peer is None or peer.state not in (PeerState.CONNECTING, PeerState.REFUSED):
            return [], []
        twin = self.find(message.epoch)
        peer.state, peer.epoch, peer.differences = PeerState.REGISTERED, message.epoch, []
        peer.capacity_tokens, peer.last_seen_s, peer.draining = message.capacity.max_prompt_tokens, now_s, False
        return [twin] if twin else [], [Up(peer.address, now_s - peer.away_since_s)]

    def park(self, twins: Sequence[Peer], epoch: Epoch) -> None:
        """Not asked again: they are the prefill of that epoch, which is registered by another name."""
        for twin in twins:
            other = self.find(epoch)
            twin.differences = [Difference("address", other.address if other else "", twin.address)]
            twin.state, twin.session, twin.registration = PeerState.REFUSED, "", 0

    def on_refused(self, message: Refused, now_s: float) -> list[Peer]:
        """Returns the peers that this makes lost: registered ones that no longer know us."""
        lost = []
        for peer in self.peers.values():
            if peer.registration != message.registration:
                continue
            if peer.state is PeerState.REGISTERED:
                peer.last_seen_s = now_s
                lost.append(peer)
            elif message.differences and peer.state is not PeerState.LOST:
                peer.state, peer.differences = PeerState.REFUSED, message.differences
                peer.epoch, peer.last_seen_s = message.epoch, now_s
        return lost

    def on_heartbeat(self, message: Heartbeat, now_s: float) -> Peer | None:
        """Returns the registered peer it came from."""
        if peer := self.find(message.epoch):
            peer.last_seen_s, peer.draining = now_s, message.draining
        return peer

    def on_disconnect(self, address: str, now_s: float) -> None:
        """The connection to it ended; a bounce or a death. Its heartbeats, on a connection of their own, will tell."""
        if peer := self.peers.get(PeerAddress(address)):
            peer.suspect_until_s = now_s + SUSPICION_S

    def lose(self, peer: Peer, why: str, now_s: float) -> list[Effect]:
        """Its session is retired; everything it may have been writing waits for that."""
        peer.state, peer.away_since_s = PeerState.LOST, now_s
        return [Fence(peer.address, peer.registration, why)]

    def __str__(self) -> str:
        """For an error message: each peer and its state."""
        return ", ".join(map(str, self.peers.values())) or "none is configured"

    def tick(self, now_s: float) -> tuple[list[Peer], list[Effect]]:
        """(peers found silent for too long, messages due)."""
        stalled_s = now_s - self._last_tick_s if self._last_tick_s is not None else 0.0
        self._last_tick_s = now_s
        if stalled_s > STALL_S:
            for peer in self.peers.values():
                peer.last_seen_s = max(peer.last_seen_s, now_s - HEARTBEAT_S)
        effects: list[Effect] = []
        registered = [p for p in self.peers.values() if p.state is PeerState.REGISTERED]
        silent = [p for p in registered if now_s - p.last_seen_s > self._patience_s(p, now_s)]
        for peer in silent:
            peer.last_seen_s = float("-inf")
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + HEARTBEAT_S
            self.beats += 1
            effects += [Send(p.address, self._heartbeat(p)) for p in registered if p not in silent]
        for peer in self.peers.values():
            if now_s >= peer.open_at_s:
                effects += self._open(peer, now_s)
            asking = peer.state in (PeerState.CONNECTING, PeerState.REFUSED) and peer.session
            if asking and now_s >= peer.next_register_s:
                peer.next_register_s = now_s + REGISTER_S
                effects.append(Send(peer.address, self._register(peer)))
        return silent, effects

    @staticmethod
    def _patience_s(peer: Peer, now_s: float) -> float:
        return SUSPECT_S if now_s < peer.suspect_until_s else LOST_S

    @staticmethod
    def _able(peer: Peer, prompt_tokens: int) -> bool:
        return peer.state is PeerState.REGISTERED and not peer.draining and prompt_tokens <= peer.capacity_tokens

    def _open(self, peer: Peer, now_s: float) -> list[Effect]:
        newest = max(p.registration for p in self.peers.values())
        peer.state, peer.registration, peer.session = PeerState.CONNECTING, newest + 1, ""
        if len(peer.opened_s) == SESSIONS_A_MINUTE and now_s < peer.opened_s[0] + 60:
            peer.open_at_s = peer.opened_s[0] + 60
            return []
        peer.open_at_s = float("inf")
        peer.opened_s.append(now_s)
        return [OpenSession(peer.address, peer.registration)]

    def _register(self, peer: Peer) -> Register:
        return Register(
            epoch=self._epoch,
            to_epoch=Epoch(0),
            reply_to=self._reply_to,
            registration=peer.registration,
            session=peer.session,
            fingerprint=self._fingerprint,
            regions=self._regions,
        )

    def _heartbeat(self, peer: Peer) -> Heartbeat:
        return Heartbeat(
            epoch=self._epoch,
            to_epoch=peer.epoch,
            reply_to=self._reply_to,
            registration=peer.registration,
            number=self.beats,
            heard=0,
            steps=0,
            busy=False,
            active=b"",
        )
