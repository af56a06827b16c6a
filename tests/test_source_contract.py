"""S45: two builds pair only if the code that gives the cache's bytes their meaning is the same, by an integer.

The pin below changes with that code. Where a change alters what lies where (layout, placement, plan, rows), raise
``SOURCE_CONTRACT`` in ``shared/kv/layout.py`` with it; where it does not, only the pin.
"""

import hashlib
from pathlib import Path

from shared.kv.layout import SOURCE_CONTRACT, Buffer, Layout

FILES = ("shared/kv/layout.py", "shared/kv/placement.py", "shared/transfer/plan.py", "shared/runtime/paged_cache.py")
PINNED = (2, "64c484b4271e5296")


def meaning(path: Path) -> str:
    """Its lines but blank ones and comments; the same for every Python version."""
    lines = (line.rstrip() for line in path.read_text().splitlines())
    return "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))


def test_s45_a_change_of_the_caches_meaning_raises_the_source_contract() -> None:
    root = Path(__file__).parents[1]
    digest = hashlib.sha256("".join(meaning(root / name) for name in FILES).encode()).hexdigest()[:16]
    assert (SOURCE_CONTRACT, digest) == PINNED, "see this file's docstring"


def test_s45_the_contract_is_part_of_the_fingerprint() -> None:
    layout = Layout(16, (Buffer("kv", 0, (2, 1, 4), "float32"), Buffer("kv", 3, (2, 1, 4), "float32")))
    fields = layout.fingerprint()
    assert fields["source_contract"] == str(SOURCE_CONTRACT)
    assert (fields["page_size"], fields["kv_layers"]) == ("16", "0,3")
