"""Everything about an attempt that can be checked before any work starts: S7, S8, and ranges of ids on both sides."""

from prefill_svc.records import Sender
from shared.errors import DestinationRefused
from shared.kv.layout import Layout


def objection(sender: Sender, layout: Layout, max_prompt_tokens: int, vocab_size: int) -> DestinationRefused | None:
    """Why this attempt cannot be served, if it cannot."""
    spec, tokens, destination = sender.spec, sender.tokens, sender.destination
    if not 0 < len(tokens) <= max_prompt_tokens:
        return DestinationRefused(f"expected 1 … {max_prompt_tokens} tokens, got {len(tokens)}", code="capacity")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        return DestinationRefused(f"token ids must be 0 … {vocab_size - 1}", code="bad_token")
    named = [*spec.sampling.banned, *(token for token, _ in spec.sampling.logit_bias)]
    if named and not 0 <= min(named) <= max(named) < vocab_size:
        return DestinationRefused(f"token ids of the sampling must be 0 … {vocab_size - 1}", code="bad_token")
    if spec.dst_first_position != 0:
        return DestinationRefused(f"destination starts at position {spec.dst_first_position}, expected 0")
    wanted, items = layout.pages_for(len(tokens)), sender.peer.regions[0].items
    if len(destination) != wanted:
        return DestinationRefused(f"expected {wanted} destination pages, got {len(destination)}")
    if destination.min() < 1 or destination.max() >= items or len(set(destination.tolist())) != wanted:
        return DestinationRefused(f"destination pages must be distinct and in 1 … {items - 1}")
    if not 0 <= spec.slot < sender.peer.regions[-1].items:
        return DestinationRefused(f"slot {spec.slot} is not in 0 … {sender.peer.regions[-1].items - 1}")
    return None
