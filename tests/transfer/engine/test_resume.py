"""An answer that goes on elsewhere is the same answer, wherever its stream was cut: nothing missing, nothing twice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.engine_core import ScriptedCore
from transfer.engine.answer import Answer
from transfer.engine.api import GenerationJob
from transfer.engine.cache_need import cache_need
from transfer.engine.sampling import SampledToken, SamplingParams
from transfer.engine.sequence import Sequence
from transfer.engine.server import build_app
from transfer.engine.tiny import VOCABULARY_SIZE, make_tiny_tokenizer
from transfer.geometry import PageGroup
from transfer.plan.blocks import page_table

END = 1
USER = 4
QUESTION = [9, 8, 7]
TEXT = "Hello wörld, it rains."
RECEIVERS = [{"rank": 0, "host": "127.0.0.1", "port": 7300}]
PATHS = ["completions", "chat/completions"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("tokenizers")
    return {name: make_tiny_tokenizer(folder / name, name) for name in ("ascii", "bytes")}


@pytest.fixture
def tokenizer(tokenizers: dict[str, Any]) -> Any:
    return tokenizers["bytes"]


@pytest.fixture
def answer_ids(tokenizer: Any) -> list[int]:
    """`TEXT`, one token per byte, and end-of-sequence."""
    return [*(i for character in TEXT for i in tokenizer.encode(character, add_special_tokens=False)), END]


@pytest.fixture
def core(answer_ids: list[int]) -> ScriptedCore:
    return scripted(answer_ids)


@pytest.fixture
async def client(core: ScriptedCore, tokenizer: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(core, tokenizer) as client:
        yield client
    assert core.num_lent == 0


def scripted(answer_ids: list[int]) -> ScriptedCore:
    """Plays both roles: says of the answer what comes behind what the job has."""

    def rest(job: GenerationJob) -> list[SampledToken]:
        assert job.prompt_token_ids == [*QUESTION, *answer_ids[: job.num_answer_tokens]]
        start = job.num_answer_tokens + (job.handoff is not None)
        return [SampledToken(token_id, -0.25) for token_id in answer_ids[start:]]

    return ScriptedCore(rest, role="both")


def client_of(core: ScriptedCore, tokenizer: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(build_app(core, tokenizer)), base_url="http://engine")


def body(path: str = "completions", **fields: Any) -> dict[str, Any]:
    prompt = {"prompt": QUESTION} if path == "completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    start = {"kv_transfer_params": {"prompt_token_ids": QUESTION, "num_answer_tokens": 0}}
    return {"model": "tiny", "max_tokens": 100} | prompt | start | fields


def resumed(shown: list[int]) -> dict[str, Any]:
    return {"prompt_token_ids": [*QUESTION, *shown], "num_answer_tokens": len(shown)}


def push(shown: list[int]) -> dict[str, Any]:
    return {"attempt": "a-1", "receivers": RECEIVERS, "timeout_s": 5.0} | resumed(shown)


@dataclass
class Told:
    """What the choices of a stream's chunks, or of a whole reply, told."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_roles: int = 0
    finish_reason: str | None = None
    scores: list[tuple[str, float | None]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    usage: dict[str, Any] | None = None

    def add(self, chunk: dict[str, Any]) -> None:
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            assert self.finish_reason is None, "a chunk after the last one"
            part = choice.get("delta") or choice.get("message") or {}
            self.num_roles += "role" in choice.get("delta", {})
            self.text += choice.get("text") or part.get("content") or ""
            self.token_ids += choice["token_ids"]
            self.finish_reason = choice["finish_reason"]
            self._add_logprobs(choice["logprobs"] or {})

    def _add_logprobs(self, logprobs: dict[str, Any]) -> None:
        self.scores += [(entry["token"], entry["logprob"]) for entry in logprobs.get("content", [])]
        self.scores += zip(logprobs.get("tokens", []), logprobs.get("token_logprobs", []), strict=True)
        self.offsets += logprobs.get("text_offset", [])


def told(chunks: list[dict[str, Any]]) -> Told:
    result = Told()
    for chunk in chunks:
        result.add(chunk)
    return result


async def stream(client: httpx.AsyncClient, path: str, wish: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks, the usage's included, of an answer served by one engine, or by way of a prefill leg."""
    options = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    response = await client.post(f"/v1/{path}", json=wish | options)
    assert response.status_code == 200, response.text
    *events, last = [block.removeprefix("data: ") for block in response.text.split("\n\n") if block]
    assert last == "[DONE]"
    return [json.loads(event) for event in events]


async def stream_by_transfer(
    client: httpx.AsyncClient, path: str, wish: dict[str, Any], shown: list[int]
) -> list[dict[str, Any]]:
    leg = wish | {"kv_transfer_params": push(shown), "return_token_ids": True}
    reply = (await client.post(f"/v1/{path}", json=leg)).json()
    handoff = reply.pop("kv_transfer_params", None)
    if handoff is None:
        return [reply]
    assert reply["choices"][0]["token_ids"] == [handoff["first_token_id"]]
    assert handoff.get("num_answer_tokens", 0) == len(shown)
    return await stream(client, path, wish | {"kv_transfer_params": handoff})


# ── the property ────────────────────────────────────────────────────────────────────────────────────────────────────

CHARACTERS = "ab# é€😀\N{REPLACEMENT CHARACTER}"
texts = st.text(CHARACTERS, max_size=8)
stop_sets = st.lists(st.text(CHARACTERS, min_size=1, max_size=4), max_size=3)
pieces = st.lists(texts | st.lists(st.integers(2, VOCABULARY_SIZE - 1), max_size=4), max_size=4)


@settings(deadline=None, max_examples=40)
@given(
    vocabulary=st.sampled_from(["ascii", "bytes"]),
    pieces=pieces,
    stop=stop_sets,
    limit=st.integers(1, 40),
    path=st.sampled_from(PATHS),
    by_transfer=st.booleans(),
    logprobs=st.booleans(),
    ignore_eos=st.booleans(),
)
def test_a_stream_cut_after_any_event_goes_on_exactly(
    tokenizers: dict[str, Any],
    vocabulary: str,
    pieces: list[str | list[int]],
    stop: list[str],
    limit: int,
    path: str,
    by_transfer: bool,
    logprobs: bool,
    ignore_eos: bool,
) -> None:
    tokenizer = tokenizers[vocabulary]
    lists = [p if isinstance(p, list) else tokenizer.encode(p, add_special_tokens=False) for p in pieces]
    answer_ids = [*(token_id for ids in lists for token_id in ids), END]
    if ignore_eos:
        limit = min(limit, len(answer_ids))
    wanted = (True if path == PATHS[1] else 0) if logprobs else None
    wish = body(path, stop=stop, max_tokens=limit, ignore_eos=ignore_eos, logprobs=wanted)
    asyncio.run(check_every_cut(answer_ids, tokenizer, path, wish, by_transfer=by_transfer))


async def check_every_cut(
    answer_ids: list[int], tokenizer: Any, path: str, wish: dict[str, Any], *, by_transfer: bool
) -> None:
    async with client_of(scripted(answer_ids), tokenizer) as client:
        plain = (await client.post(f"/v1/{path}", json=wish)).json()["choices"][0]
        chunks = await stream(client, path, wish)
        whole = told(chunks)
        assert whole.text == (plain["message"]["content"] if "message" in plain else plain["text"])
        assert whole.finish_reason == plain["finish_reason"]
        assert whole.token_ids == answer_ids[: len(whole.token_ids)]
        assert whole.usage is not None
        assert len(whole.token_ids) == whole.usage["completion_tokens"]
        for num_chunks in range(len(chunks)):
            before = told(chunks[:num_chunks])
            shown = before.token_ids
            if by_transfer and before.finish_reason == "length":
                continue  # a prefiller does not know how long the answer may be
            if by_transfer:
                rest = await stream_by_transfer(client, path, wish, shown)
            else:
                rest = await stream(client, path, wish | {"kv_transfer_params": resumed(shown)})
            check_joined(before, told(rest), whole)
            assert pieces_of(rest) == pieces_of(chunks[num_chunks:])


def pieces_of(chunks: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """The chunks that bring something: the cut moves nothing from one to another."""
    parts = [told([chunk]) for chunk in chunks if chunk["choices"]]
    return [(p.text, p.token_ids, p.finish_reason, p.offsets, [n for n, _ in p.scores]) for p in parts if p.token_ids]


def check_joined(before: Told, after: Told, whole: Told) -> None:
    assert before.text + after.text == whole.text
    assert before.token_ids + after.token_ids == whole.token_ids
    assert after.finish_reason == whole.finish_reason
    assert after.usage == whole.usage
    assert after.num_roles <= (not before.token_ids), "a second role"
    assert before.offsets + after.offsets == whole.offsets
    assert [name for name, _ in before.scores + after.scores] == [name for name, _ in whole.scores]
    assert {score for _, score in after.scores} <= {-0.25, None}


# ── named cases ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streams", [False, True])
async def test_only_what_is_new_is_told_and_all_is_counted(
    client: httpx.AsyncClient, answer_ids: list[int], path: str, streams: bool
) -> None:
    wish = body(path, kv_transfer_params=resumed(answer_ids[:4]), return_token_ids=True)
    reply = (await client.post(f"/v1/{path}", json=wish)).json()
    result = told(await stream(client, path, wish) if streams else [reply])
    assert (result.text, result.token_ids, result.finish_reason) == (TEXT[4:], answer_ids[4:], "stop")
    assert result.num_roles == 0
    assert result.usage is not None
    assert (result.usage["prompt_tokens"], result.usage["completion_tokens"]) == (3, len(answer_ids))


async def test_half_a_character_comes_out_with_its_other_half(client: httpx.AsyncClient, answer_ids: list[int]) -> None:
    half = TEXT.index("ö") + 1
    chunks = await stream(client, "completions", body(kv_transfer_params=resumed(answer_ids[:half])))
    assert (chunks[0]["choices"][0]["text"], chunks[0]["choices"][0]["token_ids"]) == ("ö", [answer_ids[half]])


async def test_a_stop_string_that_began_before_the_cut_is_found(
    client: httpx.AsyncClient, answer_ids: list[int]
) -> None:
    wish = body(stop=["Hello "], kv_transfer_params=resumed(answer_ids[:2]))
    result = told(await stream(client, "completions", wish))
    assert (result.text, result.finish_reason) == ("", "stop")


async def test_what_only_looked_like_a_stop_string_comes_out(client: httpx.AsyncClient, answer_ids: list[int]) -> None:
    wish = body(stop=["Hexe"], kv_transfer_params=resumed(answer_ids[:2]), logprobs=0)
    result = told(await stream(client, "completions", wish))
    assert result.text == TEXT
    assert result.scores[:3] == [("H", None), ("e", None), ("l", -0.25)], "what waited was scored elsewhere"
    assert result.offsets[:3] == [0, 1, 2]


async def test_ids_wait_for_text_and_the_end_comes_with_the_last_of_it(
    client: httpx.AsyncClient, core: ScriptedCore, tokenizer: Any
) -> None:
    euro = tokenizer.encode("€", add_special_tokens=False)
    core.script = lambda job: [SampledToken(token_id) for token_id in [USER, *euro, *euro, END]]
    chunks = await stream(client, "chat/completions", body("chat/completions", max_tokens=7))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [choice["token_ids"] for choice in choices] == [[], [USER, *euro], euro]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "length"]


async def test_several_choices_report_their_own_ids(
    client: httpx.AsyncClient, core: ScriptedCore, tokenizer: Any
) -> None:
    euro = tokenizer.encode("€", add_special_tokens=False)
    core.script = lambda job: [SampledToken(i) for i in ([*euro, END] if job.sampling.seed == 7 else [50, 51, END])]
    wish = body(n=2, seed=7, kv_transfer_params=None)
    chunks = await stream(client, "completions", wish)
    ids = [
        [i for c in chunks for choice in c["choices"] if choice["index"] == k for i in choice["token_ids"]]
        for k in (0, 1)
    ]
    assert ids == [[*euro, END], [50, 51, END]]


@pytest.mark.parametrize("path", PATHS)
async def test_nobody_is_told_ids_who_did_not_ask(client: httpx.AsyncClient, path: str) -> None:
    whole = await client.post(f"/v1/{path}", json=body(path))
    streamed = await client.post(f"/v1/{path}", json=body(path, stream=True))
    assert "token_ids" not in whole.text + streamed.text


@pytest.mark.parametrize(
    ("fields", "num_shown", "finish_reason"),
    [({}, 24, "stop"), ({"stop": ["Hello"]}, 5, "stop"), ({"max_tokens": 3}, 3, "length")],
)
@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_all_of_which_was_shown_only_says_that_it_is_finished(
    client: httpx.AsyncClient,
    core: ScriptedCore,
    answer_ids: list[int],
    fields: dict[str, Any],
    num_shown: int,
    finish_reason: str,
    streams: bool,
) -> None:
    core.fail_at = {0: AssertionError("asked for another token")}
    wish = body(kv_transfer_params=resumed(answer_ids[:num_shown]), return_token_ids=True, **fields)
    reply = (await client.post("/v1/completions", json=wish)).json()
    result = told(await stream(client, "completions", wish) if streams else [reply])
    assert (result.text, result.token_ids, result.finish_reason) == ("", [], finish_reason)
    assert result.usage is not None
    assert result.usage["completion_tokens"] == num_shown


# ── the legs ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_prefill_leg_of_a_resumed_answer(
    client: httpx.AsyncClient, core: ScriptedCore, answer_ids: list[int]
) -> None:
    leg = body(max_tokens=1, min_tokens=9, kv_transfer_params=push(answer_ids[:4]))
    reply = (await client.post("/v1/completions", json=leg)).json()
    first = {"first_token_id": answer_ids[4], "first_token_logprobs": {"logprob": -0.25, "top_logprobs": []}}
    handoff = {"attempt": "a-1", "num_pages": 3} | first | resumed(answer_ids[:4])
    assert reply["kv_transfer_params"] == handoff
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (3, 5)
    (job,) = core.jobs
    assert (job.num_question_tokens, job.answer_token_ids) == (3, answer_ids[:4])
    assert (job.max_tokens, job.min_tokens) == (5, 9)


async def test_prefill_leg_whose_token_ends_the_resumed_answer(
    client: httpx.AsyncClient, core: ScriptedCore, answer_ids: list[int]
) -> None:
    leg = body(max_tokens=1, stop=["world", "ello w"], kv_transfer_params=push(answer_ids[:6]), return_token_ids=True)
    reply = (await client.post("/v1/completions", json=leg)).json()
    result = told([reply])
    assert (result.text, result.token_ids, result.finish_reason) == ("", answer_ids[6:7], "stop")
    assert "kv_transfer_params" not in reply
    assert (core.kept, core.dropped) == ([], ["a-1"])


async def test_prefill_leg_does_not_take_half_a_character_for_a_stop_string(
    client: httpx.AsyncClient, core: ScriptedCore, answer_ids: list[int]
) -> None:
    num_shown = TEXT.index("ö")
    wish = body(max_tokens=1, stop="\N{REPLACEMENT CHARACTER}", kv_transfer_params=push(answer_ids[:num_shown]))
    reply = (await client.post("/v1/completions", json=wish)).json()
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["kv_transfer_params"]["first_token_id"] == answer_ids[num_shown]


async def test_prefill_leg_of_a_finished_answer_computes_nothing(
    client: httpx.AsyncClient, core: ScriptedCore, answer_ids: list[int]
) -> None:
    reply = (await client.post("/v1/completions", json=body(kv_transfer_params=push(answer_ids)))).json()
    assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == ("", "stop")
    assert reply["usage"]["completion_tokens"] == len(answer_ids)
    assert "kv_transfer_params" not in reply
    assert core.jobs == []


@pytest.mark.parametrize(
    ("params", "fields"),
    [
        (resumed([5]) | {"num_answer_tokens": 4}, {}),
        (resumed([5]) | {"num_answer_tokens": -1}, {}),
        (resumed([5]) | {"num_answer_tokens": None}, {}),
        (resumed([5]) | {"surprise": 1}, {}),
        (resumed([5]) | {"first_token_id": 5}, {}),
        (resumed([512]), {}),
        (resumed([]) | {"prompt_token_ids": []}, {}),
        (push([5]) | {"num_answer_tokens": 4}, {}),
        (push([5]) | {"prompt_token_ids": None}, {}),
        ({"num_answer_tokens": 1}, {}),
        (resumed([END, 5]), {}),
        (resumed([5, 6, 7]), {"max_tokens": 2}),
    ],
)
async def test_what_cannot_be_resumed(
    client: httpx.AsyncClient, core: ScriptedCore, params: dict[str, Any], fields: dict[str, Any]
) -> None:
    response = await client.post("/v1/completions", json=body(kv_transfer_params=params, **fields))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "kv_transfer_params")
    assert core.jobs == []


