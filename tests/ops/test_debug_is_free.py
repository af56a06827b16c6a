"""S60: debug diagnostics are off by default and cost nothing when off."""

import ast
from collections.abc import Iterator
from pathlib import Path

from shared.config import DecodeConfig, PrefillConfig

ROOT = Path(__file__).parents[2]


def debug_calls() -> Iterator[tuple[str, ast.Call, bool]]:
    """(place, call, whether it is guarded by isEnabledFor) for every ``log.debug`` of the packages."""
    for folder in ("shared", "prefill_svc", "decode_svc"):
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text())
            guarded = {
                id(inner)
                for node in ast.walk(tree)
                if isinstance(node, ast.If) and "isEnabledFor" in ast.unparse(node.test)
                for inner in ast.walk(node)
            }
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "debug":
                    yield f"{path.name}:{node.lineno}", node, id(node) in guarded


def test_s60_debug_is_off_by_default() -> None:
    assert {PrefillConfig().log_level, DecodeConfig().log_level} == {"info"}


def test_s60_a_debug_line_that_is_off_formats_and_computes_nothing() -> None:
    """The text is a constant, and its arguments are values at hand: no f-string, no call, unless under a guard."""
    calls = list(debug_calls())
    assert len(calls) >= 5
    for place, call, guarded in calls:
        text, *values = call.args
        assert isinstance(text, ast.Constant), place
        work = [n for v in values for n in ast.walk(v) if isinstance(n, ast.Call | ast.JoinedStr | ast.ListComp)]
        cheap = all(isinstance(n, ast.Call) and ast.unparse(n.func) == "len" for n in work)
        assert guarded or cheap, f"{place}: {ast.unparse(call)}"
