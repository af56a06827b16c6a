"""The tensors behind the pages: one per buffer of the layout, allocated once and never moved."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from shared.kv.layout import Layout
from shared.kv.pages import Pages
from shared.protocol.messages import Region


class KVPool:
    """``num_pages`` pages of every buffer, zeroed. Who may touch which page is ``pages.py``'s business."""

    def __init__(self, layout: Layout, num_pages: int, device: str) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self._device = torch.device(device)
        self._tensors = {
            (buffer.component, buffer.layer): torch.zeros(
                (num_pages, layout.page_size, *buffer.row_shape), dtype=getattr(torch, buffer.dtype), device=device
            )
            for buffer in layout.buffers
        }

    def pages(self, component: str, layer: int) -> torch.Tensor:
        """One buffer's storage, shape [num_pages, page_size, *row_shape]. Raises KeyError for a layer without one."""
        return self._tensors[component, layer]

    def copy(self, page: int, to: int) -> None:
        """All buffers' rows of one page into another."""
        for tensor in self._tensors.values():
            tensor[to].copy_(tensor[page])

    def read(self, component: str, layer: int, pages: Pages) -> npt.NDArray[np.uint8]:
        """A copy of those pages' bytes, shape [n, item bytes]."""
        tensor = self.pages(component, layer)
        picked = tensor[torch.from_numpy(pages).long().to(tensor.device)].cpu()
        content: npt.NDArray[np.uint8] = picked.flatten(1).view(torch.uint8).numpy()
        return content

    def record(self) -> Callable[[], None]:
        """A wait for what this thread has had the device do so far. On a CPU that is done when the call returns."""
        if self._device.type != "cuda":
            return _done
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event.synchronize

    def regions(self) -> list[Region]:
        """What the transfer engine registers and the peer is told, in the layout's order."""
        return [
            Region(
                b.component,
                b.layer,
                self.pages(b.component, b.layer).data_ptr(),
                self.layout.item_bytes(b),
                self.num_pages,
            )
            for b in self.layout.buffers
        ]


def _done() -> None:
    pass
