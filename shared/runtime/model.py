"""A model as its checkpoint describes it: unmodified transformers code, run with our attention."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from shared.errors import ConfigError
from shared.kv.layout import KV, Buffer, Layout
from shared.runtime.attention import ATTENTION
from shared.runtime.source import resolve_model
from shared.runtime.tokenizer import load_tokenizer, tokenizer_identity

DTYPES = ("float32", "bfloat16", "float16")
FAMILIES = ("llama", "mistral", "mixtral", "olmo2", "granite", "qwen2", "qwen3", "qwen3_moe", "smollm3")
"""Model types whose every layer is plain causal attention over K and V per head; each has an equality test."""
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Other kinds turn a key by an angle that depends on the longest sequence of its batch: such rows cannot be shared."""
SAMPLES = 64


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, and what the rest needs to know of it."""

    model: Any
    """transformers' …ForCausalLM, in eval mode, no gradients."""
    folder: Path
    config: Any
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_positions: int
    dtype: str
    device: str
    identity: dict[str, str]
    """S45: model, weights, tokenizer, chat template; short hashes that name no path and no version."""


def load_model(spec: str, dtype: str, device: str, threads: int) -> LoadedModel:
    """Load ``spec`` (see ``resolve_model``) and set torch's thread count; 0 means all cores that this process may use.

    ``dtype`` "auto" is the checkpoint's own type, except on a CPU without instructions for it: there it is float32,
    since 16-bit matrix products are emulated (measured on AVX2: 6 times slower). Raises ConfigError in one line.
    """
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device {device}: this torch build or machine has no CUDA")
    folder = resolve_model(spec)
    tokenizer = load_tokenizer(spec)
    transformers.utils.logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(folder)
        check_family(config)
        dtype = choose_dtype(dtype, config, device)
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=getattr(torch, dtype),
            attn_implementation=ATTENTION,
            output_loading_info=True,
        )
        eos = _eos_token_ids(folder, config)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ConfigError(f"--model {spec}: {str(error).strip().splitlines()[0]}") from error
    if wrong := sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]])):
        raise ConfigError(f"--model {spec}: {len(wrong)} weights are missing or of another shape, the first {wrong[0]}")
    model.eval().requires_grad_(False).to(device)
    identity = {"model": config_identity(config), "weights": _weights_identity(model), **tokenizer_identity(tokenizer)}
    return LoadedModel(
        model, folder, model.config, eos, config.vocab_size, config.max_position_embeddings, dtype, device, identity
    )


def layout_for(config: Any, page_size: int, dtype: str) -> Layout:
    """One fused buffer a layer: a token's K and V lie side by side, so that a run of pages is one block on the wire and
    one gather in attention. Row shape (2, kv heads, head dim). Raises ConfigError for families that do not fit."""
    check_family(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    row_shape = (2, config.num_key_value_heads, head_dim)
    return Layout(page_size, tuple(Buffer(KV, layer, row_shape, dtype) for layer in range(config.num_hidden_layers)))


def check_family(config: Any) -> None:
    """Raises ConfigError where this runtime would compute something else than the model means."""
    if config.model_type not in FAMILIES:
        raise ConfigError(f"model type {config.model_type!r} is not supported; supported: {', '.join(FAMILIES)}")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds or (getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)):
        raise ConfigError(
            f"model type {config.model_type!r} with {', '.join(kinds) or 'sliding window'} is not supported"
        )
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope not in STATIC_ROPE:
        raise ConfigError(f"rotary embedding {rope!r} is not supported; supported: {', '.join(STATIC_ROPE)}")


def choose_dtype(dtype: str, config: Any, device: str) -> str:
    """See ``load_model``. Raises ConfigError for a type that is none of ours."""
    if dtype != "auto":
        if dtype not in DTYPES:
            raise ConfigError(f"--dtype {dtype}: expected auto, {', '.join(DTYPES)}")
        return dtype
    own = str(config.dtype or "float32").removeprefix("torch.")
    if own not in DTYPES:
        raise ConfigError(f"the checkpoint's type is {own}; say which of {', '.join(DTYPES)} with --dtype")
    if device != "cpu" or own == "float32":
        return own
    instructions = {"bfloat16": "bf16", "float16": "fp16"}[own]  # as in amx_bf16, avx512_bf16, avx512_fp16
    native = any(there for name, there in torch.cpu.get_capabilities().items() if instructions in name)
    return own if native else "float32"


def config_identity(config: Any) -> str:
    """Model type and a hash of everything that shapes the computation."""
    left_out = ("_name_or_path", "transformers_version", "dtype", "architectures")
    fields = {name: value for name, value in config.to_dict().items() if name not in left_out}
    canonical = json.dumps(fields, sort_keys=True, default=str)
    return f"{config.model_type}-{hashlib.sha256(canonical.encode()).hexdigest()[:16]}"


def _weights_identity(model: Any) -> str:
    """A hash over names, shapes and some values of every tensor: cheap, and no fine-tune leaves all of those alone."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        values = weight.reshape(-1)
        picked = values[:: max(1, len(values) // SAMPLES) | 1].float().cpu().numpy()
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        digest.update(picked.tobytes())
    return digest.hexdigest()[:16]


def _eos_token_ids(folder: Path, config: Any) -> tuple[int, ...]:
    """generation_config.json's if it names any, else config.json's; empty where neither does."""
    ids = config.eos_token_id
    if (folder / "generation_config.json").is_file():
        ids = GenerationConfig.from_pretrained(folder).eos_token_id or ids
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)
