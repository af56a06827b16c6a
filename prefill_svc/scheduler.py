"""Which tokens the next forward computes: first come, first served, packed up to a token budget. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from shared.ids import AttemptKey
from shared.kv.placement import send_range
from shared.protocol.scores import SCORED_CHUNK_TOKENS


@dataclass(frozen=True)
class Waiting:
    """What is left of one prompt: tokens ``done`` … ``total`` are still to be computed."""

    key: AttemptKey
    done: int
    total: int
    scored: bool = False
    """Each of its tokens' logits are wanted."""


@dataclass(frozen=True)
class Piece:
    """One prompt's share of a forward: tokens ``start`` … ``start + length``; ``last`` ones sample."""

    key: AttemptKey
    start: int
    length: int
    last: bool


def pack(waiting: Iterable[Waiting], budget_tokens: int, page_size: int, max_pieces: int) -> list[Piece]:
    """The next forward's pieces, in order. A piece that is not the last ends at a page boundary (S10), so that its
    pages can be sent whole; a prompt for which not even one page is left in the budget waits."""
    pieces: list[Piece] = []
    for item in waiting:
        most = min(budget_tokens, max(page_size, SCORED_CHUNK_TOKENS)) if item.scored else budget_tokens
        end = min(item.total, item.done + most)
        length = send_range(item.done, end, end == item.total, page_size).end - item.done
        if length <= 0 or len(pieces) == max_pieces:
            break
        pieces.append(Piece(item.key, item.done, length, item.done + length == item.total))
        budget_tokens -= length
    return pieces
