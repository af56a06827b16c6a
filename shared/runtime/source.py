"""Where a model's files are. Imports no torch, so that a front can use it."""

import re
from pathlib import Path

from shared.errors import ConfigError
from shared.runtime.default_model import unpacked_gguf

DEFAULT_MODEL = "smollm2-135m-instruct"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]


def resolve_model(spec: str) -> Path:
    """The value of ``--model`` → a folder with config.json, weights and tokenizer on this machine.

    Takes the alias of the default model, a Hugging Face folder, a GGUF file, or a hub id; the last two may take minutes
    at the first use. Raises ConfigError.
    """
    if spec == DEFAULT_MODEL:
        return unpacked_gguf()
    path = Path(spec).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"--model {spec}: the folder has no config.json")
        return path
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ConfigError(f"--model {spec}: the file is no GGUF file")
        return unpacked_gguf(path)
    if HUB_ID.fullmatch(spec):
        return _from_hub(spec)
    raise ConfigError(
        f"--model {spec}: no such file or folder, nor a hub id (owner/name), nor the alias {DEFAULT_MODEL}"
    )


def _from_hub(spec: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(spec, allow_patterns=HUB_FILES))
    except Exception as error:  # whatever its HTTP layer and its own error families raise: the operator's to repair
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"--model {spec}: no such folder, and not to be had from the hub: {reason}") from error
