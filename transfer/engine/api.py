"""The border between the HTTP face and the engine core: all that they know of each other. Either can be written and
tested alone.

The face parses, tokenizes, decides when an answer is finished and writes replies. The core owns the model, the KV cache
and the transfer. A thing that the core lends out (a running generation, a prefilled attempt) is held in `async with`.
Leaving the block, for whatever reason, gives it back, so a client that goes away frees everything by unwinding.

This module does not import torch.
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
    """The core takes no more work just now. The same request may be sent again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RankLost(TransferError):
    """A tensor-parallel rank of this engine has died, failed or fallen silent. The engine ends with it."""


class JobTooLarge(Exception):
    """The job needs more KV than this engine will ever have. The message names both numbers and is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """`ModelFacts` holds what the face must know of the model it serves."""

    name: str
    max_model_len: int
    """The most tokens of prompt and answer together."""
    vocab_size: int
    """The number of ids. Ids from 0 to `vocab_size - 1` may be fed to the model."""
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """A `GenerationJob` is one sequence to compute. It is already validated: ids in the vocabulary, `max_tokens` within
    the context."""

    request_id: str
    """The name of the sequence, for log lines only. It is unique."""
    prompt_token_ids: list[int]
    """The prompt's ids. It is never empty, and equal to the ids of the handoff or the push params where those carry
    any."""
    num_answer_tokens: int = 0
    """Counts the ids at the end of `prompt_token_ids` that are the answer's first tokens, sampled elsewhere; never all
    of them. They count for positions, penalties, `min_tokens` and `max_tokens`, and are not yielded again."""
    sampling: SamplingParams
    max_tokens: int
    """The most tokens of the whole answer, those that are not sampled here included. The core stops by itself at this
    many."""
    min_tokens: int = 0
    """The number of tokens (of the whole answer) before which the core must not sample any of `eos_token_ids`."""
    eos_token_ids: frozenset[int] = frozenset()
    """The ids after each of which the core stops by itself, once it has yielded one. Where it is empty, end-of-sequence
    is ignored."""
    push: PushParams | None = None
    handoff: Handoff | None = None
    term: int | None = None
    """The term of the leader for whom the job is asked for; None where none was told."""

    @property
    def num_question_tokens(self) -> int:
        """The number of tokens in what the client calls its prompt."""
        return len(self.prompt_token_ids) - self.num_answer_tokens

    @property
    def answer_token_ids(self) -> list[int]:
        """The answer's first tokens, sampled elsewhere (without a handoff's)."""
        return self.prompt_token_ids[self.num_question_tokens :]


class Generation(Protocol):
    """A `Generation` is a sequence being decoded:
    `async with core.generate(job) as tokens: async for token in tokens: …`."""

    @property
    def num_cached_tokens(self) -> int:
        """Counts the prompt tokens whose KV an earlier request left here (a handoff's do not count).

        The count is final once the first token has been yielded.
        """

    def __aiter__(self) -> AsyncIterator[SampledToken]:
        """Yields the tokens as they are sampled, end-of-sequence included. Ends after end-of-sequence or `max_tokens`.

        The first item is the token after `GenerationJob.answer_token_ids` and, where there is a handoff, after its
        first token.
        """


class Prefill(Protocol):
    """A `Prefill` is an attempt whose prompt has been read and whose KV is on its way to the receivers."""

    @property
    def first_token(self) -> SampledToken: ...

    @property
    def num_pages(self) -> int:
        """Counts the pages of the decoder's PD buffer, per rank, that this attempt fills."""

    @property
    def num_cached_tokens(self) -> int:
        """Counts the same as in `Generation`."""

    def keep(self) -> None:
        """Notes that a decoder goes on with this attempt. From now on leaving the block does not drop its KV.
        Synchronous."""


class EngineCore(Protocol):
    """An `EngineCore` is the engine behind the HTTP face. Every method is called from one event loop and does not block
    it.

    Errors of `generate` and `prefill`, while entering or while tokens are awaited: `TransferError` (the KV did not
    arrive, or could not be sent), `EngineBusy`, `JobTooLarge`. Anything else is a bug, answered 500. Entering a job of
    a lower term than the core has heard of raises `StaleTerm`, and nothing is begun then.
    """

    @property
    def model(self) -> ModelFacts: ...

    def generate(self, job: GenerationJob) -> AbstractAsyncContextManager[Generation]:
        """Returns a context manager. Entering it accepts the job, or raises before anything was computed; it awaits no
        forward pass.

        With a handoff, entering raises `AttemptLost` unless the attempt's KV is here. From then on the generation
        answers for the attempt's pages. Leaving the block drops what is left: sequence, KV, pages. Leaving neither
        fails nor waits for long, and works in a cancelled task.
        """

    def prefill(self, job: GenerationJob) -> AbstractAsyncContextManager[Prefill]:
        """Returns a context manager. Entering it waits for the first token (`job.push` is set); the transfer goes on
        behind it.

        Leaving the block without `Prefill.keep()` (also: cancelled while entering) drops the KV at both ends.
        """

    async def cancel(self, attempt: str) -> bool:
        """Drops an attempt's KV, in either role. Returns True once its pages are free (also if it is unknown)."""

    async def refresh(self) -> None:
        """Brings up to date what `buffer_facts` says of other processes of this engine."""

    async def sender_ended(self, epoch: str) -> bool:
        """Notes that the prefiller's process whose facts had this `epoch` has ended. Its attempts here fail, and their
        pages come back. Returns True once they are free (also where there are none)."""

    def hear_term(self, term: int) -> None:
        """Notes that there is a leader of this term. Nothing of a lower term is begun from now on."""

    def buffer_facts(self) -> BufferFacts: ...

    def fault(self) -> str | None:
        """Returns why the core cannot serve: it cannot compute any more, or not send or receive KV. Returns None while
        it is well. The words stay the same as long as the fault does."""

    def statistics(self) -> dict[str, Any]:
        """Returns numbers for ``GET /statistics``, JSON-ready."""
