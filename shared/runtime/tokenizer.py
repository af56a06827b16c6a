"""A model's tokenizer, without torch: ``AutoTokenizer`` would import it, which a front never uses."""

import hashlib
from typing import Any

from shared.errors import ConfigError
from shared.runtime.source import resolve_model


def load_tokenizer(spec: str) -> Any:
    """The value of ``--model`` → a transformers fast tokenizer, with its chat template if it has one.

    Takes about 2 s, most of it for the import. Raises ConfigError.
    """
    folder = resolve_model(spec)
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"--model {spec}: no tokenizer.json; AutoTokenizer(…).save_pretrained(…) can write one")
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as error:  # the Rust side raises plain Exception
        raise ConfigError(f"--model {spec}: cannot load the tokenizer: {str(error).splitlines()[0]}") from error


def tokenizer_identity(tokenizer: Any) -> dict[str, str]:
    """S45's fields: how text becomes tokens, and how messages become text."""
    words = tokenizer.backend_tokenizer.to_str()
    return {"tokenizer": _digest(words), "chat_template": _digest(repr(tokenizer.chat_template))}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
