"""How the choices of one request (OpenAI's ``n``) share its pages. Pure.

All of them read the pages that end before the prompt's last token. Choice 0 goes on where prefill's rows landed. Each
other choice has its own copy of the last token's page, and pages of its own behind it; it computes that token's row
once more, since its first token is drawn from that forward.
"""

from dataclasses import dataclass

import numpy as np

from shared.kv.pages import Pages


@dataclass(frozen=True)
class PageNeed:
    """Pages of one request: ``landing`` hold its prompt, ``shared`` of them serve every choice, ``each`` are what one
    choice fills from the prompt's first token on."""

    landing: int
    shared: int
    each: int
    choices: int

    @classmethod
    def of(cls, prompt_tokens: int, max_tokens: int, choices: int, page_size: int) -> "PageNeed":
        each = -(-(prompt_tokens + max_tokens - 1) // page_size)  # the last token is sampled but never written
        return cls(-(-prompt_tokens // page_size), (prompt_tokens - 1) // page_size, each, choices)

    @property
    def total(self) -> int:
        return self.each + (self.choices - 1) * (self.each - self.shared)

    def of_choice(self, pages: Pages, choice: int) -> Pages:
        """``[each]`` in position order, of all the request's pages ``[total]``."""
        if choice == 0:
            return pages[: self.each]
        own = self.each - self.shared
        start = self.each + (choice - 1) * own
        return np.concatenate([pages[: self.shared], pages[start : start + own]])