async def test_a_resumed_answer_is_one_choice(client: httpx.AsyncClient, core: ScriptedCore) -> None:
    response = await client.post("/v1/completions", json=body(n=2, kv_transfer_params=resumed([5])))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")


async def test_the_context_is_shared_by_the_same_prompt_and_answer_as_before(
    client: httpx.AsyncClient, core: ScriptedCore, answer_ids: list[int]
) -> None:
    room = core.model.max_model_len - len(QUESTION)
    for max_tokens in (room, room + 1):
        wish = body(max_tokens=max_tokens, kv_transfer_params=resumed(answer_ids[:4]))
        response = await client.post("/v1/completions", json=wish)
        assert response.status_code == (200 if max_tokens == room else 400)
    wish = body("chat/completions", max_tokens=None, kv_transfer_params=resumed(answer_ids[:4]))
    await client.post("/v1/chat/completions", json=wish)
    assert [job.max_tokens for job in core.jobs] == [room, room]


# ── below the face ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_resumed_sequence_counts_the_tokens_sampled_elsewhere() -> None:
    job = GenerationJob(
        request_id="r",
        prompt_token_ids=[*QUESTION, 50, 51, 50],
        num_answer_tokens=3,
        sampling=SamplingParams(),
        max_tokens=5,
        min_tokens=4,
        eos_token_ids=frozenset({END}),
    )
    groups = (PageGroup("full", 1),)
    sequence = Sequence(job, cache_need(groups, 8, 8), page_table(groups, 6, 8), on_token=print, on_error=print)
    assert (sequence.output, dict(sequence.counts)) == ([50, 51, 50], {50: 2, 51: 1})
    assert sequence.num_prompt_tokens == 6
    assert (sequence.forbidden, sequence.is_finished) == ({END}, False)
    assert repr(sequence) == "<Sequence r waiting 0/6+0>"
    sequence.append(52)
    assert (sequence.forbidden, sequence.is_finished) == (frozenset(), False)
    sequence.append(53)
    assert sequence.is_finished


def test_an_answer_finished_before_its_last_token_cannot_be_resumed(tokenizer: Any) -> None:
    answer = Answer(tokenizer, max_tokens=2)
    with pytest.raises(ValueError, match="length"):
        answer.resume([50, 51, 52])
