"""Logging of a process: one line a record, to stderr, under the name of the service.

``2026-01-01T00:00:00.123Z WARNING decode.engine message room=7``, or the same as a JSON object. Success is DEBUG,
failure is WARNING. What a record is about travels as ``extra`` fields (``FIELDS``), so that the lines of one request
can be found on both sides.
"""

import logging
import sys
from datetime import UTC, datetime

import msgspec

from shared.errors import ConfigError
from shared.limited_log import RateLimitedLog

__all__ = ["RateLimitedLog", "setup"]

OURS = ("shared", "prefill_svc", "decode_svc")
FIELDS = ("request", "room", "attempt", "peer")
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

# A line break in a client's text must not forge a record, nor an escape sequence reach a terminal.
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))} | {
    ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t", 0x2028: "\\u2028", 0x2029: "\\u2029"
}  # fmt: skip


class _LineFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        about = "".join(f" {name}={value}" for name, value in _fields(record).items())
        text = (super().format(record) + about).translate(_ESCAPES)  # a traceback too is part of the one line
        text = text.encode(errors="backslashreplace").decode()  # lone surrogates
        return f"{_stamp(record)} {record.levelname} {self._service} {text}"


class _JsonFormatter(_LineFormatter):
    def format(self, record: logging.LogRecord) -> str:
        text = logging.Formatter.format(self, record).encode(errors="backslashreplace").decode()
        head = {"time": _stamp(record), "level": record.levelname, "service": self._service, "logger": record.name}
        return msgspec.json.encode({**head, "message": text, **_fields(record)}).decode()


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name in FIELDS if (value := getattr(record, name, None)) is not None}


def _stamp(record: logging.LogRecord) -> str:
    stamp = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{stamp}.{int(record.msecs):03d}Z"


def setup(service: str, level: str, form: str = "text") -> None:
    """Send every log record of this process to stderr; other libraries' only from WARNING on.

    ``service`` names the process ("decode.engine"); ``form`` is "text" or "json". May be called again. Raises
    ConfigError for an unknown level.
    """
    if level not in LEVELS:
        raise ConfigError(f"log level {level!r} is unknown: expected one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(service) if form == "json" else _LineFormatter(service))
    logging.basicConfig(level=max(LEVELS[level], logging.WARNING), handlers=[handler], force=True)
    for name in OURS:
        logging.getLogger(name).setLevel(LEVELS[level])
    logging.captureWarnings(True)
