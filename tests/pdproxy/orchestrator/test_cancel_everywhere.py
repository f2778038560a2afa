"""A request is interrupted at its 1st, 2nd, 3rd … suspension, until it gets through; nothing may ever be left behind.

For every way through the proxy, of every kind of engine whose legs go one after the other, and for every way of
interrupting.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio
from tokenizers import Tokenizer, models, pre_tokenizers

from pdproxy.admission import orphans
from pdproxy.admission.grant import Forecast
from pdproxy.admission.line import Demand
from pdproxy.admission.room import Room
from pdproxy.engines import lmcache
from pdproxy.engines.http.base import EngineUnreachable
from pdproxy.kv_events.index import KvIndex, PromptBlocks
from pdproxy.kv_events.subscriber import Subscriber
from tests.fakes import proxy_harness
from tests.fakes.fake_engine import BROKEN, error_reply
from tests.fakes.fake_lmcache import CONFIG, FakeLMCache
from tests.fakes.fake_vllm import FakeNixl
from tests.fakes.interruption import (
    CHAT,
    INTERRUPTIONS,
    MAX_POINTS,
    Fleet,
    Fragile,
    Interruption,
    Road,
    full_buffer,
    interrupt_everywhere,
)
from tests.fakes.proxy_harness import Harness, Way

pytestmark = pytest.mark.cancellation

LONG = {"prompt": "a-long-word " * 200, "stream": True}
WAYS_THROUGH = [
    Road(name="disaggregated", num_points=20),
    Road(name="disaggregated, streamed", num_points=27, body={"stream": True}),
    Road(
        name="chat, streamed",
        num_points=27,
        endpoint=CHAT,
        body={"messages": [{"role": "user", "content": "tell me"}], "stream": True},
    ),
    Road(name="prompt counted in a thread", num_points=27, body=LONG, has_tokenizer=True),
    Road(name="KV signals after the reply", num_points=27, is_late=True, body={"stream": True}),
    Road(name="queued", num_points=20, body={"prompt": [1] * 64}, num_pages=4, arrange=full_buffer),
    Road(
        name="queued, streamed",
        num_points=27,
        body={"prompt": [1] * 64, "stream": True},
        num_pages=4,
        arrange=full_buffer,
    ),
    Road(name="local", num_points=25, path="local", num_choices=2, body={"n": 2}),
    Road(name="local, streamed", num_points=25, path="local", num_choices=2, body={"n": 2, "stream": True}),
    Road(name="one token", num_points=4, path="prefill_only", body={"max_tokens": 1}),
    Road(name="one token, streamed", num_points=8, path="prefill_only", body={"max_tokens": 1, "stream": True}),
    Road(name="ends at its first token", num_points=4, path="prefill_only", finish_at_first="stop"),
    Road(name="failover: prefiller unreachable", num_points=10, attempts=2, faults={"prefill": EngineUnreachable("")}),
    Road(name="failover: prefill broke", num_points=16, attempts=2, faults={"prefill_done": BROKEN}),
    Road(
        name="failover: prefiller busy", num_points=16, attempts=2, faults={"prefill reply": error_reply(503, "busy")}
    ),
    Road(name="failover: KV failed", num_points=12, attempts=2, faults={"signals": "failed"}),
    Road(name="failover: decoder unreachable", num_points=18, attempts=2, faults={"decode": EngineUnreachable("")}),
    Road(
        name="failover: decode broke before its first byte",
        num_points=33,
        attempts=2,
        faults={"first": BROKEN},
        body={"stream": True},
    ),
    Road(
        name="goes on elsewhere after its first byte",
        num_points=35,
        attempts=2,
        faults={"middle": BROKEN},
        body={"stream": True},
    ),
    Road(
        name="chat goes on elsewhere after its first byte",
        num_points=36,
        attempts=2,
        faults={"middle": BROKEN},
        endpoint=CHAT,
        body={"messages": [{"role": "user", "content": "tell me"}], "stream": True},
    ),
    Road(name="whole, goes on elsewhere", num_points=30, attempts=2, faults={"middle": BROKEN}),
    Road(
        name="whole, begun anew elsewhere",
        num_points=30,
        attempts=2,
        faults={"middle": BROKEN},
        options={"continue_streams": False},
    ),
    Road(
        name="asked for as a whole",
        num_points=9,
        endpoint=CHAT,
        body={"messages": [{"role": "user", "content": "tell me"}], "tools": [{"type": "function"}]},
    ),
    Road(
        name="ends by an error after its first byte",
        num_points=21,
        faults={"middle": BROKEN},
        body={"stream": True},
        options={"continue_streams": False},
        ends_by_error=True,
    ),
    Road(
        name="refused by the engine",
        num_points=5,
        status=422,
        faults={"prefill reply": error_reply(422, "temperature must be below 2")},
    ),
    Road(name="refused by the proxy", num_points=1, status=400, path=None, attempts=0, body={"prompt": [1] * 5000}),
]


# ── engines whose KV is pulled ──────────────────────────────────────────────────────────────────────────────────────


class FragileNixl(Fragile, FakeNixl):
    pass


class FragileLMCache(Fragile, FakeLMCache):
    pass


def nixl_fleet(road: Road) -> Fleet:
    """Two of each role, or a single prefiller that is full."""
    num_prefillers = 1 if road.arrange is full_buffer else 2
    prefillers = [FragileNixl("prefill", num_pages=road.num_pages, lease_s=0.01) for _ in range(num_prefillers)]
    return prefillers, [FragileNixl("decode") for _ in range(2)]


def lmcache_fleet(road: Road) -> Fleet:
    skip_last = 0 if road.options.get("first_token") == "decoder" else 1
    decoders = [FragileLMCache("decode", num_ranks=2, skip_last=skip_last) for _ in range(2)]
    return [FragileLMCache("prefill") for _ in range(2)], decoders


PulledRoad = partial(Road, fleet=nixl_fleet)
WAYS_OF_PULLING = [
    PulledRoad(name="pulled", num_points=9),
    PulledRoad(name="pulled, streamed", num_points=27, body={"stream": True}),
    PulledRoad(
        name="pulled, chat, streamed",
        num_points=28,
        endpoint=CHAT,
        body={"messages": [{"role": "user", "content": "tell me"}], "stream": True},
    ),
    PulledRoad(name="pulled, queued", num_points=10, body={"prompt": [1] * 64}, num_pages=4, arrange=full_buffer),
    PulledRoad(name="pulled, ends at its first token", num_points=6, path="prefill_only", finish_at_first="stop"),
    PulledRoad(
        name="pulled, an errand that fails once",
        num_points=6,
        path="prefill_only",
        finish_at_first="stop",
        faults={"refuse": BROKEN},
    ),
    PulledRoad(name="pulled, failover: prefill broke", num_points=12, attempts=2, faults={"prefill_done": BROKEN}),
    PulledRoad(
        name="pulled, failover: decoder unreachable",
        num_points=20,
        attempts=2,
        faults={"decode": EngineUnreachable("")},
    ),
    PulledRoad(
        name="pulled, failover: no KV",
        num_points=38,
        attempts=2,
        faults={"decode reply": error_reply(500, "KV load failure")},
        body={"stream": True},
    ),
    PulledRoad(
        name="pulled, ends by an error",
        num_points=23,
        faults={"middle": BROKEN},
        body={"stream": True},
        ends_by_error=True,
    ),
]

PushedRoad = partial(Road, fleet=lmcache_fleet, has_tokenizer=True)
PREFILLERS_TOKEN = {"first_token": "prefiller"}
WAYS_OF_PUSHING = [
    PushedRoad(name="pushed, decoder's token", num_points=9),
    PushedRoad(name="pushed, decoder's token, streamed", num_points=27, body={"stream": True}),
    PushedRoad(name="pushed, prefiller's token", num_points=9, options=PREFILLERS_TOKEN),
    PushedRoad(
        name="pushed, prefiller's token, streamed", num_points=27, options=PREFILLERS_TOKEN, body={"stream": True}
    ),
    PushedRoad(
        name="pushed, ends at its first token",
        num_points=5,
        path="prefill_only",
        finish_at_first="stop",
        options=PREFILLERS_TOKEN,
    ),
    PushedRoad(name="pushed, failover: prefill broke", num_points=11, attempts=2, faults={"prefill_done": BROKEN}),
    PushedRoad(
        name="pushed, failover: decode broke before its first byte",
        num_points=35,
        attempts=2,
        faults={"first": BROKEN},
        options=PREFILLERS_TOKEN,
        body={"stream": True},
    ),
]

# ── a decoder that needs no prefiller, though one was granted, or was to be had ────────────────────────────────────


class Behind:
    """Every prefiller is behind. Implements `grant.Forecaster`."""

    def foresee(self, demand: Demand, owner: Any, peer: Any, now: float) -> Forecast:
        return Forecast(0.01, True)

    def relieve(
        self, demand: Demand, num_behind: int, readers: Sequence[Any], writers: Sequence[Any], now: float
    ) -> None:
        return None


class Idle(Behind):
    """Every prefiller would write an answer sooner than a decoder has room for it. Implements `grant.Forecaster`."""

    def relieve(
        self, demand: Demand, num_behind: int, readers: Sequence[Any], writers: Sequence[Any], now: float
    ) -> tuple[Any, Forecast]:
        return readers[0], Forecast(0.01, True)


@asynccontextmanager
async def all_behind(house: Harness) -> AsyncIterator[None]:
    (house.leader or house.proxy).pool.admission.kernel._forecaster = Behind()
    yield


@asynccontextmanager
async def all_full(house: Harness) -> AsyncIterator[None]:
    """No decoder has room for another answer."""
    pool = (house.leader or house.proxy).pool
    pool.admission.kernel._forecaster = Idle()
    decoders = pool.of_role("decode")
    for one in decoders:
        pool.admission.reside(one, "other", Room(int(one.residency.limit)))
    yield
    for one in decoders:
        pool.admission.vacate(one, "other")


class Everything(KvIndex):
    """It has each prompt."""

    @property
    def is_exact(self) -> bool:
        return True

    def has_all(self, prompt: PromptBlocks, adapter: str = "") -> bool:
        return True


@asynccontextmanager
async def all_cached(house: Harness) -> AsyncIterator[None]:
    """Each decoder has each prompt."""
    house.proxy.pool.knows_caches = True
    with zmq.asyncio.Context() as context:
        for instance in house.proxy.pool.instances:
            instance.kv_events = Subscriber(Everything(), context, "tcp://127.0.0.1:1", None, name=instance.name)
        yield


AloneRoad = partial(Road, path="local", body={"prompt": [1] * 8, "stream": True})
DECODE_FAILS: dict[str, Any] = {"attempts": 2, "faults": {"first": BROKEN}}
WAYS_ALONE = [
    AloneRoad(name="behind", num_points=20, arrange=all_behind),
    AloneRoad(name="behind, pulled", num_points=20, arrange=all_behind, fleet=nixl_fleet),
    AloneRoad(name="behind, asked for as a whole", num_points=5, arrange=all_behind, body={"prompt": [1] * 8}),
    AloneRoad(name="behind, failover", num_points=20, arrange=all_behind, **DECODE_FAILS),
    AloneRoad(name="decoders full", num_points=20, arrange=all_full, fleet=nixl_fleet),
    AloneRoad(name="decoders full, whole", num_points=5, arrange=all_full, fleet=nixl_fleet, body={"prompt": [1] * 8}),
    AloneRoad(name="cached", num_points=20, arrange=all_cached),
    AloneRoad(name="cached, pulled", num_points=20, arrange=all_cached, fleet=nixl_fleet),
    AloneRoad(name="cached, pulled, failover", num_points=20, arrange=all_cached, fleet=nixl_fleet, **DECODE_FAILS),
    AloneRoad(
        name="cached, goes on elsewhere after its first byte",
        num_points=20,
        arrange=all_cached,
        attempts=2,
        faults={"middle": BROKEN},
    ),
]

# ── several prompts, each of which goes a way of its own ────────────────────────────────────────────────────────────

SeveralRoad = partial(Road, path=None)
"""The answer tells of no single attempt."""
WAYS_OF_SEVERAL = [
    SeveralRoad(name="several prompts", num_points=20, num_choices=2, body={"prompt": ["a", "b"]}),
    SeveralRoad(
        name="several prompts, queued, streamed",
        num_points=50,
        num_choices=2,
        body={"prompt": [[1] * 64] * 2, "stream": True},
        num_pages=4,
        arrange=full_buffer,
    ),
    SeveralRoad(
        name="several prompts, one refused",
        num_points=10,
        status=422,
        faults={"prefill reply": error_reply(422, "temperature must be below 2")},
        body={"prompt": ["a", "b"]},
    ),
]
TRIED: list[tuple[Way, Road]] = [
    *(("awaited", road) for road in WAYS_THROUGH),
    *(("relay", road) for road in (*WAYS_THROUGH, *WAYS_OF_PULLING, *WAYS_OF_PUSHING, *WAYS_ALONE, *WAYS_OF_SEVERAL)),
]
"""Where the KV comes from and where the answer goes are nothing to each other, so not all of it is tried twice."""


# ── the proof ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errands are done again soon, and what is in memory was written and read at once."""
    monkeypatch.setattr(orphans, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(lmcache, "WRITING_S", 0.001)
    monkeypatch.setattr(lmcache, "READING_S", 0.001)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tokenizer, one token per word, and no weights."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    words = Tokenizer(models.WordLevel({"?": 0, "a": 1, "b": 2, "c": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def points(request: pytest.FixtureRequest) -> Iterator[dict[str, dict[str, int]]]:
    """Cancellation points by road and interruption; printed when all roads have been gone."""
    counts: dict[str, dict[str, int]] = {}
    yield counts
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        num_all = sum(sum(by_way.values()) for by_way in counts.values())
        print(f"\n{num_all} cancellation points ({', '.join(one.name for one in INTERRUPTIONS)}):")
        for road, by_way in counts.items():
            print(f"  {road:<55} {' + '.join(str(num) for num in by_way.values())}")


@pytest.mark.parametrize("interruption", INTERRUPTIONS, ids=lambda interruption: interruption.name)
@pytest.mark.parametrize(("way", "road"), [pytest.param(*one, id=f"{one[0]}, {one[1].name}") for one in TRIED])
async def test_interrupted_anywhere_nothing_is_left(
    way: Way, road: Road, interruption: Interruption, tokenizer: Path, points: dict[str, dict[str, int]]
) -> None:
    calls = await interrupt_everywhere(road, interruption, tokenizer, way)
    assert not calls[-1].suspensions.is_reached, f"still not through after {MAX_POINTS} suspensions"
    num_struck = sum(call.is_struck for call in calls)
    points.setdefault(f"{way}, {road.name}", {})[interruption.name] = num_struck
    assert num_struck >= road.num_points


@pytest.mark.parametrize("interruption", INTERRUPTIONS, ids=lambda interruption: interruption.name)
@pytest.mark.parametrize(
    "name",
    [
        "disaggregated, streamed",
        "queued",
        "failover: prefill broke",
        "behind",
        "behind, asked for as a whole",
        "cached",
        "cached, pulled",
    ],
)
async def test_interrupted_anywhere_by_way_of_a_front_nothing_is_left_at_the_leader(
    name: str, interruption: Interruption, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_harness, "IS_BY_FRONT", True)
    road = next(road for road in (*WAYS_THROUGH, *WAYS_ALONE) if road.name == name)
    calls = await interrupt_everywhere(road, interruption, tokenizer, "relay")
    assert not calls[-1].suspensions.is_reached, f"still not through after {MAX_POINTS} suspensions"
    assert sum(call.is_struck for call in calls) >= road.num_points
