"""The module holds a prompt's length in tokens, as far as it is known."""

from __future__ import annotations


class PromptSize:
    """A `PromptSize` is a prompt's length. `tokens` is an upper bound where `is_exact` is False.

    `ids` are the prompt's ids where the proxy knows them, else None. The last `num_answer_tokens` of the ids are the
    beginning of the answer, which another engine continues.
    """

    __slots__ = ("ids", "is_exact", "num_answer_tokens", "tokens")

    def __init__(
        self, *, tokens: int, is_exact: bool, ids: list[int] | None = None, num_answer_tokens: int = 0
    ) -> None:
        self.tokens = tokens
        self.is_exact = is_exact
        self.ids = ids
        self.num_answer_tokens = num_answer_tokens

    def with_ids(self, ids: list[int] | None) -> PromptSize:
        """Returns the same length with the prompt's ids, or without them."""
        return PromptSize(tokens=self.tokens, is_exact=self.is_exact, ids=ids, num_answer_tokens=self.num_answer_tokens)

    def with_answer(self, prompt_ids: list[int], answer_ids: list[int]) -> PromptSize:
        """Returns the size of what must be prefilled for an answer whose first tokens were shown already: the prompt
        and these tokens.
        """
        ids = prompt_ids + answer_ids
        return PromptSize(tokens=len(ids), is_exact=True, ids=ids, num_answer_tokens=len(answer_ids))
