"""Prefill's view of its decode peers: whose memory may be written to, and which attempts must never start again.

Hand-over sentence: a registration names one receive session; its sending worker belongs to that registration alone
and is closed when the registration is gone and its last attempt has ended.
"""

from dataclasses import dataclass, field

from prefill_svc.effects import CloseSender, Effect, OpenSender, Send, SenderId
from shared.errors import DestinationRefused, LayoutMismatch
from shared.ids import Epoch, PeerAddress, Ticket
from shared.kv.layout import Layout, check_regions
from shared.protocol.local import PeerStatus
from shared.protocol.messages import (
    Addressed,
    Capacity,
    Difference,
    Heartbeat,
    Refused,
    Region,
    Register,
    Registered,
    pack_int64,
)
from shared.transfer.plan import Pairing, pair_regions

HEARTBEAT_S = 0.5
LOST_S = 3.5
SUSPECT_S = 1.0
SUSPICION_S = 3.0
"""After its connection ended, a peer that is silent for ``SUSPECT_S`` within ``SUSPICION_S`` is lost."""
STALL_S = 0.75
RETIRED_KEPT = 4096
MAX_DIFFERENCES, MAX_SHOWN = 16, 600
MAX_PEERS = 64
"""Registrations at a time: each has a thread. Beyond, a Register is not answered until others are gone."""


class Retired:
    """Tickets that have ended, or were aborted before they came (S31). Flat in memory: beyond ``RETIRED_KEPT`` the one
    retired first is forgotten and everything up to it counts as retired, which is safe because tickets only rise."""

    def __init__(self) -> None:
        self._tickets: dict[Ticket, None] = {}
        self.watermark = 0

    def add(self, ticket: Ticket) -> None:
        self._tickets[ticket] = None
        if len(self._tickets) > RETIRED_KEPT:
            oldest = next(iter(self._tickets))
            del self._tickets[oldest]
            self.watermark = max(self.watermark, oldest)

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket <= self.watermark or ticket in self._tickets


@dataclass
class DecodePeer:
    """One registration. ``gone``: no new attempts; kept until the last of its attempts has ended."""

    epoch: Epoch
    address: PeerAddress
    registration: int
    regions: list[Region]
    pairing: Pairing
    """Of this side's cache and its: made once, since a chunk changes only the runs (S13)."""
    rows: Pairing
    """Of this side's metadata rows and its."""
    last_seen_s: float
    heard: int = 0
    """Number of its newest heartbeat."""
    retired: Retired = field(default_factory=Retired)
    gone: bool = False
    met: bool = False
    """Its data port has answered once. Until then its prompts hold no pages: a host that stands still at first contact
    would keep them for as long as it does."""
    dirty: bool = False
    """A write through this session has failed; stays so until decode registers a fresh one."""
    suspect_until_s: float = float("-inf")

    @property
    def sender(self) -> SenderId:
        return SenderId(self.epoch, self.registration)


