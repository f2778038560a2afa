"""Prompts read here, and prompts whose KV came layer by layer from elsewhere: the tokens of `model.generate` follow.

A prefiller's and a decoder's worker in one process; between them the pages are copied span by span, as a transfer does.
What was not written is NaN, so that one element read too many shows.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from transfer.engine import worker as worker_module
from transfer.engine.api import GenerationJob
from transfer.engine.cache_need import cache_need
from transfer.engine.model import ModelRunner
from transfer.engine.paged_cache import PagedStore
from transfer.engine.sampling import SampledToken, SamplingParams
from transfer.engine.scheduler import Scheduler
from transfer.engine.sequence import Sequence
from transfer.engine.worker import EngineWorker
from transfer.plan.blocks import page_table
from transfer.plan.spans import SpanMap
from transfer.wire import Handoff

CHUNK, WINDOW, NUM_PAGES, NUM_ANSWER = 8, 12, 48, 6
WINDOWED = ("gemma3", "mistral", "gpt_oss", "llama4")
FAMILIES = (*WINDOWED, "llama", "deepseek", "qwen3")
LENGTHS = sorted({1, 2, *(edge + d for edge in (CHUNK, WINDOW, 2 * CHUNK, 3 * CHUNK, 3 * WINDOW) for d in (-1, 0, 1))})
NAN = 0xFF


@dataclass
class Engine:
    """One engine without HTTP and NIXL, and the slab in which it receives."""

    folder: Path
    dtype: str
    layers_per_write: int | None = None
    received: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.runner = ModelRunner(
            self.folder, device="cpu", dtype=self.dtype, chunk_size=CHUNK, layers_per_write=self.layers_per_write
        )
        self.layout = self.runner.layout
        self.store = PagedStore(self.layout, NUM_PAGES, self.runner.device)
        self.received = torch.empty_like(self.store.buffer.pages)
        self.worker = EngineWorker(self.runner, self.store, Scheduler(NUM_PAGES, CHUNK), self.received)
        self.worker.start()

    def poison(self) -> None:
        self.store.buffer.pages.fill_(NAN)
        self.received.fill_(NAN)

    def start(self, job: GenerationJob, **more: Any) -> tuple[Sequence, queue.Queue[SampledToken | Exception]]:
        groups, num_prompt = self.layout.kv.groups, len(job.prompt_token_ids)
        need = cache_need(groups, CHUNK, num_prompt + job.max_tokens, num_prompt if job.handoff else 0)
        told: queue.Queue[SampledToken | Exception] = queue.Queue()
        sequence = Sequence(job, need, page_table(groups, num_prompt, CHUNK), told.put, told.put, **more)
        self.worker.add(sequence)
        return sequence, told

    def finish(self, sequence: Sequence) -> None:
        self.worker.drop(sequence).result(30)
        self.worker.call(self.worker.scheduler.check_integrity).result(30)
        assert self.worker.scheduler.pool.num_held == 0

    def answer(self, prompt: list[int], first: int | None = None) -> list[int]:
        """Of a prompt read here, or, with `first`, of one whose KV is in the first pages of `received`."""
        if first is None:
            sequence, told = self.start(new_job(prompt))
            tokens = []
        else:
            num_pages = len(page_table(self.layout.kv.groups, len(prompt), CHUNK))
            handoff = Handoff(attempt="a", prompt_token_ids=prompt, first_token_id=first, num_pages=num_pages)
            sequence, told = self.start(new_job(prompt, handoff=handoff), received_pages=list(range(num_pages)))
            tokens = [first]
        tokens += [next_token(told) for _ in range(NUM_ANSWER - len(tokens))]
        self.finish(sequence)
        return tokens

    def read(self, prompt: list[int], on_layers: Callable[[int, int, int, int], None]) -> int:
        """Read the prompt as a prefiller; its pages are still held when the first token is returned."""
        sequence, told = self.start(new_job(prompt, 1), stops_after_first=True, on_layers=on_layers)
        first = next_token(told)
        self.finish(sequence)
        return first


def new_job(prompt: list[int], num_answer: int = NUM_ANSWER, handoff: Handoff | None = None) -> GenerationJob:
    return GenerationJob(
        request_id="r",
        prompt_token_ids=prompt,
        sampling=SamplingParams(temperature=0),
        max_tokens=num_answer,
        handoff=handoff,
    )


def next_token(told: queue.Queue[SampledToken | Exception]) -> int:
    item = told.get(timeout=30)
    assert isinstance(item, SampledToken), item
    return item.token_id


def prompt_of(length: int) -> list[int]:
    return torch.randint(6, 500, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def copier(source: Engine, target: Engine, moved: list[int]) -> Callable[[int, int, int, int], None]:
    """Copies what is filled to page `ordinal` of the other side's slab, and notes how many bytes that were."""
    spans = SpanMap(source.layout, target.layout)
    ours, theirs = (slab.view(-1) for slab in (source.store.buffer.pages, target.received))

    def copy(ordinal: int, page: int, first_layer: int, end_layer: int) -> None:
        table = copy.table  # type: ignore[attr-defined]
        for at, to, size in spans.spans(table.pages[ordinal].group, [page], [ordinal], first_layer, end_layer).tolist():
            theirs[to : to + size] = ours[at : at + size]
            moved.append(size)

    return copy


@pytest.fixture(scope="module")
def new_engine(tiny_model: Callable[..., Path]) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(family: str, dtype: str = "float64", layers_per_write: int | None = None) -> Engine:
        folder = tiny_model(family, window=WINDOW if family in WINDOWED else None)
        engines.append(Engine(folder, dtype, layers_per_write))
        return engines[-1]

    yield make
    for engine in engines:
        engine.worker.close()
        assert engine.worker.failure is None


