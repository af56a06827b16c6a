"""One configuration from four sources, and one clear line for everything that cannot work."""

from collections.abc import Callable
from pathlib import Path

import pytest

from shared.config import DecodeConfig, PrefillConfig, load
from shared.errors import ConfigError


def decode(*argv: str, file: str = "", **environ: str) -> DecodeConfig:
    if file:
        argv = ("--config", file, *argv)
    return load(DecodeConfig, "decode", argv, environ)


def prefill(*argv: str, **environ: str) -> PrefillConfig:
    return load(PrefillConfig, "prefill", argv, environ)


def refusal(*argv: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        decode(*argv, **environ)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.fixture
def toml(tmp_path: Path) -> Callable[[str], str]:
    """Writes a file and returns its path."""

    def write(text: str) -> str:
        path = tmp_path / "handoff.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_defaults_are_those_of_the_dataclass() -> None:
    assert decode() == DecodeConfig()
    assert prefill() == PrefillConfig()
    assert (decode().port, decode().control_port) == (8000, 8999)
    assert (prefill().port, prefill().control_port) == (8100, 8998)


def test_a_flag_wins_over_environment_over_file_over_default(toml: Callable[[str], str]) -> None:
    file = toml("port = 1\ncontrol_port = 2\nthreads = 3\n")
    config = decode("--port", "21", file=file, HANDOFF_PORT="11", HANDOFF_CONTROL_PORT="12")
    assert (config.port, config.control_port, config.threads, config.page_size) == (21, 12, 3, 16)


def test_the_three_sources_say_the_same_things(toml: Callable[[str], str]) -> None:
    wanted = DecodeConfig(
        model="m", dtype="bfloat16", page_size=32, drain_s=2.5, prefill=("a:1", "[::1]:2"), request_timeout_s=9.0
    )
    flags = (
        "--model m --dtype bfloat16 --page-size 32 --drain-s=2.5 --prefill a:1 --prefill [::1]:2 --request-timeout-s 9"
    )
    assert decode(*flags.split()) == wanted
    variables = {"MODEL": "m", "DTYPE": "bfloat16", "PAGE_SIZE": "32", "DRAIN_S": "2.5", "REQUEST_TIMEOUT_S": "9"}
    variables["PREFILL"] = "a:1, [::1]:2"
    assert decode(**{f"HANDOFF_{key}": value for key, value in variables.items()}) == wanted
    lines = 'model="m"\ndtype="bfloat16"\npage_size=32\ndrain_s=2.5\nprefill=["a:1","[::1]:2"]\nrequest_timeout_s=9\n'
    assert decode(file=toml(lines)) == wanted


def test_one_file_and_one_environment_serve_both_services(toml: Callable[[str], str]) -> None:
    file = toml('page_size = 8\nprefill = ["a:1"]\n[prefill-svc]\nport = 1\n[decode-svc]\nport = 2\npage_size = 64\n')
    environ = {"HANDOFF_CONFIG": file, "HANDOFF_REQUEST_TIMEOUT_S": "7", "HANDOFF_CACHE": "/x", "PATH": "/bin"}
    assert prefill(**environ) == PrefillConfig(page_size=8, port=1)
    assert decode(**environ) == DecodeConfig(page_size=64, port=2, prefill=("a:1",), request_timeout_s=7.0)


def test_an_empty_variable_is_unset() -> None:
    assert decode(HANDOFF_PORT="", HANDOFF_PREFILL="") == DecodeConfig()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--prot 1", "unknown argument --prot; did you mean --port?"),
        ("--port", "argument --port: expected one argument"),
        ("stray", "unknown argument stray"),
        ("--por 1", "unknown argument --por; did you mean --port?"),
        ("--port x", "--port: expected a whole number, got 'x'"),
        ("--port 65536", "--port: expected 0 … 65535, got 65536"),
        ("--control-port -1", "--control-port: expected 0 … 65535, got -1"),
        ("--port 8999", "--port and --control-port are both 8999"),
        ("--page-size 0", "--page-size: expected at least 1, got 0"),
        ("--page-size 24", "--page-size 24 does not divide --chunked-prefill-size 2048"),
        ("--num-pages 1", "--num-pages: expected 0 or at least 2, got 1 (one page is padding)"),
        ("--max-num-seqs 0", "--max-num-seqs: expected at least 1, got 0"),
        ("--drain-s nan", "--drain-s: expected at least 0, got nan"),
        ("--request-timeout-s inf", "--request-timeout-s: expected at least 0.001, got inf"),
        ("--dtype fp32", "--dtype: expected one of auto, float32, bfloat16, float16, got 'fp32'"),
        ("--log-level loud", "--log-level: expected one of debug, info, warning, error, got 'loud'"),
        ("--device gpu", "--device: expected cpu, cuda or cuda:N, got 'gpu'"),
        (
            "--advertise-host 0.0.0.0",
            "--advertise-host: 0.0.0.0 is a wildcard; peers need an address that they can reach",
        ),
        ("--advertise-host [::]", "--advertise-host: [::] is a wildcard; peers need an address that they can reach"),
        ("--prefill host", "--prefill: expected HOST:CONTROL_PORT, got 'host'"),
        ("--prefill host:0", "--prefill: expected HOST:CONTROL_PORT, got 'host:0'"),
        ("--prefill tcp://h:1", "--prefill: expected HOST:CONTROL_PORT, got 'tcp://h:1'"),
        ("--prefill ::1:8998", "--prefill: expected HOST:CONTROL_PORT, got '::1:8998'"),
        ("--prefill a:1 --prefill b:1 --prefill a:1", "--prefill: a:1 is named twice"),
    ],
)
def test_a_flag_that_cannot_work_is_one_line(argv: str, message: str) -> None:
    assert refusal(*argv.split()) == message


