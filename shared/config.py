"""One frozen configuration a process, read once from flags, environment, a TOML file and defaults, in that order.

A field is declared once: name, type, default, help text and limits. Field ``max_model_len`` is flag
``--max-model-len``, environment ``HANDOFF_MAX_MODEL_LEN`` and TOML key ``max_model_len``.
"""

import argparse
import dataclasses
import difflib
import importlib.metadata
import math
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_type_hints

import msgspec

from shared.errors import ConfigError

Service = Literal["prefill", "decode"]
T = TypeVar("T")

MAX_PORT = 65535
LOG_LEVELS = ("debug", "info", "warning", "error")
ON_PREFILL_LOSS = ("fail", "local")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def _option(default: T, help_text: str, *, low: float = 0, high: float = math.inf, choices: Collection[str] = ()) -> T:
    """A field with its help text; a number must lie in ``low … high``, a string in ``choices`` if there are any."""
    metadata = {"help": help_text, "low": low, "high": high, "choices": choices}
    field: T = dataclasses.field(default=default, metadata=metadata)
    return field


@dataclass(frozen=True)
class ServiceConfig:
    """What both services share. Made by ``load``, which checks it; a direct construction is not checked."""

    model: str = _option("smollm2-135m-instruct", "alias, Hugging Face folder, GGUF file or hub id")
    served_model_name: str = _option("", "the name clients use; empty: the --model value")
    host: str = _option("127.0.0.1", "bind address of HTTP and of the control port")
    port: int = _option(0, "HTTP port; 0: any free one", high=MAX_PORT)
    control_port: int = _option(0, "ZeroMQ port for the peer service; 0: any free one", high=MAX_PORT)
    advertise_host: str = _option("", "address peers reach this host at; empty: chosen and logged")
    dtype: str = _option("auto", "auto, float32, bfloat16 or float16", choices=DTYPES)
    device: str = _option("cpu", "cpu, cuda or cuda:N")
    threads: int = _option(0, "compute threads of the engine; 0: all cores")
    max_model_len: int = _option(
        0, "longest prompt + answer in tokens; 0: what the model and the pages allow, at most 4096"
    )
    max_num_seqs: int = _option(16, "requests in one batch; on decode also the number of metadata slots", low=1)
    page_size: int = _option(16, "tokens in a page; must divide the chunk", low=1)
    num_pages: int = _option(0, "pages of the KV pool, padding page included; 0: enough for max_num_seqs full requests")
    chunked_prefill_size: int = _option(2048, "token budget of one prefill forward", low=1)
    step_limit_s: float = _option(120.0, "/health turns red when one forward takes longer", low=0.001)
    max_waiting: int = _option(256, "/ready turns red while so many requests wait; 0: never")
    log_level: str = _option("info", "debug, info, warning or error", choices=LOG_LEVELS)
    log_format: str = _option("text", "text or json", choices=("text", "json"))
    drain_s: float = _option(8.0, "seconds that running requests get after a stop signal")


@dataclass(frozen=True)
class PrefillConfig(ServiceConfig):
    port: int = _option(8100, "HTTP port; 0: any free one", high=MAX_PORT)
    control_port: int = _option(8998, "ZeroMQ port that decode services connect to; 0: any free one", high=MAX_PORT)
    layerwise: bool = _option(True, "send a prompt's layers while later ones are computed; off: all after the forward")
    transfer_layer_group: int = _option(8, "layers that are sent together", low=1)
    transfer_limit_s: float = _option(
        20.0, "a prompt that goes by layer and has not landed so long after its last forward has failed", low=0.001
    )


@dataclass(frozen=True)
class DecodeConfig(ServiceConfig):
    port: int = _option(8000, "HTTP port; 0: any free one", high=MAX_PORT)
    control_port: int = _option(8999, "ZeroMQ port that prefill services answer to; 0: any free one", high=MAX_PORT)
    prefill: tuple[str, ...] = _option((), "HOST:CONTROL_PORT of a prefill service; repeatable")
    request_timeout_s: float = _option(
        300.0, "a request without its first token by then is ended with an error", low=0.001
    )
    on_prefill_loss: str = _option(
        "fail",
        "where no prefill service serves a prompt: fail it with a retryable 503, or compute it on decode (local)",
        choices=ON_PREFILL_LOSS,
    )
    digest_every: int = _option(
        0, "compare the content of each so many-th hand-over on both sides before it is used; 0: none, 1: all"
    )


