"""From a configuration to a loaded model with its pools: the part of start-up that both engines share."""

import logging
from dataclasses import dataclass

from shared.config import ServiceConfig
from shared.errors import ConfigError
from shared.kv.layout import Layout
from shared.kv.pool import KVPool
from shared.protocol.local import ModelInfo
from shared.protocol.messages import PROTOCOL_VERSION
from shared.runtime.model import layout_for, load_model
from shared.runtime.runner import ModelRunner

log = logging.getLogger(__name__)
DEFAULT_MAX_MODEL_LEN = 4096


@dataclass(frozen=True)
class LoadedRuntime:
    """What an engine needs of its model. ``fingerprint`` is S45's: two sides pair only if every field is equal."""

    runner: ModelRunner
    pool: KVPool
    layout: Layout
    info: ModelInfo
    fingerprint: dict[str, str]
    eos_token_ids: frozenset[int]


def _pool(layout: Layout, num_pages: int, max_model_len: int, config: ServiceConfig) -> KVPool:
    """Raises ConfigError where there is not so much memory."""
    gigabytes = layout.token_bytes * config.page_size * num_pages / 1e9
    size = f"{num_pages} pages of {config.page_size} tokens, {gigabytes:.3g} GB"
    try:
        pool = KVPool(layout, num_pages, config.device)
    except (RuntimeError, MemoryError) as error:  # torch's own out-of-memory errors are RuntimeErrors
        lower = "lower --max-num-seqs, --max-model-len or --num-pages"
        raise ConfigError(f"cannot allocate a KV pool of {size}, on {config.device}: {lower}") from error
    log.info("KV pool: %s on %s; a request has at most %d tokens", size, config.device, max_model_len)
    return pool


def load_runtime(config: ServiceConfig) -> LoadedRuntime:
    """Blocks for seconds; run it in the compute thread. Raises ConfigError naming the flag that is wrong."""
    loaded = load_model(config.model, config.dtype, config.device, config.threads)
    layout = layout_for(loaded.config, config.page_size, loaded.dtype)
    max_model_len = config.max_model_len or min(loaded.max_positions, DEFAULT_MAX_MODEL_LEN)
    if max_model_len > loaded.max_positions:
        raise ConfigError(f"--max-model-len {max_model_len} is beyond what the model allows ({loaded.max_positions})")
    num_pages = config.num_pages or config.max_num_seqs * layout.pages_for(max_model_len) + 1
    usable_tokens = (num_pages - 1) * config.page_size
    if usable_tokens < max_model_len:
        if config.max_model_len and config.num_pages:
            raise ConfigError(
                f"--num-pages {num_pages} holds {usable_tokens} tokens, less than one request of "
                f"--max-model-len {max_model_len}"
            )
        max_model_len = usable_tokens
    pool = _pool(layout, num_pages, max_model_len, config)
    info = ModelInfo(
        vocab_size=loaded.vocab_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        page_size=config.page_size,
        num_pages=num_pages,
        dtype=loaded.dtype,
        kv_bytes_per_token=layout.token_bytes,
        eos_token_ids=list(loaded.eos_token_ids),
    )
    fingerprint = {
        "protocol": str(PROTOCOL_VERSION),
        **loaded.identity,
        "kv_dtype": loaded.dtype,
        **layout.fingerprint(),
        "speculation": "none",
    }
    return LoadedRuntime(ModelRunner(loaded, pool), pool, layout, info, fingerprint, frozenset(loaded.eos_token_ids))
