"""Logging of a process: one line a record, to stderr, under the name of the service.

``2026-01-01T00:00:00.123Z WARNING decode.engine message``. Success is DEBUG, failure is WARNING.
"""

import logging
import sys
from datetime import UTC, datetime

from shared.errors import ConfigError
from shared.limited_log import RateLimitedLog

__all__ = ["RateLimitedLog", "setup"]

OURS = ("shared", "prefill_svc", "decode_svc")
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
        stamp = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        text = super().format(record).translate(_ESCAPES)  # a traceback too is part of the one line
        text = text.encode(errors="backslashreplace").decode()  # lone surrogates
        return f"{stamp}.{int(record.msecs):03d}Z {record.levelname} {self._service} {text}"


def setup(service: str, level: str) -> None:
    """Send every log record of this process to stderr; other libraries' only from WARNING on.

    ``service`` names the process ("decode.engine"). May be called again. Raises ConfigError for an unknown level.
    """
    if level not in LEVELS:
        raise ConfigError(f"log level {level!r} is unknown: expected one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LineFormatter(service))
    logging.basicConfig(level=max(LEVELS[level], logging.WARNING), handlers=[handler], force=True)
    for name in OURS:
        logging.getLogger(name).setLevel(LEVELS[level])
    logging.captureWarnings(True)