C = TypeVar("C", bound=ServiceConfig)

_ENV_PREFIX = "HANDOFF_"
_CONFIG_VARIABLE = "HANDOFF_CONFIG"
_OTHER_VARIABLES = frozenset({_CONFIG_VARIABLE, "HANDOFF_CACHE"})
"""Legal in the environment without being a field; ``HANDOFF_CACHE`` is where the default model is kept."""

_KEYS: dict[Service, frozenset[str]] = {
    "prefill": frozenset(field.name for field in dataclasses.fields(PrefillConfig)),
    "decode": frozenset(field.name for field in dataclasses.fields(DecodeConfig)),
}
_ALL_KEYS = _KEYS["prefill"] | _KEYS["decode"]
_TABLES: dict[str, Service] = {"prefill-svc": "prefill", "decode-svc": "decode"}


@dataclass(frozen=True)
class _Given:
    """A value as it was written, and where, for the error message. ``text``: it came as a string."""

    value: object
    source: str
    text: bool


def load(cls: type[C], service: Service, argv: Sequence[str], environ: Mapping[str, str]) -> C:
    """Read and check a process's configuration; ``argv`` is without the program's name.

    Raises ConfigError with one line that names the source, what was expected and what was got. ``--help`` and
    ``--version`` print and raise SystemExit(0).
    """
    flags, file = _read_flags(cls, service, argv)
    given = _read_environment(cls, environ)
    file = file or environ.get(_CONFIG_VARIABLE, "")
    if file:
        given = _read_file(service, Path(file)) | given
    given |= flags
    types = get_type_hints(cls)
    config = cls(**{name: _convert(types[name], item) for name, item in given.items()})
    _check(config, {name: item.source for name, item in given.items()})
    return config


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def _read_flags(cls: type[ServiceConfig], service: Service, argv: Sequence[str]) -> tuple[dict[str, _Given], str]:
    """→ what the flags say, and the ``--config`` file or an empty string."""
    parser = _Parser(
        prog=f"{service}-svc",
        description=f"Handoff's {service} service. A flag wins over its {_ENV_PREFIX}… variable, that over the file.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--version", action="store_true", default=False, help="print the version and exit")
    parser.add_argument("--config", default="", metavar="FILE", help=f"TOML file ({_CONFIG_VARIABLE})")
    types = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        repeated = types[field.name] == tuple[str, ...]
        shown = "none" if field.default in ("", ()) else field.default
        help_text = f"{field.metadata['help']} (default: {shown})"
        if types[field.name] is bool:
            parser.add_argument(flag_name(field.name), action=argparse.BooleanOptionalAction, help=help_text)
            continue
        parser.add_argument(
            flag_name(field.name),
            action="append" if repeated else "store",
            metavar="HOST:CONTROL_PORT" if repeated else types[field.name].__name__.upper(),
            help=help_text,
        )
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].partition("=")[0]
        flags = [flag_name(field.name) for field in dataclasses.fields(cls)] + ["--config", "--version"]
        raise ConfigError(f"unknown argument {name}{_nearest(name, flags)}")
    values: dict[str, Any] = vars(known)
    file: str = values.pop("config")
    if values.pop("version"):
        print(f"handoff {importlib.metadata.version('handoff')}")
        raise SystemExit(0)
    return {name: _Given(value, flag_name(name), True) for name, value in values.items()}, file


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _read_environment(cls: type[ServiceConfig], environ: Mapping[str, str]) -> dict[str, _Given]:
    """An empty variable counts as unset; one that only the other service knows is left to it."""
    mine = {_ENV_PREFIX + field.name.upper(): field.name for field in dataclasses.fields(cls)}
    legal = {_ENV_PREFIX + name.upper() for name in _ALL_KEYS} | _OTHER_VARIABLES
    given = {}
    for variable, text in environ.items():
        if not variable.startswith(_ENV_PREFIX):
            continue
        if variable not in legal:
            raise ConfigError(f"unknown environment variable {variable}{_nearest(variable, legal)}")
        if text and variable in mine:
            given[mine[variable]] = _Given(text, variable, True)
    return given


