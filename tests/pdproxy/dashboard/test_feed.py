"""Pictures come when they should, on a clock that the tests move: to everybody, and to nobody for nothing."""

from __future__ import annotations

import asyncio
import copy
import logging
import random
from itertools import pairwise
from typing import Any

import pytest

from pdproxy.dashboard import feed as feed_module
from pdproxy.dashboard.feed import BEAT_S, EVERY_S, GAP_S, MAX_PENDING, MAX_VIEWERS, Feed, TooManyViewers
from tests.fakes.eyes import Eyes
from tests.fakes.stepped_loop import SteppedLoop


class Scene:
    """Implements `Subject`: what there is to see is the test's."""

    def __init__(self, loop: SteppedLoop) -> None:
        self._loop = loop
        self.shows: dict[str, Any] = {"fleet": {"d": {"held": 0, "state": "ready"}}}
        self.num_looks = 0
        self.is_over = False
        self.bug: Exception | None = None

    @property
    def now(self) -> float:
        return self._loop.time()

    def take(self) -> dict[str, Any]:
        self.num_looks += 1
        if self.bug is not None:
            raise self.bug
        return copy.deepcopy(self.shows)


class Theatre:
    """A scene, its feed, which runs, and whoever looks."""

    def __init__(self, loop: SteppedLoop) -> None:
        self.loop = loop
        self.scene = Scene(loop)
        self.feed = Feed(self.scene)
        self.running = loop.create_task(self.feed.run())
        loop.settle()

    def look(self) -> Eyes:
        eyes = Eyes(self.loop, self.feed)
        self.loop.settle()
        return eyes

    def show(self, **card: Any) -> None:
        self.scene.shows["fleet"]["d"].update(card)

    def pass_seconds(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            self.loop.advance(0.1)


@pytest.fixture
def theatre(loop: SteppedLoop) -> Theatre:
    return Theatre(loop)


def test_nobody_looks_and_nothing_is_done(theatre: Theatre) -> None:
    theatre.feed.hurry()
    theatre.loop.settle()
    assert theatre.loop.num_timers == 0
    theatre.pass_seconds(10)
    assert theatre.scene.num_looks == 0


def test_a_whole_picture_at_once_and_then_only_what_has_changed(theatre: Theatre) -> None:
    eyes = theatre.look()
    [(kind, first)] = eyes.events
    assert (kind, first["fleet"]) == ("snapshot", {"d": {"held": 0, "state": "ready"}})
    theatre.show(held=3)
    theatre.pass_seconds(EVERY_S)
    [(kind, change)] = eyes.events[1:]
    assert kind == "change"
    assert {name: value for name, value in change.items() if name != "now"} == {"fleet": {"d": {"held": 3}}}


def test_what_is_urgent_does_not_wait_for_the_next_look(theatre: Theatre) -> None:
    eyes = theatre.look()
    theatre.pass_seconds(EVERY_S + 0.2)
    theatre.show(state="down")
    theatre.pass_seconds(0.4)
    assert eyes.picture["fleet"]["d"]["state"] == "ready", "a look is due, by itself, only in another 0.4 s"
    theatre.feed.hurry()
    theatre.loop.settle()
    assert eyes.picture["fleet"]["d"]["state"] == "down"


def test_two_a_second_at_the_most_whatever_happens(theatre: Theatre) -> None:
    eyes = theatre.look()
    for held in range(100):
        theatre.show(held=held)
        theatre.feed.hurry()
        theatre.pass_seconds(0.1)
    assert 18 <= len(eyes.events) <= 10 / GAP_S + 1
    theatre.pass_seconds(EVERY_S)
    assert eyes.picture["fleet"]["d"]["held"] == 99


def test_a_beat_now_and_then_where_there_is_nothing_new(theatre: Theatre) -> None:
    eyes = theatre.look()
    theatre.pass_seconds(10 * BEAT_S)
    assert set(eyes.kinds[1:]) == {"beat"}
    assert 8 <= eyes.kinds.count("beat") <= 10
    times = [content["now"] for _, content in eyes.events]
    assert max(later - earlier for earlier, later in pairwise(times)) <= BEAT_S + EVERY_S


def test_one_producer_for_all(theatre: Theatre) -> None:
    viewers = [theatre.look() for _ in range(5)]
    before = theatre.scene.num_looks
    assert before == 1, "the others' first pictures are the first one's"
    for held in range(1, 11):
        theatre.show(held=held)
        theatre.pass_seconds(EVERY_S)
    assert theatre.scene.num_looks - before <= 10
    assert all(eyes.picture == theatre.scene.shows for eyes in viewers)


def test_what_twenty_see_is_rendered_once(theatre: Theatre, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look, and a picture or a change as JSON, cost as much for twenty as for one."""
    rendered: list[Any] = []
    encode = feed_module.msgspec.json.encode

    def counted(content: Any) -> bytes:
        rendered.append(content)
        return encode(content)

    monkeypatch.setattr(feed_module.msgspec.json, "encode", counted)
    viewers = [theatre.look() for _ in range(20)]
    assert (theatre.scene.num_looks, len(rendered)) == (1, 1)
    assert [viewer.kinds for viewer in viewers] == [["snapshot"]] * 20
    theatre.show(held=3)
    theatre.pass_seconds(EVERY_S)
    assert (theatre.scene.num_looks, len(rendered)) == (2, 2)
    late = theatre.look()
    assert late.picture == viewers[0].picture == {"fleet": {"d": {"held": 3, "state": "ready"}}}
    assert len(rendered) == 3, "it has changed since the last one who came"


def test_when_the_last_has_left_nothing_is_done_any_more(theatre: Theatre) -> None:
    first, second = theatre.look(), theatre.look()
    first.leave()
    theatre.pass_seconds(3)
    before = theatre.scene.num_looks
    second.leave()
    theatre.pass_seconds(EVERY_S)
    assert theatre.scene.num_looks == before
    assert theatre.loop.num_timers == 0
    assert theatre.feed.num_viewers == 0
    third = theatre.look()
    assert third.kinds == ["snapshot"]


def test_loading_the_page_again_and_again_costs_no_more_looks(theatre: Theatre) -> None:
    for _ in range(50):
        eyes = theatre.look()
        assert eyes.kinds == ["snapshot"]
        eyes.leave()
        theatre.loop.settle()
    assert theatre.scene.num_looks == 1


def test_a_slow_viewer_skips_and_holds_up_nobody(theatre: Theatre) -> None:
    slow, quick = theatre.look(), theatre.look()
    slow.block()
    for held in range(1, 101):
        theatre.show(held=held)
        theatre.pass_seconds(EVERY_S)
        assert all(len(viewer._pending) <= MAX_PENDING for viewer in theatre.feed._viewers)
    assert quick.picture["fleet"]["d"]["held"] == 100
    assert len(slow.events) <= 2, "what it was told before it took nothing any more"
    slow.unblock()
    theatre.loop.settle()
    assert slow.kinds[-1] == "snapshot"
    assert len(slow.events) <= 3
    theatre.show(held=0)
    theatre.pass_seconds(EVERY_S)
    assert slow.picture == quick.picture == theatre.scene.shows


@pytest.mark.parametrize("seed", range(10))
def test_whatever_happens_everybody_sees_the_same_in_the_end(theatre: Theatre, seed: int) -> None:
    rng = random.Random(seed)
    everybody = [theatre.look() for _ in range(3)]
    for _ in range(200):
        fleet, one = theatre.scene.shows["fleet"], rng.choice("abcd")
        match rng.randrange(6):
            case 0:
                fleet.pop(one, None)
            case 1 | 2:
                fleet[one] = {"held": rng.randrange(3), **({"epoch": "e"} if rng.random() < 0.5 else {})}
            case 3:
                rng.choice(everybody).block()
            case 4:
                rng.choice(everybody).unblock()
            case 5:
                theatre.feed.hurry()
        theatre.loop.advance(rng.choice((0.0, 0.3, 1.1)))
    for eyes in everybody:
        eyes.unblock()
    theatre.pass_seconds(EVERY_S)
    assert all(eyes.picture == theatre.scene.shows for eyes in everybody), f"seed {seed}"


def test_a_bug_in_a_look_is_told_and_is_nobodys_end(theatre: Theatre, caplog: pytest.LogCaptureFixture) -> None:
    eyes = theatre.look()
    theatre.scene.bug = ZeroDivisionError()
    with caplog.at_level(logging.ERROR):
        theatre.pass_seconds(EVERY_S)
    assert "a look for the status page met a bug" in caplog.text
    theatre.scene.bug = None
    theatre.show(held=5)
    theatre.pass_seconds(EVERY_S)
    assert not theatre.running.done()
    assert eyes.picture["fleet"]["d"]["held"] == 5


def test_at_the_end_everybody_is_let_go_with_the_last_picture(theatre: Theatre) -> None:
    eyes = theatre.look()
    theatre.show(held=7)
    theatre.scene.is_over = True
    theatre.pass_seconds(EVERY_S)
    assert eyes.task.done()
    assert eyes.picture["fleet"]["d"]["held"] == 7
    late = theatre.look()
    assert late.task.done()
    assert late.kinds == ["snapshot"]
    assert theatre.feed.num_viewers == 0


def test_nobody_waits_for_a_feed_that_runs_no_more(theatre: Theatre) -> None:
    eyes = theatre.look()
    theatre.running.cancel()
    theatre.loop.settle()
    assert eyes.task.done()


def test_only_so_many(theatre: Theatre, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_VIEWERS > 2
    monkeypatch.setattr(feed_module, "MAX_VIEWERS", 2)
    viewers = [theatre.look(), theatre.look()]
    with pytest.raises(TooManyViewers) as refused:
        theatre.feed.join()
    assert (refused.value.status, refused.value.retry_after_s) == (503, 5.0)
    viewers[0].leave()
    theatre.loop.settle()
    assert theatre.look().kinds == ["snapshot"]


def test_they_tell_how_they_are(theatre: Theatre) -> None:
    async def see() -> str:
        with theatre.feed.join() as viewer:
            first = repr(viewer)
            await viewer.next()
            return f"{first} {viewer!r} {theatre.feed!r}"

    seen: asyncio.Task[str] = theatre.loop.create_task(see())
    theatre.loop.settle()
    assert seen.result() == "<Viewer behind> <Viewer 0 pending> <Feed for 1 viewers>"
