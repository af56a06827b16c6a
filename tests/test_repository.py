"""What the documents promise is what the code has."""

import dataclasses
import importlib.metadata
import re
import tomllib
from pathlib import Path

from shared.config import DecodeConfig, PrefillConfig, ServiceConfig, flag_name
from shared.ops.metrics import TABLE

ROOT = Path(__file__).resolve().parent.parent
CODE = ("shared", "prefill_svc", "decode_svc", "tests")
MAX_LINES = 400
LONGER_WITH_A_REASON: dict[str, str] = {}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def names(pattern: str, *folders: str) -> set[str]:
    """Every match in those folders' Python files but this one."""
    here = Path(__file__).resolve()
    texts = [path.read_text("utf-8") for path in sources(*folders) if path != here]
    # a test's own name counts: test_s7_… names S7
    texts = [
        re.sub(r"(?<=def test_)((?:[sa]\d+_)+)", lambda m: f" {m[1].upper().replace('_', ' ')} ", text)
        for text in texts
    ]
    return {name for text in texts for name in re.findall(pattern, text)}


def status(document: str) -> dict[str, str]:
    """Rule or case → the first word of its status column."""
    rows = re.findall(r"^\| ([SA]\d+) \|.*\| (\w+)[^|]*\|$", read(document), re.MULTILINE)
    return dict(rows)


def flag_rows() -> list[str]:
    """The README's table of flags, as the configuration classes have it."""

    def cells(config: type[ServiceConfig]) -> dict[str, str]:
        return {
            field.name: f"{f'`{field.default}`' if field.default not in ('', ()) else ''} | {field.metadata['help']} |"
            for field in dataclasses.fields(config)
        }

    prefill, decode = cells(PrefillConfig), cells(DecodeConfig)
    rows = []
    for name in decode | prefill:
        if prefill.get(name) == decode.get(name):
            services = [("both", decode[name])]
        else:
            services = [
                (label, mine[name]) for label, mine in (("prefill", prefill), ("decode", decode)) if name in mine
            ]
        rows += [f"| `{flag_name(name)}` | {label} | {rest}" for label, rest in services]
    return rows


def test_the_readme_lists_exactly_the_flags() -> None:
    in_readme = [line for line in read("README.md").splitlines() if line.startswith("| `--")]
    assert in_readme == flag_rows()


def test_every_rule_has_a_row_and_every_rule_that_is_named_exists() -> None:
    assert set(status("docs/mechanisms.md")) == {f"S{number}" for number in range(1, 68)}
    assert names(r"\bS\d+\b", *CODE) <= set(status("docs/mechanisms.md"))


def test_every_case_has_a_row_and_every_case_that_is_named_exists() -> None:
    assert set(status("docs/cases.md")) == {f"A{number}" for number in range(1, 33)}
    assert names(r"\bA\d{1,2}\b", "tests") <= set(status("docs/cases.md"))


def test_a_rule_is_called_built_if_and_only_if_a_test_names_it() -> None:
    said = {rule for rule, word in status("docs/mechanisms.md").items() if word in ("built", "partly")}
    assert said == names(r"\bS\d+\b", "tests")


def test_a_case_is_called_tested_if_and_only_if_a_test_names_it() -> None:
    said = {case for case, word in status("docs/cases.md").items() if word in ("tested", "partly")}
    assert said == names(r"\bA\d{1,2}\b", "tests")


def test_files_stay_readable() -> None:
    lengths = {str(path.relative_to(ROOT)): path.read_text("utf-8").count("\n") for path in sources(*CODE)}
    assert {name for name, lines in lengths.items() if lines > MAX_LINES} == set(LONGER_WITH_A_REASON)


def test_the_version_has_one_source() -> None:
    version = tomllib.loads(read("pyproject.toml"))["project"]["version"]
    assert importlib.metadata.version("handoff") == version
    assert re.findall(r"^## \[(\d.*?)\]", read("CHANGELOG.md"), re.MULTILINE)[0] == version
    assert not names(rf"[\"']{re.escape(version)}[\"']", *CODE)


def metric_rows() -> list[str]:
    rows = []
    for metric in TABLE:
        sides = [side for side, source in (("prefill", metric.prefill), ("decode", metric.decode)) if source]
        shown = {name: "path" if name == "route" else ", ".join(values) for name, values in metric.labels}
        labels = "; ".join(f"{name}: {values}" for name, values in shown.items())
        cells = (f"`{metric.name}`", metric.kind, sides[0] if len(sides) == 1 else "both", labels, metric.help)
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def test_the_documented_metrics_are_exactly_those_that_are_told() -> None:
    assert [line for line in read("docs/metrics.md").splitlines() if line.startswith("| `")] == metric_rows()


def test_the_containers_take_every_flag_from_the_environment() -> None:
    """Those that are one file's business are said there."""
    text = read("compose/services.yaml")
    own = {"prefill", "host", "port", "control_port", "advertise_host"}
    fields = {field.name for config in (PrefillConfig, DecodeConfig) for field in dataclasses.fields(config)} - own
    assert [name for name in sorted(fields) if f"  HANDOFF_{name.upper()}:" not in text] == []
