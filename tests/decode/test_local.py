"""Prompts that decode computes itself, between its steps."""

from decode_svc.local import Chunk, LocalPrefills
from shared.ids import RequestId

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


def test_one_prompt_after_the_other_chunk_by_chunk() -> None:
    local = LocalPrefills(8)
    for request, tokens in ((A, 20), (B, 8)):
        local.add(request, tokens)
    seen = []
    while (chunk := local.next()) is not None:
        seen.append(chunk)
        local.computed(chunk)
    assert seen == [Chunk(A, 0, 8, False), Chunk(A, 8, 8, False), Chunk(A, 16, 4, True), Chunk(B, 0, 8, True)]


def test_leaving_in_mid_prompt_starts_the_next_from_its_first_token() -> None:
    local = LocalPrefills(8)
    for request in (A, B, C):
        local.add(request, 20)
    local.computed(Chunk(A, 0, 8, False))
    local.leave(B)
    local.leave(A)
    local.leave(RequestId("unknown"))
    assert local.next() == Chunk(C, 0, 8, False)
