"""Source pages and rows: whose prompts hold them. Pure.

Hand-over sentence: a ``Sender`` owns its pages and row from ``reserve`` until ``free``, which is called when neither a
forward nor a transfer touches them.
"""

from collections.abc import Iterable

from prefill_svc.records import Sender
from shared.kv.layout import Layout
from shared.kv.pages import PageAllocator
from shared.kv.slots import SlotPool


class Sources:
    def __init__(self, layout: Layout, pages: PageAllocator, slots: SlotPool) -> None:
        self._layout, self.pages, self.slots = layout, pages, slots

    def reserve(self, sender: Sender) -> bool:
        """Pages for the whole prompt and a row, unless it has them; False where there are none now."""
        if sender.pages is not None:
            return True
        if self.slots.free_slots == 0:
            return False
        pages = self.pages.allocate(self._layout.pages_for(len(sender.tokens)))
        if pages is None:
            return False
        sender.pages, sender.slot = pages, self.slots.take()
        return True

    def free(self, sender: Sender) -> None:
        if sender.pages is not None:
            self.pages.release(sender.pages)
        if sender.slot is not None:
            self.slots.free(sender.slot)
        sender.pages, sender.slot = None, None

    def crowded_by(self, sender: Sender, senders: Iterable[Sender]) -> bool:
        """Would its peer hold more than half of the pages, and not for this prompt alone? If that peer stands still, so
        does everybody whose prompts find none."""
        if sender.pages is not None:
            return False
        held = sum(len(s.pages) for s in senders if s.pages is not None and s.peer is sender.peer)
        return held > 0 and 2 * (held + self._layout.pages_for(len(sender.tokens))) > self.pages.usable_pages

    def check_integrity(self, senders: Iterable[Sender]) -> None:
        """Senders explain every page and row that is not free. Raises IntegrityError."""
        held = list(senders)
        self.pages.check_integrity([s.pages for s in held if s.pages is not None])
        self.slots.check_integrity({s.slot for s in held if s.slot is not None})