@pytest.mark.parametrize(
    ("family", "dtype", "layers_per_write"),
    [(family, "float64", 1 + index % 2) for index, family in enumerate(FAMILIES)]
    + [(family, "float32", None) for family in WINDOWED],
)
def test_tokens_equal_generate_and_only_what_is_read_travels(
    new_engine: Callable[..., Engine], family: str, dtype: str, layers_per_write: int | None
) -> None:
    prefiller, decoder = new_engine(family, dtype, layers_per_write), new_engine(family, dtype)
    model = AutoModelForCausalLM.from_pretrained(prefiller.folder, dtype=getattr(torch, dtype)).eval()
    for length in LENGTHS:
        prompt = prompt_of(length)
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            expected = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_ANSWER, do_sample=False
            )[0, length:].tolist()
        for engine in (prefiller, decoder):
            engine.poison()
        moved: list[int] = []
        copy = copier(prefiller, decoder, moved)
        copy.table = table = page_table(prefiller.layout.kv.groups, length, CHUNK)  # type: ignore[attr-defined]
        first = prefiller.read(prompt, copy)

        assert sum(moved) == sum(prefiller.layout.groups[at.group].num_bytes for at in table.pages)
        assert decoder.answer(prompt, first) == expected, length
        assert prefiller.answer(prompt) == expected, length


def test_layers_are_told_of_as_soon_as_they_are_computed(new_engine: Callable[..., Engine]) -> None:
    """While a layer is told of, its KV of the chunk is final and that of the layers after it is not there yet."""
    engine = new_engine("gemma3", "float32", 1)
    engine.poison()
    prompt = prompt_of(2 * CHUNK + 3)
    table = page_table(engine.layout.kv.groups, len(prompt), CHUNK)
    seen: list[tuple[int, int, int]] = []
    bytes_then: list[tuple[int, int, np.ndarray[Any, Any]]] = []

    def look(ordinal: int, page: int, first_layer: int, end_layer: int) -> None:
        at = table.pages[ordinal]
        layers = engine.layout.groups[at.group].layers
        seen.append((at.block, layers[first_layer], end_layer - first_layer))
        for position, layer in enumerate(layers):
            views = engine.store.views[layer]
            assert views is not None
            valid = slice(0, min(CHUNK, len(prompt) - at.block * CHUNK))
            keys, values = views.keys[page, :, valid], views.values[page, :, valid]
            if position < end_layer:
                assert not keys.isnan().any()
                assert not values.isnan().any()
                bytes_then.append((layer, page, keys.numpy().copy()))
            else:
                assert keys.isnan().all(), f"layer {layer} was there before {layers[first_layer]} was told of"

    engine.read(prompt, look)
    # Of 19 tokens a window of 12 keeps tokens 8 to 18: blocks 1 and 2 of the sliding layers, everything of the full.
    assert seen == [(0, 2, 1), (0, 5, 1), *((block, layer, 1) for block in (1, 2) for layer in range(6))]
    for layer, page, keys in bytes_then:
        views = engine.store.views[layer]
        assert views is not None
        assert np.array_equal(views.keys[page, :, : keys.shape[1]].numpy(), keys), "what was told of did not change"


def test_the_device_is_waited_for_before_each_call_and_only_then(
    new_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine("mistral", "float32", 2)
    order: list[str] = []
    monkeypatch.setattr(engine.runner, "synchronize", lambda: order.append("waited"))
    engine.answer(prompt_of(40))
    assert order == [], "nobody listens, nothing waits"
    engine.read(prompt_of(40), lambda *_: order.append("told"))
    assert order == ["waited", "told"] * 2 * 2, "two of five blocks travel, four layers in two writes each"


def test_a_listener_that_fails_ends_its_own_sequence(
    new_engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    engine = new_engine("llama", "float32", 1)

    def fail(*_: int) -> None:
        raise RuntimeError("no listener")

    sequence, told = engine.start(new_job(prompt_of(9)), stops_after_first=True, on_layers=fail)
    error = told.get(timeout=30)
    assert isinstance(error, RuntimeError)
    engine.finish(sequence)
    assert len(engine.answer(prompt_of(9))) == NUM_ANSWER
    assert "failed" in caplog.text


def test_a_worker_that_does_not_end_says_so(
    new_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, goes_on = new_engine("llama", "float32"), threading.Event()
    monkeypatch.setattr(worker_module, "CLOSE_TIMEOUT_S", 0.05)
    engine.worker.call(lambda: goes_on.wait(30))
    engine.worker.close()
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "does not end" in record.message
    goes_on.set()
    monkeypatch.setattr(worker_module, "CLOSE_TIMEOUT_S", 30.0)
    engine.worker.close()
    assert not engine.worker.is_alive
    assert len(caplog.records) == 1, "one that has ended has nothing to say"


def test_what_peers_must_agree_on(new_engine: Callable[..., Engine]) -> None:
    layout = new_engine("gemma3", "float32").runner.identity().on_wire
    assert (layout.dtype, layout.chunk_size, layout.tp_size, layout.tp_rank) == ("float32", CHUNK, 1, 0)
    assert layout.heads == "6×2"
    assert layout.page_bytes == CHUNK * 2 * 2 * (16 + 16) * 4, "two of six layers"
    assert layout.cache != new_engine("mistral", "float32").runner.identity().on_wire.cache
