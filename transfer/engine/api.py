"""What the HTTP face and the engine core know of each other; either can be written and tested alone.

The face parses, tokenizes, decides when an answer is finished and writes replies. The core owns the model,
the KV cache and the transfer. What the core lends out (a running generation, a prefilled attempt) is held in
`async with`: leaving the block, for whatever reason, gives it back, so a client that goes away frees
everything by unwinding.

No torch here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from transfer.errors import TransferError

if TYPE_CHECKING:
    from transfer.engine.sampling import SampledToken, SamplingParams
    from transfer.wire import BufferFacts, Handoff, PushParams


class EngineBusy(Exception):
    """The core takes no more work just now; the same request may be sent again after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RankLost(TransferError):
    """A tensor-parallel rank of this engine has died, failed or fallen silent; the engine ends with it."""


class JobTooLarge(Exception):
    """The job needs more KV than this engine will ever have; the message names both numbers and is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the face must know of the model it serves."""

    name: str
    max_model_len: int
    """Tokens, prompt and answer together."""
    vocab_size: int
    """Ids from 0 to `vocab_size - 1` may be fed to the model."""
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """One sequence to compute, already validated: ids in the vocabulary, `max_tokens` within the context."""

    request_id: str
    """Unique per sequence; for log lines only."""
    prompt_token_ids: list[int]
    """Never empty. Equal to the handoff's or the push params' ids where those carry any."""
    num_answer_tokens: int = 0
    """The last so many of `prompt_token_ids` are the answer's first tokens, sampled elsewhere; never all of them.
    They count for positions, penalties, `min_tokens` and `max_tokens`, and are not yielded again."""
    sampling: SamplingParams
    max_tokens: int
    """Tokens of the whole answer, those that are not sampled here included. The core stops by itself at this many."""
    min_tokens: int = 0
    """Before this many tokens (of the whole answer) the core must not sample any of `eos_token_ids`."""
    eos_token_ids: frozenset[int] = frozenset()
    """The core stops by itself after yielding one of these. Empty: end-of-sequence is ignored."""
    push: PushParams | None = None
    handoff: Handoff | None = None

    @property
    def num_question_tokens(self) -> int:
        """What the client calls its prompt."""
        return len(self.prompt_token_ids) - self.num_answer_tokens

    @property
    def answer_token_ids(self) -> list[int]:
        """The answer's first tokens, sampled elsewhere (without a handoff's)."""
        return self.prompt_token_ids[self.num_question_tokens :]


class Generation(Protocol):
    """A sequence being decoded: `async with core.generate(job) as tokens: async for token in tokens: …`."""

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV an earlier request left here (a handoff's do not count).

        Final once the first token has been yielded.
        """

    def __aiter__(self) -> AsyncIterator[SampledToken]:
        """The tokens as they are sampled, end-of-sequence included; ends after `max_tokens` or that.

        The first item is the token after `GenerationJob.answer_token_ids` and, where there is a handoff, after
        its first token.
        """


class Prefill(Protocol):
    """An attempt whose prompt has been read and whose KV is on its way to the receivers."""

    @property
    def first_token(self) -> SampledToken: ...

    @property
    def num_pages(self) -> int:
        """Pages of the decoder's PD buffer, per rank, that this attempt fills."""

    @property
    def num_cached_tokens(self) -> int:
        """As in `Generation`."""

    def keep(self) -> None:
        """A decoder goes on with this attempt: leaving the block no longer drops its KV. Synchronous."""


class EngineCore(Protocol):
    """The engine behind the HTTP face. Every method is called from one event loop and does not block it.

    Errors of `generate` and `prefill`, while entering or while tokens are awaited: `TransferError` (the KV
    did not arrive, or could not be sent), `EngineBusy`, `JobTooLarge`. Anything else is a bug, answered 500.
    """

    @property
    def model(self) -> ModelFacts: ...

    def generate(self, job: GenerationJob) -> AbstractAsyncContextManager[Generation]:
        """Entering accepts the job, or raises before anything was computed; it awaits no forward pass.

        With a handoff, entering raises `AttemptLost` unless the attempt's KV is here; from then on the
        generation answers for the attempt's pages. Leaving the block drops what is left: sequence, KV,
        pages. Leaving neither fails nor waits for long, and works in a cancelled task.
        """

    def prefill(self, job: GenerationJob) -> AbstractAsyncContextManager[Prefill]:
        """Entering waits for the first token (`job.push` is set); the transfer goes on behind it.

        Leaving the block without `Prefill.keep()` (also: cancelled while entering) drops the KV at both ends.
        """

    async def cancel(self, attempt: str) -> bool:
        """Drop an attempt's KV, in either role; True once its pages are free (also if it is unknown)."""

    async def refresh(self) -> None:
        """Bring up to date what `buffer_facts` says of other processes of this engine."""

    async def sender_ended(self, epoch: str) -> bool:
        """The prefiller's process whose facts had this `epoch` has ended: what it wrote here fails, and the pages come
        back. True once they are free (also where there are none)."""

    def buffer_facts(self) -> BufferFacts: ...

    def is_healthy(self) -> bool:
        """False when the core cannot compute any more (its thread has died): replace the process."""

    def statistics(self) -> dict[str, Any]:
        """Numbers for ``GET /statistics``, JSON-ready."""
