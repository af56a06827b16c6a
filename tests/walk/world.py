"""A whole deployment in one thread on a virtual clock: real decisions of both services, real tables, real allocators,
a link that loses, delays, reorders and duplicates, and a transfer engine whose bytes land when the walk says so.

Every page of a prompt has one right content, a tag of (prompt, position, layer). The world checks, all the time:
no page is given to a new owner while a write to it may still land; what commits is the right content, and stays it
until the request ends; each request ends once; and, at idle, the books of both sides balance.
"""

import ctypes
import random
from collections import Counter
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shared.ids import Epoch, PeerAddress, RequestId
from shared.protocol import messages as m
from shared.protocol.codec import encode
from shared.protocol.local import Generate
from tests.walk.nodes import ITEM_BYTES, LAYOUT, VOCAB, DecodeNode, Job, PrefillNode, Violation

N = TypeVar("N", DecodeNode, PrefillNode)


class World:
    """Everything at once; ``step`` does one random thing, ``settle`` lets all of it come to rest."""

    restlessness = 0.15
    """How often something dies or freezes."""

    def __init__(self, seed: int, *, decodes: int = 2, prefills: int = 2) -> None:
        self.random = random.Random(seed)
        self.now_s = 1000.0
        self.decode_pages, self.prefill_pages = 24, 20
        self.prefill_addresses = [PeerAddress(f"tcp://p:{i}") for i in range(prefills)]
        self.decode_addresses = [PeerAddress(f"tcp://d:{i}") for i in range(decodes)]
        self.wire: list[tuple[float, PeerAddress, list[bytes]]] = []
        self.jobs: list[Job] = []
        self.live_sessions: dict[str, DecodeNode] = {}
        self.endings: Counter[RequestId] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.faults = True
        self._epoch, self._requests = 1, 0
        self.nodes: dict[PeerAddress, DecodeNode | PrefillNode | None] = {}
        for address in [*self.prefill_addresses, *self.decode_addresses]:
            self.start(address)

    # life and death

    def start(self, address: PeerAddress) -> None:
        self._epoch += 1
        if address in self.prefill_addresses:
            self.nodes[address] = PrefillNode(self, address, Epoch(self._epoch))
        else:
            node = DecodeNode(self, address, Epoch(self._epoch))
            self.nodes[address] = node
            node.do(node.peers.start(self.now_s))

    def kill(self, address: PeerAddress) -> None:
        """Gone without a word. A dead writer's bytes may be in socket buffers; a dead reader's memory is gone."""
        node = self.nodes[address]
        self.nodes[address] = None
        if isinstance(node, DecodeNode):
            for session in list(node.sessions.values()):
                self.retire(session)
            for request in node.intake.requests:
                self.endings[request] += 1  # its front answers for it
                self.outcomes["died"] += 1

    def decode_nodes(self) -> list[DecodeNode]:
        return [n for n in self.nodes.values() if isinstance(n, DecodeNode)]

    def prefill_nodes(self) -> list[PrefillNode]:
        return [n for n in self.nodes.values() if isinstance(n, PrefillNode)]

    # the link

    def post(self, address: PeerAddress, message: object) -> None:
        frames = encode(message)  # type: ignore[arg-type]
        copies = 1
        if self.faults and self.random.random() < 0.08:
            copies = self.random.choice([0, 0, 2])
        for _ in range(copies):
            delay = self.random.expovariate(20) if self.random.random() < 0.9 else self.random.uniform(0, 3)
            self.wire.append((self.now_s + delay, address, frames))

    def deliver_due(self) -> None:
        due = [x for x in self.wire if x[0] <= self.now_s and not self._frozen(x[1])]
        for item in sorted(due, key=lambda x: x[0]):
            self.wire.remove(item)
            node = self.nodes[item[1]]
            if node is not None:
                node.deliver(item[2])

    def _frozen(self, address: PeerAddress) -> bool:
        node = self.nodes[address]
        return node is not None and node.frozen

    # bytes

    def land(self, job: Job, count: int) -> None:
        """The next ``count`` blocks of a job reach memory, if the session is still there."""
        for src, dst, length in job.blocks[job.landed : job.landed + count]:
            if job.session in self.live_sessions:
                target = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(dst))
                source = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(src))
                target[:] = source
        job.landed = min(len(job.blocks), job.landed + count)

    def finish_job(self, job: Job, ok: bool) -> None:
        """Report to its node: success lands everything first; failure leaves the rest to land later, or never, until
        the receiver retires the session."""
        if ok and job.session in self.live_sessions:
            self.land(job, len(job.blocks))
            self.jobs.remove(job)
            job.node.written(job)
        else:
            job.reported = True
            job.node.do(job.node.handoff.write_failed(job.key, RuntimeError("-1"), self.now_s))

    def retire(self, session: str) -> None:
        self.live_sessions.pop(session, None)

    def check_not_written(self, node: DecodeNode, pages: npt.NDArray[np.int32]) -> None:
        """Called at every allocation: may any byte still land on one of these pages?"""
        for job in self.jobs:
            if self.live_sessions.get(job.session) is not node:
                continue
            for _, dst, length in job.blocks[job.landed :]:
                for i in range(len(LAYOUT.buffers)):
                    base = node.pool.data[i].ctypes.data
                    first, last = (dst - base) // ITEM_BYTES, (dst + length - 1 - base) // ITEM_BYTES
                    if ((pages >= first) & (pages <= last)).any():
                        raise Violation(f"page given away while {job.key} may still write to it")

    # the walk

    def step(self) -> None:
        """One random thing happens, after a little time."""
        self.now_s += self.random.expovariate(40)
        self.deliver_due()
        self.random.choices(
            [
                self._submit,
                self._cancel,
                self._stop,
                self._compute,
                self._bytes,
                self._background,
                self._decode,
                self._tick,
                self._disturb,
                self._heal,
            ],
            [5, 1, 0.1, 12, 16, 6, 5, 12, self.restlessness, 0.6],
        )[0]()

    def _submit(self) -> None:
        nodes = self.decode_nodes()
        if not nodes or len(nodes[0].intake.requests) > 12:
            return
        self._requests += 1
        length = self.random.randint(1, 30)
        tokens = np.full(length, self._requests % VOCAB, np.int32)
        tokens[0] = self._requests % 256
        sampling = m.Sampling(seed=1)
        spec = Generate(
            RequestId(f"r{self._requests}"), m.pack_int32(tokens), self.random.randint(1, 9), sampling, [], False
        )
        node = self.random.choice(nodes)
        if not node.frozen:
            node.do(node.intake.submit(spec, self.random.choice([1.0, 5.0, 60.0]), self.now_s))

    def _cancel(self) -> None:
        node = self._pick(self.decode_nodes())
        if node and node.intake.requests:
            request = self.random.choice(list(node.intake.requests))
            if request not in node.computing:
                node.do(node.intake.cancel(request, self.now_s))

    def _stop(self) -> None:
        """An operator's abort on prefill: of one request, or of all."""
        node = self._pick(self.prefill_nodes())
        if node and node.handoff.senders:
            names = [s.spec.request for s in node.handoff.senders.values()]
            node.do(node.handoff.stop(self.random.choice([*names, RequestId("")]), self.now_s))

    def _compute(self) -> None:
        node = self._pick(self.prefill_nodes())
        if node and node.forward:
            node.advance_forward(ok=not (self.faults and self.random.random() < 0.01))
        elif node:
            node.start_forward()

    def _bytes(self) -> None:
        if not self.jobs:
            return
        job = self.random.choice(self.jobs)
        dead = self.nodes.get(job.node.address) is not job.node
        if dead or job.reported:
            self.land(job, self.random.randint(0, 3))
            over = dead or job.drained
            if over and (job.landed == len(job.blocks) or self.random.random() < 0.1):
                self.jobs.remove(job)
        elif not job.node.frozen and self._may_move(job):
            fate = self.random.random()
            if fate < 0.5 or not job.complete:
                self.land(job, self.random.randint(1, 3))
            else:
                self.finish_job(job, ok=not job.broken and not (self.faults and fate > 0.94))

    def _may_move(self, job: Job) -> bool:
        """A worker ends one attempt after the other, and does nothing while its engine awaits retirement."""
        mine = [j for j in self.jobs if j.node is job.node and j.sender == job.sender and not j.drained]
        waited_for = [j for j in mine if j.complete]
        return not any(j.reported for j in mine) and (not job.complete or job is waited_for[0])

    def _background(self) -> None:
        nodes = [n for n in self.nodes.values() if n is not None]
        awake = [n.todo for n in nodes if n.todo and not n.frozen]
        if awake:
            self.random.choice(awake).pop(0)()

    def _decode(self) -> None:
        node = self._pick(self.decode_nodes())
        if node and node.running:
            node.finish(self.random.choice(list(node.running)))

    def _tick(self) -> None:
        for node in self.nodes.values():
            if isinstance(node, DecodeNode) and not node.frozen:
                node.do(node.intake.tick(self.now_s, node.computing))
                node.intake.check_integrity()
            elif isinstance(node, PrefillNode) and not node.frozen:
                node.do(node.handoff.tick(bool(node.forward), self.now_s))
                node.handoff.check_integrity()

    def _disturb(self) -> None:
        address = self.random.choice([*self.prefill_addresses, *self.decode_addresses])
        node = self.nodes[address]
        if node is not None and self.random.random() < 0.5:
            self.kill(address)
        elif node is not None:
            node.frozen = True

    def _heal(self) -> None:
        ill = [a for a, n in self.nodes.items() if n is None or n.frozen]
        if ill:
            address = self.random.choice(ill)
            if (node := self.nodes[address]) is None:
                self.start(address)
            else:
                node.frozen = False

    def _pick(self, nodes: list[N]) -> N | None:
        awake = [n for n in nodes if not n.frozen]
        return self.random.choice(awake) if awake else None

    # coming to rest

    def settle(self) -> None:
        """No more faults, everyone alive: everything ends, and the books balance. Raises Violation if not."""
        self.faults = False
        for address, node in self.nodes.items():
            if node is None:
                self.start(address)
            else:
                node.frozen = False
        quiet = 0
        for _ in range(6000):
            self.now_s += 0.02
            self.deliver_due()
            self.random.choice([self._compute, self._bytes, self._background, self._decode])()
            self._tick()
            quiet = quiet + 1 if self._at_rest() else 0
            if quiet > 200:
                break
        else:
            raise Violation(f"not at rest: {self._unrest()}")
        self._check_books()

    def _at_rest(self) -> bool:
        return not self._unrest()

    def _unrest(self) -> list[str]:
        found = []
        for node in self.decode_nodes():
            if node.intake.requests or node.intake.leases.open or node.todo:
                states = [r.state for r in node.intake.requests.values()]
                leases = [x.state for x in node.intake.leases.open.values()]
                found.append(f"decode {node.address}: {states}, leases {leases}")
        for prefill in self.prefill_nodes():
            if prefill.handoff.senders or prefill.todo:
                found.append(f"prefill {prefill.address}: {[s.state for s in prefill.handoff.senders.values()]}")
        return found

    def _check_books(self) -> None:
        for node in self.decode_nodes():
            node.intake.check_integrity()
            if (node.pages.free_pages, node.slots.free_slots) != (self.decode_pages - 1, 4):
                raise Violation(f"decode keeps {self.decode_pages - 1 - node.pages.free_pages} pages at rest")
            if any(peer.outstanding_tokens for peer in node.peers.peers.values()):
                raise Violation("decode still counts load at rest")
            if node.intake.peers.peers.keys() != set(self.prefill_addresses) or not all(
                x.state.value == "registered" for x in node.peers.peers.values()
            ):
                raise Violation("a peer is not registered at rest")
        for prefill in self.prefill_nodes():
            prefill.handoff.check_integrity()
            if prefill.handoff.pages.free_pages != self.prefill_pages - 1:
                raise Violation("prefill keeps pages at rest")
            live = {(n.epoch, peer.registration) for n in self.decode_nodes() for peer in n.peers.peers.values()}
            if not set(prefill.sessions) <= live:
                raise Violation(f"prefill keeps workers of dead sessions: {set(prefill.sessions) - live}")
        twice = [r for r, n in self.endings.items() if n != 1]
        if twice or len(self.endings) != sum(self.endings.values()):
            raise Violation(f"requests with more than one ending: {twice[:5]}")
