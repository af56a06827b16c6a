import json
import logging
import re
import warnings
from collections.abc import Iterator

import pytest

from shared.errors import ConfigError
from shared.ops import logs
from shared.ops.logs import RateLimitedLog

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (.*)\n")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in logs.OURS:
        logging.getLogger(name).setLevel(logging.NOTSET)
    logging.captureWarnings(False)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What stderr got, each line without its time, which must be there."""
    out, err = capsys.readouterr()
    assert out == ""
    found = [LINE.fullmatch(line) for line in err.splitlines(keepends=True)]
    assert all(found), err
    return [match[1] for match in found if match]


def test_one_record_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("decode.engine", "info")
    logging.getLogger("shared.signal.inbox").warning("peer %s is %s", "a:1", "slow")
    assert lines(capsys) == ["WARNING decode.engine peer a:1 is slow"]


def test_the_time_is_utc_with_milliseconds() -> None:
    record = logging.makeLogRecord({"msg": "x", "levelname": "INFO", "created": 1767225600.1239, "msecs": 123.9})
    assert logs._LineFormatter("s").format(record) == "2026-01-01T00:00:00.123Z INFO s x"


def test_text_from_outside_can_neither_forge_a_line_nor_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("svc", "info")
    logging.getLogger("shared").info("%s", "a\nb\r\tc\x1b[31m\x85\u2028é\ud800")
    assert lines(capsys) == ["INFO svc a\\nb\\r\\tc\\x1b[31m\\x85\\u2028é\\ud800"]


def test_what_a_line_is_about_follows_it(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("svc", "info")
    about = {"room": 7, "request": "r\n1", "other": "x"}
    logging.getLogger("decode_svc").warning("failed", extra=about)
    RateLimitedLog(logging.getLogger("decode_svc"), 1.0).warning("key", "late", extra={"attempt": 2})
    assert lines(capsys) == ["WARNING svc failed request=r\\n1 room=7", "WARNING svc late attempt=2"]


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("svc", "info", "json")
    logging.getLogger("decode_svc.x").warning("bad\n%s", "\ud800", extra={"room": 7, "peer": "tcp://p:1"})
    _, err = capsys.readouterr()
    found = json.loads(err)
    assert LINE.fullmatch(found.pop("time") + " \n")
    fields = {"service": "svc", "logger": "decode_svc.x", "room": 7, "peer": "tcp://p:1"}
    assert found == {"level": "WARNING", "message": "bad\n\\ud800", **fields}


def test_a_traceback_stays_in_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("svc", "info")
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("decode_svc").warning("failed", exc_info=True)
    (line,) = lines(capsys)
    assert line.startswith("WARNING svc failed\\nTraceback (most recent call last):\\n")
    assert line.endswith("\\nValueError: why")


@pytest.mark.parametrize(
    ("level", "shown"),
    [("debug", "DIWE"), ("info", "IWE"), ("warning", "WE"), ("error", "E")],
)
def test_levels(level: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("svc", level)
    for name in ("shared.x", "prefill_svc.x", "decode_svc.x", "urllib3", "other"):
        log = logging.getLogger(name)
        for write, letter in ((log.debug, "D"), (log.info, "I"), (log.warning, "W"), (log.error, "E")):
            write(letter)
    quiet = shown.replace("D", "").replace("I", "")
    assert "".join(line[-1] for line in lines(capsys)) == 3 * shown + 2 * quiet


def test_an_unknown_level_is_the_operators_mistake() -> None:
    with pytest.raises(ConfigError, match="'loud' is unknown: expected one of debug, info, warning, error"):
        logs.setup("svc", "loud")


def test_a_second_set_up_replaces_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("front", "info")
    logs.setup("engine", "info")
    logging.getLogger("shared").info("x")
    assert lines(capsys) == ["INFO engine x"]


def test_pythons_warnings_are_records_too(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("svc", "info")
    with warnings.catch_warnings():
        logging.captureWarnings(True)
        warnings.simplefilter("always")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    (line,) = lines(capsys)
    assert line.startswith("WARNING svc ")
    assert "DeprecationWarning: old" in line


class Limited:
    """A RateLimitedLog of 10 s, its clock, and what it wrote."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.now_s = 0.0
        self.log = RateLimitedLog(logging.getLogger("limited"), 10.0, lambda: self.now_s)
        self._caplog = caplog

    def written(self) -> list[str]:
        found = [record.getMessage() for record in self._caplog.records]
        self._caplog.clear()
        return found


@pytest.fixture
def limited(caplog: pytest.LogCaptureFixture) -> Limited:
    return Limited(caplog)


def test_the_first_is_written_and_the_next_period_counts_the_rest(limited: Limited) -> None:
    for i in range(5):
        limited.log.warning("k", "bad %d", i)
        limited.now_s += 1
    assert limited.written() == ["bad 0"]
    limited.now_s = 9.9
    limited.log.warning("k", "bad 5")
    assert limited.written() == []
    limited.now_s = 10.0
    limited.log.warning("k", "bad %d", 6)
    assert limited.written() == ["bad 6 (5 more suppressed)"]
    limited.now_s = 20.0
    limited.log.warning("k", "bad 7")
    assert limited.written() == ["bad 7"]


def test_keys_are_limited_apart(limited: Limited) -> None:
    limited.log.warning("a", "x")
    limited.log.warning("b", "y")
    limited.log.warning("a", "x")
    assert limited.written() == ["x", "y"]


def test_a_per_cent_sign_is_text_where_there_are_no_arguments(limited: Limited) -> None:
    for _ in range(2):
        limited.log.warning("k", "50% full")
    limited.now_s = 10.0
    limited.log.warning("k", "50% full")
    assert limited.written() == ["50% full", "50% full (1 more suppressed)"]


def test_many_keys_do_not_make_it_grow(limited: Limited) -> None:
    for i in range(1000):
        limited.log.warning(str(i), "x")
    assert len(limited.log._keys) == 256
    assert len(limited.written()) == 256
    limited.now_s = 10.0
    limited.log.warning("new", "x")
    assert (len(limited.written()), len(limited.log._keys)) == (1, 256)


def test_the_record_names_the_caller_and_keeps_the_traceback(
    limited: Limited, caplog: pytest.LogCaptureFixture
) -> None:
    try:
        raise ValueError
    except ValueError:
        limited.log.warning("k", "failed", exc_info=True)
    (record,) = caplog.records
    assert record.filename == "test_logs.py"
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ValueError)