@pytest.mark.parametrize("value", ["", " "])
def test_a_model_must_have_a_name(value: str) -> None:
    assert refusal("--model", value) == "--model: must not be empty"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("HANDOFF_PROT", "1", "unknown environment variable HANDOFF_PROT; did you mean HANDOFF_PORT?"),
        ("HANDOFF_PORT", "tcp://10.0.0.1:80", "HANDOFF_PORT: expected a whole number, got 'tcp://10.0.0.1:80'"),
        ("HANDOFF_PREFILL", "a:1,", "HANDOFF_PREFILL: expected HOST:CONTROL_PORT, got ''"),
        ("HANDOFF_PAGE_SIZE", "-4", "HANDOFF_PAGE_SIZE: expected at least 1, got -4"),
    ],
)
def test_a_variable_that_cannot_work_is_one_line(variable: str, value: str, message: str) -> None:
    assert refusal(**{variable: value}) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("page_sise = 16", "unknown key page_sise; did you mean page_size?"),
        ("page-size = 16", "unknown key page-size; did you mean page_size?"),
        ("[decode]\nport = 1", "unknown key decode; did you mean decode-svc?"),
        ('[prefill-svc]\nprefill = ["a:1"]', "[prefill-svc] unknown key prefill"),
        ("decode-svc = 3", "[decode-svc] must be a table"),
        ('port = "8000"', "port: expected a whole number, got '8000'"),
        ("port = true", "port: expected a whole number, got True"),
        ("[decode-svc]\nport = -1", "[decode-svc] port: expected 0 … 65535, got -1"),
        ('prefill = "a:1"', "prefill: expected a list of strings, got 'a:1'"),
        ("model = 3", "model: expected a string, got 3"),
    ],
)
def test_a_file_that_cannot_work_is_named_with_its_key(toml: Callable[[str], str], text: str, message: str) -> None:
    file = toml(text)
    assert refusal("--config", file) == f"{file}: {message}"


def test_a_file_that_cannot_be_read_is_named(toml: Callable[[str], str], tmp_path: Path) -> None:
    assert refusal("--config", str(tmp_path / "none")) == f"cannot read {tmp_path / 'none'}: No such file or directory"
    assert refusal("--config", str(tmp_path)) == f"cannot read {tmp_path}: Is a directory"
    file = toml("port = = 1")
    assert refusal("--config", file).startswith(f"{file} is not valid TOML: ")


def test_help_names_every_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        decode("--help")
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--max-num-seqs INT requests in one batch; on decode also the number of metadata slots (default: 16)" in text
    assert "--prefill HOST:CONTROL_PORT HOST:CONTROL_PORT of a prefill service; repeatable (default: none)" in text


def test_prefill_has_no_flag_that_only_decode_knows() -> None:
    with pytest.raises(ConfigError, match="unknown argument --prefill"):
        prefill("--prefill", "a:1")


@pytest.mark.parametrize(
    ("flags", "environ", "layerwise", "group"),
    [
        ([], {}, True, 8),
        (["--no-layerwise"], {}, False, 8),
        (["--layerwise", "--transfer-layer-group", "3"], {"HANDOFF_LAYERWISE": "false"}, True, 3),
        ([], {"HANDOFF_LAYERWISE": "0", "HANDOFF_TRANSFER_LAYER_GROUP": "79"}, False, 79),
    ],
)
def test_s27_layerwise_and_its_group_are_separate_switches(
    flags: list[str], environ: dict[str, str], layerwise: bool, group: int
) -> None:
    config = load(PrefillConfig, "prefill", flags, environ)
    assert (config.layerwise, config.transfer_layer_group) == (layerwise, group)


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        (["--transfer-layer-group", "0"], {}, "--transfer-layer-group: expected at least 1, got 0"),
        ([], {"HANDOFF_LAYERWISE": "perhaps"}, "HANDOFF_LAYERWISE: expected true or false, got 'perhaps'"),
        (["--transfer-limit-s", "0"], {}, "--transfer-limit-s: expected at least 0.001, got 0"),
    ],
)
def test_s27_a_switch_that_cannot_be_is_refused_at_the_start(
    flags: list[str], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(PrefillConfig, "prefill", flags, environ)