class DecodePeers:
    """All registrations of one prefill engine. Times are seconds of one monotonic clock."""

    def __init__(
        self,
        *,
        epoch: Epoch,
        reply_to: PeerAddress,
        layout: Layout,
        regions: list[Region],
        rows: Region,
        fingerprint: dict[str, str],
        capacity: Capacity,
    ) -> None:
        self.peers: dict[SenderId, DecodePeer] = {}
        self.refusals: dict[PeerAddress, list[Difference]] = {}
        self._epoch, self._reply_to = epoch, reply_to
        self._regions, self._rows = regions, rows
        self._layout, self._fingerprint, self._capacity = layout, fingerprint, capacity
        self._last_tick_s: float | None = None
        self._next_beat_s = 0.0
        self._beats = 0

    def find(self, epoch: Epoch, registration: int) -> DecodePeer | None:
        peer = self.peers.get(SenderId(epoch, registration))
        return None if peer is None or peer.gone else peer

    def on_register(self, message: Register, now_s: float) -> tuple[list[DecodePeer], list[Effect]]:
        """(registrations that this one replaces, what to do). S45: refused where the fingerprints differ anywhere."""
        answer = Registered(self._epoch, message.epoch, message.registration, self._capacity)
        if peer := self.find(message.epoch, message.registration):
            peer.last_seen_s = now_s
            return [], [Send(message.reply_to, answer)]
        same = [p for p in self.peers.values() if p.address == message.reply_to and not p.gone]
        if any(
            p.epoch > message.epoch or p.registration > message.registration for p in same if p.epoch >= message.epoch
        ):
            return [], []  # a late copy of an older registration
        differences = self._differences(message)
        if differences:
            self.refusals.pop(message.reply_to, None)
            self.refusals[message.reply_to] = differences
            if len(self.refusals) > MAX_PEERS:
                del self.refusals[next(iter(self.refusals))]
            return same, [Send(message.reply_to, self.refusal(message, differences))]
        self.refusals.pop(message.reply_to, None)
        if len(self.peers) >= MAX_PEERS:
            return same, []
        peer = DecodePeer(
            message.epoch,
            message.reply_to,
            message.registration,
            message.regions,
            pair_regions(self._regions, message.regions[:-1]),
            pair_regions([self._rows], message.regions[-1:]),
            now_s,
        )
        self.peers[peer.sender] = peer
        return same, [OpenSender(peer.sender, message.session), Send(message.reply_to, answer)]

    def refusal(self, message: Addressed, differences: list[Difference]) -> Refused:
        """With no differences it says: this incarnation does not know you, register anew."""
        return Refused(self._epoch, message.epoch, message.registration, differences)

    def tick(self, now_s: float) -> list[DecodePeer]:
        """The registrations that have been silent for too long, once each."""
        stalled_s = now_s - self._last_tick_s if self._last_tick_s is not None else 0.0
        self._last_tick_s = now_s
        if stalled_s > STALL_S:
            for peer in self.peers.values():
                peer.last_seen_s = max(peer.last_seen_s, now_s - HEARTBEAT_S)
        return [p for p in self.peers.values() if not p.gone and now_s - p.last_seen_s > self._patience_s(p, now_s)]

    def on_disconnect(self, address: str, now_s: float) -> None:
        """The connection to it ended; a bounce or a death. Its heartbeats, on a connection of their own, will tell."""
        for peer in self.peers.values():
            if peer.address == address:
                peer.suspect_until_s = now_s + SUSPICION_S

    def heartbeats(
        self, active: dict[SenderId, list[Ticket]], steps: int, busy: bool, draining: bool, now_s: float
    ) -> list[Effect]:
        """One to each live registration when it is time, listing what this side works on for it."""
        if now_s < self._next_beat_s:
            return []
        self._next_beat_s = now_s + HEARTBEAT_S
        self._beats += 1
        return [
            Send(
                p.address,
                Heartbeat(
                    epoch=self._epoch,
                    to_epoch=p.epoch,
                    reply_to=self._reply_to,
                    registration=p.registration,
                    number=self._beats,
                    heard=p.heard,
                    steps=steps,
                    busy=busy,
                    active=pack_int64(active.get(p.sender, [])),
                    draining=draining,
                ),
            )
            for p in self.peers.values()
            if not p.gone
        ]

    def statuses(self) -> list[PeerStatus]:
        """Registered decodes, then those refused, with what differed."""
        known = [PeerStatus(p.address, "registered", p.epoch) for p in self.peers.values() if not p.gone]
        return known + [PeerStatus(a, "refused", Epoch(0), differences=d) for a, d in self.refusals.items()]

    def close_unused(self, used: set[SenderId]) -> list[Effect]:
        """Forget registrations that are gone and whose last attempt has ended."""
        done = [p.sender for p in self.peers.values() if p.gone and p.sender not in used]
        for sender in done:
            del self.peers[sender]
        return [CloseSender(sender) for sender in done]

    @staticmethod
    def _patience_s(peer: DecodePeer, now_s: float) -> float:
        return SUSPECT_S if now_s < peer.suspect_until_s else LOST_S

    def _differences(self, message: Register) -> list[Difference]:
        ours, theirs = self._fingerprint, message.fingerprint
        differences = [
            Difference(name, _shown(ours.get(name)), _shown(theirs.get(name)))
            for name in dict.fromkeys([*ours, *theirs])
            if ours.get(name) != theirs.get(name)
        ][:MAX_DIFFERENCES]
        if not differences:
            try:
                check_regions(self._layout, message.regions, 1)
                pair_regions([*self._regions, self._rows], message.regions)
            except (LayoutMismatch, DestinationRefused) as error:
                differences = [Difference("regions", "its own layout", _shown(error.message))]
        return differences


def _shown(value: str | None) -> str:
    """Long enough to tell values apart, short enough for logs and the front's status, whoever the peer is."""
    return "(missing)" if value is None else value if len(value) <= MAX_SHOWN else value[: MAX_SHOWN - 1] + "…"
