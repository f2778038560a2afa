"""The module judges whether an answer was right. It is pure: it takes a question and the reply to it, or as much of the
reply as came."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pdproxy.openai.answer import Usage
from scripts.dev.soak.plan import REQUEST_TIMEOUT_S
from scripts.dev.soak.questions import Answer, Question
from scripts.dev.soak.reply import Reply, Said

TYPED_STATUSES = frozenset({408, 429, 502, 503, 504})
"""The statuses with which a client may be refused when nothing is wrong with its request."""

REFUSALS = frozenset({429, 503})
"""The statuses with which a client may be refused when nothing is wrong with any engine."""


class Verdict(StrEnum):
    COMPLETED = "completed"
    TYPED_ERROR = "typed_error"
    WRONG = "wrong_answer"
    HUNG = "hung"
    LEFT = "left"
    """The client did not wait for the end."""
    PROXY_KILLED = "proxy_killed"
    """The connection was lost because the soak had killed the proxy."""


def judge(question: Question, num_choices: int, reply: Reply) -> tuple[Verdict, str]:
    """Returns the verdict and why: the error's code, or what is wrong."""
    if reply.error is not None:
        return _judge_error(question, reply, reply.error)
    wrong = _what_is_wrong(question, num_choices, reply)
    return (Verdict.WRONG, wrong) if wrong else (Verdict.COMPLETED, "")


def what_is_wrong_with_an_error(reply: Reply, took_s: float, *, limit_s: float) -> str:
    """Returns what is wrong with an error, which came after `took_s` seconds, where no engine and nothing of the
    client's own proxy had a fault; empty: nothing. What began has to go on, and who is refused is told in time when to
    come again."""
    if reply.status not in REFUSALS:
        return f"{reply.status} though neither an engine nor this proxy had a fault: {reply.error}"
    if reply.retry_after is None:
        return f"{reply.status} without Retry-After: {reply.error}"
    return f"{reply.status} only after {took_s:.1f} s: {reply.error}" if took_s > limit_s else ""


def ran_out_of_time(reply: Reply, took_s: float) -> bool:
    """Tells whether the error says that the request had all of its time, and that is so. Limits of single steps say
    something else."""
    assert reply.error is not None
    told = f"the request took longer than {REQUEST_TIMEOUT_S:g} s"
    return reply.error.get("message") == told and took_s > REQUEST_TIMEOUT_S - 1


def what_is_wrong_so_far(question: Question, reply: Reply) -> str:
    """Returns what is wrong with as much of an answer as had come when it was cut off; empty: nothing."""
    if question.answer is None:
        return "a request that is too long was begun" if reply.choices else ""
    for said in reply.choices.values():
        if not _begins(question.answer, said):
            return f"{said!r} is no beginning of {question.answer.said!r}"
    return ""


def _judge_error(question: Question, reply: Reply, error: dict[str, Any]) -> tuple[Verdict, str]:
    told = f"{reply.status} {error.get('code')}"
    if not all(isinstance(error.get(name), str) for name in ("message", "type")):
        return Verdict.WRONG, f"the error {error!r} has no type or message"
    if reply.status == 200:
        return _judge_broken_stream(question, reply, told)
    if reply.status in TYPED_STATUSES or _is_refusal(question, reply, error):
        return Verdict.TYPED_ERROR, told
    return Verdict.WRONG, f"an unexpected {told}: {error['message']}"


def _is_refusal(question: Question, reply: Reply, error: dict[str, Any]) -> bool:
    return question.answer is None and reply.status == 400 and error.get("code") == "context_length_exceeded"


def _judge_broken_stream(question: Question, reply: Reply, told: str) -> tuple[Verdict, str]:
    """Returns the verdict for a stream that ended with an error; what came before the error must have been right."""
    if question.answer is None:
        return Verdict.WRONG, "a request that is too long was begun"
    wrong = what_is_wrong_so_far(question, reply)
    return (Verdict.WRONG, f"before the error {told}: {wrong}") if wrong else (Verdict.TYPED_ERROR, told)


def _begins(answer: Answer, said: Said) -> bool:
    """Tells whether `said` is a beginning of the answer, or all of it."""
    expected = answer.said
    return expected.text.startswith(said.text) and said.tokens == expected.tokens[: len(said.tokens)]


def _what_is_wrong(question: Question, num_choices: int, reply: Reply) -> str:
    if reply.status != 200:
        return f"HTTP {reply.status} without an error object"
    if question.answer is None:
        return "a request that is too long was answered"
    if not reply.is_complete:
        return f"the stream ended without [DONE] and without an error, after {reply.num_events} events"
    if len(reply.ids) != 1:
        return f"one answer with several ids: {reply.ids}"
    if sorted(reply.choices) != list(range(num_choices)):
        return f"choices {sorted(reply.choices)} instead of {num_choices}"
    told = (_difference(question.answer.said, said) for said in reply.choices.values())
    return next((what for what in told if what), _usage_difference(question.answer, num_choices, reply.usage))


def _difference(expected: Said, said: Said) -> str:
    if said.tokens and said.tokens != expected.tokens:
        return f"tokens {said.tokens} instead of {expected.tokens}"
    if (said.text, said.finish_reason) != (expected.text, expected.finish_reason):
        return f"{said.text!r} ({said.finish_reason}) instead of {expected.text!r} ({expected.finish_reason})"
    return ""


def _usage_difference(answer: Answer, num_choices: int, usage: Usage | None) -> str:
    expected = (answer.prompt_tokens, answer.completion_tokens * num_choices)
    told = None if usage is None else (usage.prompt_tokens, usage.completion_tokens)
    return "" if told == expected else f"usage {told} instead of {expected}"
