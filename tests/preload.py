"""Imported once by the fork server, so that each service starts in a fraction of a second.

Importing must run no torch operation (a forked OpenMP pool hangs) and make no transfer engine.
"""

import aiohttp.web  # noqa: F401
import aiozmq  # noqa: F401
import torch  # noqa: F401
import transformers  # noqa: F401
from transformers.models.llama import modeling_llama  # noqa: F401
from transformers.models.qwen3 import modeling_qwen3  # noqa: F401