def _read_file(service: Service, file: Path) -> dict[str, _Given]:
    """Keys on top serve both services, those of ``[prefill-svc]`` and ``[decode-svc]`` win over them for one."""
    try:
        top = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error
    tables = {name: top.pop(name, {}) for name in _TABLES}
    given = _read_table(top, _ALL_KEYS | _TABLES.keys(), f"{file}: ")
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{file}: [{name}] must be a table")
        own = _read_table(table, _KEYS[_TABLES[name]], f"{file}: [{name}] ")
        if _TABLES[name] == service:
            given |= own
    return {key: item for key, item in given.items() if key in _KEYS[service]}


def _read_table(table: Mapping[str, object], legal: Collection[str], where: str) -> dict[str, _Given]:
    for key in table:
        if key not in legal:
            raise ConfigError(f"{where}unknown key {key}{_nearest(key, legal)}")
    return {key: _Given(value, where + key, False) for key, value in table.items()}


def _nearest(name: str, legal: Collection[str]) -> str:
    close = difflib.get_close_matches(name, sorted(legal), n=1)
    return f"; did you mean {close[0]}?" if close else ""


_EXPECTED = {
    bool: "true or false",
    str: "a string",
    int: "a whole number",
    float: "a number",
    tuple[str, ...]: "a list of strings",
}


def _convert(wanted: Any, item: _Given) -> Any:
    """Strict for TOML, whose values have types; a string from flags or environment is read as the field's type."""
    value = item.value
    if item.text and wanted == tuple[str, ...] and isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    try:
        return msgspec.convert(value, wanted, strict=not item.text)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{item.source}: expected {_EXPECTED[wanted]}, got {value!r}") from error


def _check(config: ServiceConfig, sources: Mapping[str, str]) -> None:
    """Raises ConfigError for the first value that cannot work, whatever the model."""
    for field in dataclasses.fields(config):
        source = sources.get(field.name, flag_name(field.name))
        for problem in _problems(field, getattr(config, field.name)):
            raise ConfigError(f"{source}: {problem}")
    if config.chunked_prefill_size % config.page_size:
        raise ConfigError(
            f"--page-size {config.page_size} does not divide --chunked-prefill-size {config.chunked_prefill_size}"
        )
    if config.port and config.port == config.control_port:
        raise ConfigError(f"--port and --control-port are both {config.port}")


def _problems(field: "dataclasses.Field[Any]", value: Any) -> Iterator[str]:
    low, high, choices = field.metadata["low"], field.metadata["high"], field.metadata["choices"]
    if isinstance(value, int | float) and not (low <= value <= high and math.isfinite(value)):
        limits = f"{low:g} … {high}" if math.isfinite(high) else f"at least {low:g}"
        yield f"expected {limits}, got {value}"
    if choices and value not in choices:
        yield f"expected one of {', '.join(choices)}, got {value!r}"
    match field.name:
        case "model" | "host" if not value.strip():
            yield "must not be empty"
        case "advertise_host" if value.strip("[]") in ("0.0.0.0", "::", "*"):
            yield f"{value} is a wildcard; peers need an address that they can reach"
        case "device" if not re.fullmatch(r"cpu|cuda(:\d+)?", value):
            yield f"expected cpu, cuda or cuda:N, got {value!r}"
        case "num_pages" if value == 1:
            yield "expected 0 or at least 2, got 1 (one page is padding)"
        case "prefill":
            yield from _peer_problems(value)


def _peer_problems(addresses: Sequence[str]) -> Iterator[str]:
    for address in addresses:
        match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(\d{1,5})", address)
        if match is None or not 1 <= int(match[2]) <= MAX_PORT:
            yield f"expected HOST:CONTROL_PORT, got {address!r}"
    if len(set(addresses)) < len(addresses):
        yield f"{max(addresses, key=addresses.count)} is named twice"
