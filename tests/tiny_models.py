"""Tiny random models, saved as Hugging Face folders with a real tokenizer: a forward takes a millisecond or two.

Weights are drawn wide enough that greedy answers vary instead of repeating one token. Token i < 256 is byte i, so that
any text round-trips and every character outside ASCII is split over tokens.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

BOS, IM_START, EOS = 256, 257, 258
TINY_VOCAB = 259
SPECIAL = {"<|bos|>": BOS, "<|im_start|>": IM_START, "<|im_end|>": EOS}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tiny_llama(path: Path, *, vocab_size: int = TINY_VOCAB, layers: int = 2, seed: int = 0, **config: Any) -> Path:
    """4 query heads on 2 K/V heads, untied embeddings, float32; ``config`` overrides any field. Returns ``path``."""
    return save_tiny("llama", path, vocab_size=vocab_size, num_hidden_layers=layers, seed=seed, **config)


def save_tiny_mha(path: Path, *, seed: int = 0, **config: Any) -> Path:
    """A llama with as many K/V heads as query heads, and tied embeddings. Returns ``path``."""
    return save_tiny("llama", path, seed=seed, num_key_value_heads=4, tie_word_embeddings=True, **config)


def save_tiny_qwen3(path: Path, *, seed: int = 0, **config: Any) -> Path:
    """Norms on query and key, and heads wider than hidden size / heads. Returns ``path``."""
    return save_tiny("qwen3", path, seed=seed, head_dim=32, **config)


def save_tiny(
    family: str, path: Path, *, seed: int = 0, eos_token_ids: tuple[int, ...] = (EOS,), **config: Any
) -> Path:
    """A random model of any family that transformers knows, with tokenizer and generation config. Returns ``path``."""
    fields = {
        "vocab_size": TINY_VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
        "bos_token_id": BOS,
        "eos_token_id": list(eos_token_ids),
        "pad_token_id": EOS,
        **config,
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields), dtype=torch.float32)
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=list(eos_token_ids), pad_token_id=EOS)
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def byte_tokenizer() -> Any:
    """One token a byte and three special tokens; a prompt gets no BOS."""
    alphabet = {_byte_symbol(byte): byte for byte in range(256)}
    backend = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _byte_symbol(byte: int) -> str:
    """The printable character that stands for a byte in byte-level vocabularies (the GPT-2 convention)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return chr(byte if byte in plain else 256 + byte - sum(p < byte for p in plain))
