"""transformers' own answer: the model as it comes, one sequence at a time, greedy, float32."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class Reference:
    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def tokens(self, prompt: list[int], max_tokens: int, **options: Any) -> list[int]:
        """The greedy continuation, its end-of-text token included."""
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                pad_token_id=0,
                **options,
            )
        return [int(t) for t in out[0, len(prompt) :]]

    def text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
