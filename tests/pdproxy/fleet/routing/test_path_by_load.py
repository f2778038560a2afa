"""Whether a decoder reads a prompt itself, by what waits at both, by their speeds, and by who would be held up; and
whether a prefiller writes an answer for which no decoder has room."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdproxy.admission.grant import Forecast
from pdproxy.admission.line import Demand
from pdproxy.admission.residency import Residency
from pdproxy.admission.room import KvCache, Room
from pdproxy.fleet.pace import FRESH_S, Pace
from pdproxy.fleet.routing import path_by_load
from pdproxy.fleet.routing.path_by_load import PathByLoad

PROMPT = 4000


class Loaded:
    """An instance as the forecast sees it."""

    def __init__(self, *, is_writer: bool, tokens_per_s: float | None = None) -> None:
        self.is_writer = is_writer
        self.queued_tokens = 0
        self.num_legs = 0
        self.residency = Residency()
        self.max_len: int | None = 4096
        self.pace = Pace()
        if tokens_per_s is not None:
            self.pace.queue_changed(PROMPT, 0, -PROMPT / tokens_per_s)
            self.pace.queue_changed(0, PROMPT, 0.0)

    @property
    def facts(self) -> Any:
        return SimpleNamespace(max_model_len=self.max_len)


class Pair:
    """A prefiller that reads 10,000 tokens a second, and a decoder of which nobody knows."""

    def __init__(self, decoder_tokens_per_s: float | None = None) -> None:
        self.prefiller = Loaded(is_writer=False, tokens_per_s=10_000)
        self.decoder = Loaded(is_writer=True, tokens_per_s=decoder_tokens_per_s)
        self.by_load = PathByLoad()

    def foresee(self, num_tokens: int = PROMPT, *, model: str = "m", now: float = 0.0) -> Forecast | None:
        demand = Demand("a", model, lambda shape: 1, age=0.0, num_tokens=num_tokens)
        owner, peer = cast(Any, self.prefiller), cast(Any, self.decoder)
        ours, theirs = self.by_load.foresee(demand, owner, peer, now), PathByLoad().foresee(demand, peer, owner, now)
        assert (ours is None) is (theirs is None), "whose the pages are makes no difference"
        return ours

    def is_alone(self, num_queued: int, **options: Any) -> bool:
        self.prefiller.queued_tokens = num_queued
        forecast = self.foresee(**options)
        assert forecast is not None
        return forecast.is_alone


def test_the_forecast_is_what_waits_and_the_prompt_at_the_measured_speed_and_the_handoff() -> None:
    pair = Pair()
    pair.prefiller.queued_tokens = 1000
    pair.decoder.pace.handed_over(1, 0.03, 0.0)
    assert pair.foresee() == (pytest.approx(0.53), False)


def test_a_decoder_reads_itself_where_the_prefiller_is_far_behind() -> None:
    pair = Pair()
    assert not pair.is_alone(PROMPT - 1)
    assert pair.is_alone(3 * PROMPT)
    forecast = pair.foresee()
    assert forecast == (pytest.approx(0.4), True), "as fast as the prefiller, as long as nobody knows better"
    assert not Pair(decoder_tokens_per_s=2_000).is_alone(3 * PROMPT)
    assert Pair(decoder_tokens_per_s=20_000).is_alone(PROMPT)


def test_what_waits_at_the_decoder_and_who_writes_there_count() -> None:
    pair = Pair()
    pair.decoder.queued_tokens = PROMPT
    assert not pair.is_alone(2 * PROMPT)
    assert pair.is_alone(5 * PROMPT)
    pair = Pair()
    pair.decoder.num_legs = 9
    assert not pair.is_alone(10 * PROMPT), "nine answers would be held up for as long as the prompt takes"
    assert pair.is_alone(30 * PROMPT)


@pytest.mark.parametrize("at_decoder", [0, PROMPT])
def test_nobody_goes_back_and_forth_at_the_threshold(at_decoder: int) -> None:
    pair = Pair()
    pair.decoder.queued_tokens = at_decoder
    enter = next(num for num in range(0, 9 * PROMPT, 100) if pair.is_alone(num))
    assert enter == PROMPT + 2 * at_decoder
    assert all(pair.is_alone(enter - 100 * number % 200) for number in range(20)), "it stays, just below"
    leave = next(num for num in range(enter, -100, -100) if not pair.is_alone(num))
    assert leave < 0.7 * enter
    assert not any(pair.is_alone(leave + 100 * number % 200) for number in range(20)), "and stays away, just above"


def test_a_long_prompt_goes_to_a_prefiller_that_has_only_short_ones() -> None:
    """By short ones it may be taken for slower than it is, and only a longer one shows that."""
    pair = Pair(decoder_tokens_per_s=100_000)
    assert pair.is_alone(1500, num_tokens=100)
    assert not pair.is_alone(1500, num_tokens=PROMPT)


def test_a_short_wait_is_no_reason() -> None:
    pair = Pair()
    assert not pair.is_alone(900, num_tokens=50)  # ten times as long, and less than a tenth of a second
    assert pair.is_alone(1500, num_tokens=50)


def test_an_idle_prefiller_gets_the_prompt_however_slow_it_is() -> None:
    """So it is measured again: a wrong estimate, or that of an instance that stood still, does not keep all away."""
    pair = Pair(decoder_tokens_per_s=1_000_000)
    assert not pair.is_alone(0)
    pair.prefiller.queued_tokens = 3 * PROMPT
    assert pair.foresee(now=FRESH_S + 1.0) is None, "what was measured long ago is no reason for anything"


def test_models_do_not_share_their_way_and_are_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_by_load, "MAX_MODELS", 2)
    pair = Pair()
    pair.decoder.queued_tokens = PROMPT
    assert pair.is_alone(3 * PROMPT, model="one")
    assert not pair.is_alone(2 * PROMPT, model="other")
    assert all(pair.is_alone(3 * PROMPT, model=model) for model in ("two", "three"))
    assert not pair.is_alone(2 * PROMPT, model="one")
    assert pair.is_alone(2 * PROMPT, model="three")


def test_a_prompt_without_tokens_has_no_forecast() -> None:
    assert Pair().foresee(0) is None


# ── answers for which no decoder has room ───────────────────────────────────────────────────────────────────────────

MEMORY = 10_000
"""Tokens of each KV cache here."""


class Full:
    """Two prefillers that read 10,000 tokens a second, and a decoder without room, which gives 1,000 tokens a second
    back."""

    def __init__(self) -> None:
        self.prefillers = [Loaded(is_writer=False, tokens_per_s=10_000) for _ in range(2)]
        self.decoder = Loaded(is_writer=True)
        for one in (*self.prefillers, self.decoder):
            one.residency.heard(KvCache(MEMORY))
        self.decoder.residency.enter("old", Room(MEMORY))
        for num_tokens, now, num_freed in ((MEMORY, -1.0, 0), (MEMORY - 1000, 0.0, 1000), (MEMORY, 0.0, 0)):
            self.decoder.pace.residents_changed(num_tokens, now, num_freed)
        self.by_load = PathByLoad()

    def relieved_by(self, lacks: int = 2000, num_behind: int = 0, *, model: str = "m", now: float = 0.0) -> Any:
        """Which prefiller writes the answer to a prompt, and when it begins, where the decoder lacks so many tokens."""
        demand = Demand("a", model, lambda shape: 1, age=0.0, num_tokens=PROMPT, room=Room(lacks))
        self.decoder.residency.used = MEMORY
        advice = self.by_load.relieve(demand, num_behind, cast(Any, self.prefillers), cast(Any, [self.decoder]), now)
        if advice is None:
            return None
        one, forecast = advice
        assert forecast.is_alone
        return self.prefillers.index(cast(Any, one)), pytest.approx(forecast.wait_s)


def test_a_prefiller_writes_an_answer_where_room_would_come_much_later() -> None:
    full = Full()
    assert full.relieved_by(lacks=700) is None, "0.7 s, and to read the prompt takes 0.4"
    assert full.relieved_by(lacks=900) == (0, 0.4)


def test_those_who_wait_behind_count() -> None:
    assert Full().relieved_by(lacks=300, num_behind=1) is None, "0.6 s until there is room for both"
    assert Full().relieved_by(lacks=300, num_behind=2) == (0, 0.4)


def test_a_handoff_counts_as_a_wait() -> None:
    full = Full()
    full.decoder.pace.handed_over(1, 0.2, 0.0)
    assert full.relieved_by(lacks=700) == (0, 0.4)


def test_only_a_prefiller_with_nothing_to_read_begins_with_it_and_it_goes_on_with_a_little() -> None:
    full = Full()
    full.prefillers[0].queued_tokens = 1
    assert full.relieved_by() == (1, 0.4)
    full.prefillers[1].queued_tokens = PROMPT // 2
    assert full.relieved_by() == (0, 0.4001)
    full.prefillers[0].queued_tokens = full.prefillers[1].queued_tokens = PROMPT + 1
    assert full.relieved_by() is None
    full.prefillers[0].queued_tokens = 1
    assert full.relieved_by() is None, "from now on it begins again"


def test_nobody_goes_back_and_forth_at_the_threshold_of_room() -> None:
    full = Full()
    enter = next(num for num in range(0, 4000, 10) if full.relieved_by(lacks=num))
    leave = next(num for num in range(enter, -10, -10) if not full.relieved_by(lacks=num))
    assert (enter, leave) == (800, 490)


def test_half_of_a_prefillers_memory_stays_free() -> None:
    full = Full()
    for one in full.prefillers:
        one.residency.enter("other", Room(MEMORY // 2 - 1999))
    assert full.relieved_by(lacks=2000) is None
    assert full.relieved_by(lacks=1999) == (0, 0.4)


def test_half_of_it_stays_free_whatever_share_may_be_promised() -> None:
    full = Full()
    for one in full.prefillers:
        one.residency.oversubscribe = 2.0
        one.residency.heard(KvCache(MEMORY))
        one.residency.enter("other", Room(MEMORY // 2 - 1999))
    assert full.relieved_by(lacks=2000) is None
    assert full.relieved_by(lacks=1999) == (0, 0.4)


def test_none_writes_whose_answers_end_sooner_than_a_decoders() -> None:
    full = Full()
    full.decoder.max_len = 8192
    full.prefillers[0].max_len = 4096
    full.prefillers[1].max_len = 8192
    assert full.relieved_by() == (1, 0.4)
    full.decoder.max_len = None
    assert full.relieved_by() is None, "nobody knows whether they end as late"


@pytest.mark.parametrize("unknown", ["what comes back", "how fast prefillers read", "anything of late"])
def test_where_too_little_is_known_everybody_waits(unknown: str) -> None:
    full = Full()
    if unknown == "what comes back":
        full.decoder.pace.forget()
    elif unknown == "how fast prefillers read":
        for one in full.prefillers:
            one.pace.forget()
    assert full.relieved_by(now=FRESH_S + 1.0 if unknown == "anything of late" else 0.0) is None


def test_prefillers_of_one_model_write_and_those_of_another_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_by_load, "MAX_MODELS", 1)
    full = Full()
    assert full.relieved_by(lacks=900, model="one")
    assert full.relieved_by(lacks=700, model="other") is None
    assert full.relieved_by(lacks=700, model="one")
    assert full.relieved_by(lacks=900, model="other")
    assert full.relieved_by(lacks=700, model="one") is None, "it was forgotten"
