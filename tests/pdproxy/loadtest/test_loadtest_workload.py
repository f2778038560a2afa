"""What is asked: all of it from the seed, as much as was ordered, shared and left early as often as was ordered."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from pdproxy.loadtest.arrivals import Pace
from pdproxy.loadtest.errors import WorkloadError
from pdproxy.loadtest.lengths import Fixed, Independent, Uniform
from pdproxy.loadtest.traces import TraceRow
from pdproxy.loadtest.workload import (
    Aborts,
    Ask,
    Closed,
    Conversations,
    Departure,
    Open,
    Prefixes,
    Replay,
    Session,
    Workload,
)

USUAL = Workload(
    seed=1,
    pace=Open(pace=Pace(rate=10)),
    sizes=Independent(Uniform(10, 400), Uniform(5, 60)),
    num_requests=1000,
)


def sessions(**changes: Any) -> list[Session]:
    return list(replace(USUAL, **changes).sessions())


def asks(**changes: Any) -> list[Ask]:
    return [ask for session in sessions(**changes) for ask in session.asks]


def test_the_seed_decides() -> None:
    assert sessions() == sessions()
    assert sessions() != sessions(seed=2)
    assert len({session.asks[0].pieces for session in sessions()}) == 1000


def test_as_many_requests_as_were_ordered() -> None:
    """Turns are requests; the last conversation is shorter for it. Their numbers follow one another."""
    talks = sessions(num_requests=100, conversations=Conversations(turns=Uniform(1, 6)))
    assert sum(len(session.asks) for session in talks) == 100
    indices = [session.first_index + turn for session in talks for turn in range(len(session.asks))]
    assert indices == list(range(100))


def test_arrivals_end_with_the_time() -> None:
    times = list(replace(USUAL, num_requests=None, duration_s=5.0).due_times())
    assert 25 < len(times) < 80
    assert times == sorted(times)
    assert max(times) < 5


def test_another_share_leaves_the_rest_as_it_is() -> None:
    """So that runs with and without aborts, or streams, ask the same."""
    plain = asks()
    other = asks(stream_share=0.3, aborts=Aborts(share=0.5))
    assert [ask.pieces for ask in plain] == [ask.pieces for ask in other]
    assert [ask.answer_tokens for ask in plain] == [ask.answer_tokens for ask in other]


def test_the_share_that_streams() -> None:
    assert sum(ask.is_stream for ask in asks(stream_share=0.3)) == pytest.approx(300, abs=45)
    assert not any(ask.is_stream for ask in asks(stream_share=0))


def test_the_share_that_leaves_and_when() -> None:
    leaving = [ask for ask in asks(stream_share=0, aborts=Aborts(share=0.4)) if ask.leave is not None]
    assert len(leaving) == pytest.approx(400, abs=50)
    phases = Counter(ask.leave.phase for ask in leaving if ask.leave is not None)
    assert set(phases) == set(Departure)
    assert min(phases.values()) > 70
    for ask in leaving:
        assert ask.leave is not None
        assert ask.is_stream is (ask.leave.phase in (Departure.FIRST_TOKEN, Departure.MID_STREAM))
        assert 2 <= ask.leave.num_chunks < max(3, ask.answer_tokens)


def test_only_in_one_phase() -> None:
    leaving = asks(aborts=Aborts(share=1, phases=(Departure.PREFILL,)))
    assert {ask.leave.phase for ask in leaving if ask.leave is not None} == {Departure.PREFILL}


def test_shared_beginnings() -> None:
    shared = sessions(prefixes=Prefixes(num_groups=3, num_tokens=100))
    by_group = {session.group: session.asks[0].pieces[0] for session in shared}
    assert set(by_group) == {0, 1, 2}
    assert len(set(by_group.values())) == 3
    for session in shared:
        prefix, own = session.asks[0].pieces
        assert prefix == by_group[session.group]
        assert session.asks[0].prompt_tokens == 100 + own.num_tokens
    assert len({session.asks[0].pieces[1] for session in shared}) == 1000


def test_the_same_questions_again() -> None:
    again = sessions(num_questions=7, stream_share=0.5)
    assert [session.question for session in again[:9]] == [0, 1, 2, 3, 4, 5, 6, 0, 1]
    said = {session.question: session.asks[0].pieces for session in again}
    assert all(session.asks[0].pieces == said[session.question] for session in again)
    assert len({session.asks[0].is_stream for session in again if session.question == 0}) == 2


def test_a_conversation_grows() -> None:
    talks = sessions(conversations=Conversations(turns=Fixed(3), message=Fixed(10), think_s=2.0))
    first, second, third = talks[0].asks
    assert first.think_s == 0
    assert second.prompt_tokens == first.prompt_tokens + first.answer_tokens + 10
    assert third.prompt_tokens == second.prompt_tokens + second.answer_tokens + 10
    pauses = [ask.think_s for talk in talks for ask in talk.asks[1:]]
    assert sum(pauses) / len(pauses) == pytest.approx(2, rel=0.15)


def test_a_conversation_ends_when_its_prompts_would_be_too_long() -> None:
    talks = sessions(conversations=Conversations(turns=Fixed(50)), max_prompt_tokens=300)
    assert all(ask.prompt_tokens <= 300 for talk in talks for ask in talk.asks)
    assert max(len(talk.asks) for talk in talks) < 30


def test_caps() -> None:
    capped = asks(max_prompt_tokens=50, max_answer_tokens=8)
    assert max(ask.prompt_tokens for ask in capped) == 50
    assert max(ask.answer_tokens for ask in capped) == 8


ROWS = (TraceRow(0.0, 1200, 30, (4, 5, 9)), TraceRow(1.5, 1100, 20, (4, 5, 7)), TraceRow(3.0, 100, 1))


def test_a_trace_again() -> None:
    replay = Workload(seed=1, pace=Replay(rows=ROWS, speed=2.0))
    assert list(replay.due_times()) == [0, 0.75, 1.5]
    one, other, last = (session.asks[0] for session in replay.sessions())
    assert (one.prompt_tokens, one.answer_tokens) == (1200, 30)
    assert [piece.num_tokens for piece in one.pieces] == [512, 512, 176]
    assert one.pieces[:2] == other.pieces[:2]
    assert one.pieces[2] != other.pieces[2]
    assert [piece.num_tokens for piece in last.pieces] == [100]


def test_a_smaller_trace_shares_as_much() -> None:
    replay = Workload(seed=1, pace=Replay(rows=ROWS, scale=0.125), num_requests=2)
    one, other = (session.asks[0] for session in replay.sessions())
    assert [piece.num_tokens for piece in one.pieces] == [64, 64, 22]
    assert one.pieces[:2] == other.pieces[:2]


def test_a_block_that_goes_beyond_the_prompt_is_cut() -> None:
    replay = Workload(seed=1, pace=Replay(rows=[TraceRow(0, 700, 1, (1, 2, 3))]), max_prompt_tokens=600)
    (session,) = replay.sessions()
    assert [piece.num_tokens for piece in session.asks[0].pieces] == [512, 88]


def test_another_rate_asks_the_same() -> None:
    faster = USUAL.at_rate(40)
    assert list(faster.sessions()) == list(USUAL.sessions())
    assert list(islice(faster.due_times(), 20)) == pytest.approx([at / 4 for at in islice(USUAL.due_times(), 20)])
    with pytest.raises(WorkloadError):
        replace(USUAL, pace=Closed(num_clients=1)).at_rate(2)


def test_pauses_of_a_closed_loops_clients() -> None:
    closed = replace(USUAL, pace=Closed(num_clients=2, think_s=0.5))
    pauses = list(islice(closed.think_times(0), 2000))
    assert sum(pauses) / 2000 == pytest.approx(0.5, rel=0.1)
    assert pauses[:5] != list(islice(closed.think_times(1), 5))
    with pytest.raises(WorkloadError):
        closed.due_times()


def test_it_says_in_words_what_it_is() -> None:
    told = replace(
        USUAL,
        pace=Open(pace=Pace(rate=3, ramp_s=5), process="gamma", burstiness=2),
        prefixes=Prefixes(num_groups=2, num_tokens=9),
        aborts=Aborts(share=0.1),
        conversations=Conversations(turns=Fixed(2)),
    ).settings()
    assert told["arrivals"] == "gamma"
    assert (told["rate"], told["burstiness"], told["ramp_s"]) == (3, 2, 5)
    assert told["sizes"] == "uniform:10,400 → uniform:5,60"
    assert told["abort_phases"] == "queued,prefill,first_token,mid_stream"
    assert told["prefix_groups"] == 2
    assert told["turns"] == "fixed:2"


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_requests": None},
        {"num_requests": 0},
        {"duration_s": 5.0, "warmup_s": 5.0},
        {"warmup_s": -1.0},
        {"stream_share": 1.2},
        {"aborts": Aborts(share=-0.1)},
        {"aborts": Aborts(share=0.1, phases=())},
        {"prefixes": Prefixes(num_groups=0, num_tokens=5)},
        {"pace": Closed(num_clients=0)},
        {"pace": Replay(rows=ROWS, speed=0)},
        {"pace": Replay(rows=ROWS), "prefixes": Prefixes(num_groups=1, num_tokens=5)},
        {"num_questions": 0},
        {"max_answer_tokens": 0},
    ],
)
def test_what_nobody_can_ask(wrong: dict[str, Any]) -> None:
    with pytest.raises(WorkloadError):
        replace(USUAL, **wrong)
