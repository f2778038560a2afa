"""The page in a real browser, of a real proxy over real sockets: what somebody at the screen sees, and can do by keys.

Where ``PDPROXY_SCREENSHOTS`` names a folder, pictures of it are left there.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette

from pdproxy.assemble import Proxy, assemble
from pdproxy.config.instances import InstanceSettings
from pdproxy.config.settings import Settings
from pdproxy.dashboard import feed as feed_module
from pdproxy.dashboard import routes
from pdproxy.dashboard.feed import Feed
from pdproxy.dashboard.routes import dashboard_routes
from pdproxy.serve import Server
from tests.fakes.fake_engine import FakeEngine, as_asgi
from tests.fakes.proxy_harness import until
from tests.fakes.served_engine import Listening, port_of
from tests.helpers.browser import Page, browser, installed

pytestmark = pytest.mark.skipif(installed() is None, reason="there is no Chromium on this machine")

SOON_S = 2.0
"""For what the page must not miss."""
KEY = "operator"
SEED = 7


@asynccontextmanager
async def listening(app: Any, port: int = 0) -> AsyncIterator[int]:
    config = uvicorn.Config(app, port=port, log_config=None, lifespan="off", interface="asgi3")
    server, started = Listening(config), asyncio.Event()
    task = asyncio.create_task(server.serve_until_cancelled(started))
    await started.wait()
    try:
        yield port_of(server)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Process:
    """What listens on one port, whichever is there in its time."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.port = 0
        self._life = AsyncExitStack()

    async def start(self) -> None:
        app = partial(as_asgi, self.engine)
        self.port = await self._life.enter_async_context(listening(app, self.port))

    async def die(self) -> None:
        await self._life.aclose()


@asynccontextmanager
async def serving(proxy: Proxy) -> AsyncIterator[str]:
    server = Server(proxy)
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{port_of(server)}"
    finally:
        server.handle_exit(signal.SIGTERM, None)
        async with asyncio.timeout(10):
            await task


def picture_file(tmp_path: Path, name: str) -> Path:
    folder = Path(os.environ.get("PDPROXY_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}.png"


def has_word(name: str, word: str) -> str:
    """An expression: the card of that name says that word."""
    return (
        f"[...document.querySelectorAll('.card')].some((card) => card.querySelector('.card-name').textContent === "
        f"'{name}' && card.querySelector('.card-word').textContent === '{word}')"
    )


def says(selector: str, text: str) -> str:
    return f"document.querySelector({selector!r})?.innerText.includes({text!r})"


async def focused(page: Page) -> str:
    return str(await page.ask("document.activeElement.innerText || document.activeElement.id"))


@asynccontextmanager
async def house(num_decoders: int) -> AsyncIterator[tuple[list[Process], tuple[InstanceSettings, ...]]]:
    engines = [FakeEngine("prefill"), *(FakeEngine("decode") for _ in range(num_decoders))]
    for number, engine in enumerate(engines):
        engine.epoch = f"epoch-{number}"
        engine.port = 7300 + number
    processes = [Process(engine) for engine in engines]
    async with AsyncExitStack() as stack:
        for process in processes:
            await process.start()
            stack.push_async_callback(process.die)
        names = ["prefill-0", *(f"decode-{number}" for number in range(num_decoders))]
        yield (
            processes,
            tuple(
                InstanceSettings(name=name, role=process.engine.role, url=f"http://127.0.0.1:{process.port}")
                for name, process in zip(names, processes, strict=True)
            ),
        )


async def test_it_lives_with_the_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with house(num_decoders=2) as (processes, instances), AsyncExitStack() as first_life:
        options: dict[str, Any] = {"proxy_port": 0, "drain_grace_s": 0.0, "canary": False, "admin_key": KEY}
        options["instances"] = instances
        proxy = assemble(Settings(port=0, **options))
        url = await first_life.enter_async_context(serving(proxy))
        port = int(url.rpartition(":")[2])
        async with browser(tmp_path / "browser") as page, httpx.AsyncClient(base_url=url, timeout=60) as client:
            await page.resize(1440, 900)
            await page.open(f"{url}/ui")
            await page.until(says("#verdict", "All 3 instances are ready"))
            assert await page.ask("document.title") == "3/3 ready · pdproxy"
            await says_that_it_collects(page)
            await uses_its_width(page)
            await follows_a_death_and_a_return(page, processes[2])
            await shows_a_request_under_way(page, client, processes[0].engine, picture_file(tmp_path, "small"))
            monkeypatch.setattr(feed_module, "EVERY_S", 0.2)
            monkeypatch.setattr(feed_module, "GAP_S", 0.1)
            await drains_by_keys(page, proxy, picture_file(tmp_path, "question"))
            await drains_and_removes_by_mouse(page, proxy)
            await removes_who_is_at_work_by_keys(page, proxy)
            await first_life.aclose()
            await page.until("document.documentElement.dataset.link === 'lost'", SOON_S)
            assert "Not connected" in await page.text("#link")
            await page.shoot(picture_file(tmp_path, "not-connected"))
            async with serving(assemble(Settings(port=port, **options))):
                took_s = await page.until(says("#verdict", "All 3 instances are ready"))
                assert took_s < 5.0
                assert await page.text("#link-says") == "Live"
                assert page.complaints == []
                await page.open("about:blank")


async def says_that_it_collects(page: Page) -> None:
    """Instead of figures that nobody could have seen yet; and for how long."""
    for figure, lack in (("rate", "seconds more"), ("tokens", "seconds more"), ("ttft", "20 more streams")):
        assert await page.text(f"#{figure}") == "collecting"
        assert lack in await page.text(f".figure:has(#{figure})")
    assert "collecting" in await page.text("#phases caption")
    lacks = "parseInt(document.querySelector('#history-says').innerText)"
    before = await page.ask(lacks)
    assert 50 <= before <= 60
    await page.until(f"{lacks} < {before}", 5.0)


async def uses_its_width(page: Page) -> None:
    """Few instances stand in one line, from one edge to the other."""
    edges = await page.ask(
        """(() => {
          const cards = [...document.querySelectorAll(".card")].map((card) => card.getBoundingClientRect());
          const main = document.querySelector("main").getBoundingClientRect();
          const tops = new Set(cards.map(({ top }) => Math.round(top)));
          return [tops.size, cards[0].left - main.left, main.right - cards.at(-1).right];
        })()"""
    )
    assert edges == [1, pytest.approx(0, abs=1), pytest.approx(0, abs=1)]


async def follows_a_death_and_a_return(page: Page, decoder: Process) -> None:
    await decoder.die()
    assert await page.until(has_word("decode-1", "down"), SOON_S) < SOON_S
    assert "2 of 3 instances are ready" in await page.text("#verdict")
    assert "decode-1 down" in " ".join((await page.text("#troubles")).split())
    decoder.engine.epoch = "another"
    await decoder.start()
    assert await page.until(has_word("decode-1", "ready"), SOON_S) < SOON_S
    assert await page.text("#troubles") == ""


async def shows_a_request_under_way(page: Page, client: httpx.AsyncClient, prefiller: FakeEngine, file: Path) -> None:
    prefiller.hang_at.add("prefill")
    body = {"model": "tiny", "prompt": [1, 2], "max_tokens": 1}
    asked = asyncio.create_task(client.post("/v1/completions", json=body))
    await prefiller.reached("prefill")
    await page.until(says("#slow", "prefill-0"), SOON_S)
    shown = await page.text("#slow")
    assert "Prefill" in shown
    assert "2 tokens" in shown
    await page.shoot(file)
    prefiller.let_go("prefill")
    assert (await asked).status_code == 200
    await page.until("document.querySelector('#slow').hidden", SOON_S)
    await page.until(says("#outcomes", "done"), SOON_S)


async def drains_by_keys(page: Page, proxy: Proxy, file: Path) -> None:
    """From the top of the page to a decoder that drains, and the key that was wrong at first."""
    await page.ask("document.activeElement.blur()")
    for _ in range(10):
        await page.press("Tab")
        if "decode-0" in await focused(page):
            break
    await page.press("ArrowRight")
    assert "decode-1" in await focused(page)
    outline = await page.ask("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "where the keys go can be seen"
    await page.press("Enter")
    await page.until("document.querySelector('#details').open")
    assert "decode-1" in await page.text("#details")
    await tab_to(page, "Drain …")
    await page.press("Enter")
    await page.until("document.activeElement.id === 'admin-key'")
    await page.type("wrong")
    await page.press("Enter")
    await page.until(says("#details", "not one of the proxy's"))
    assert not proxy.pool.instances[2].is_draining
    await page.shoot(file, is_whole=False)
    await page.until("document.activeElement.id === 'admin-key'")
    await page.type(KEY)
    await page.press("Enter")
    await page.until("!document.querySelector('#details').open")
    assert await page.text("#done") == "decode-1 is draining."
    await page.until(has_word("decode-1", "draining"), SOON_S)
    assert "decode-1" in await focused(page), "back to where it was opened from"
    stored = await page.ask("JSON.stringify([localStorage.length, sessionStorage.length, document.cookie])")
    assert stored == '[0,0,""]'


def card_of(name: str) -> str:
    return f"[...document.querySelectorAll('.card')].find((card) => card.innerText.includes({name!r}))"


def button_of(act: str) -> str:
    """What is to be pressed in the details: to choose, or to confirm."""
    return f"[...document.querySelectorAll('#actions button')].find((button) => button.innerText.startsWith({act!r}))"


async def drains_and_removes_by_mouse(page: Page, proxy: Proxy) -> None:
    """With the key that was right before, and without it; and with one that is wrong."""
    await page.click(card_of("decode-0"))
    await page.click(button_of("Drain"))
    await page.click(button_of("Cancel"))
    assert await focused(page) == "Drain …", "back to where it was chosen"
    await page.click(button_of("Drain"))
    await says_the_same_number_everywhere(page, proxy)
    await page.click(button_of("Drain decode-0"))
    await page.until("!document.querySelector('#details').open")
    await page.until(has_word("decode-0", "draining"), SOON_S)
    await page.click(card_of("decode-0"))
    await page.click(button_of("Resume"))
    await page.click(button_of("Resume decode-0"))
    await page.until("!document.querySelector('#details').open")
    await page.until(f"!({has_word('decode-0', 'draining')})", SOON_S)
    proxy.membership.drain("decode-0")
    await page.until(has_word("decode-0", "draining"), SOON_S)
    await page.click("document.querySelector('#forget')")
    await page.click(card_of("decode-1"))
    await page.click(button_of("Remove"))
    for key, outcome in (("wrong", says("#details", "not one of the proxy's")), (KEY, f"!({card_of('decode-1')})")):
        assert proxy.pool.find("decode-1") is not None
        await page.click("document.querySelector('#admin-key')")
        await page.type(key)
        await page.click(button_of("Remove decode-1"))
        await page.until(outcome, SOON_S)
    assert proxy.pool.find("decode-1") is None
    await page.until(says("#done", "decode-1 was removed."), SOON_S)
    await page.until("!document.querySelector('#details').open")
    await page.until("document.activeElement.classList.contains('card')", SOON_S)
    assert "decode-0" in await focused(page), "the one beside it"


async def says_the_same_number_everywhere(page: Page, proxy: Proxy) -> None:
    """Also while the question is asked: of requests, and not of the calls that they make just now."""
    instance = proxy.pool.find("decode-0")
    assert instance is not None
    for num, text in ((1, "1 request"), (2, "2 requests"), (1, "1 request")):
        while instance.num_attempts < num:
            instance.bound("a", 0)
        while instance.num_attempts > num:
            instance.unbound("")
        await page.until(says("#warning", f"{text} under way may finish"), SOON_S)
        facts = " ".join((await page.text("#details-facts")).split())
        assert f"Requests under way {num} Calls to it under way 0" in facts
        assert f"{text} ·" in (await page.ask(f"{card_of('decode-0')}.innerText")).replace("\u00a0", " ")
    instance.unbound("")


async def removes_who_is_at_work_by_keys(page: Page, proxy: Proxy) -> None:
    """From the card that has the focus; what is asked for first is refused, and why is said."""
    instance = proxy.pool.find("decode-0")
    assert instance is not None
    era = instance.leg_started()
    await page.press("Enter")
    await tab_to(page, "Remove …")
    await page.press("Enter")
    await page.until("document.activeElement.innerText === 'Cancel'")
    await page.press("Tab", shift=True)
    await page.press("Enter")
    await page.until(says("#details", "requests under way"))
    await page.until("document.activeElement.innerText === 'Cancel'")
    await page.press("Tab", shift=True)
    assert await focused(page) == "Remove anyway decode-0"
    await page.press("Enter")
    await page.until(has_word("decode-0", "leaving"), SOON_S)
    await page.until(says("#done", "decode-0 was removed, and leaves when its answers have ended."), SOON_S)
    instance.leg_finished(era, "ok")
    await page.until(says("#verdict", "Prefillers answer alone: no decoder takes any"), SOON_S)
    await page.until(f"!({card_of('decode-0')})", SOON_S)
    await page.until("document.activeElement.classList.contains('card')", SOON_S)
    assert "prefill-0" in await focused(page), "where there still is somebody"


async def tab_to(page: Page, text: str) -> None:
    for _ in range(10):
        if await focused(page) == text:
            return
        await page.press("Tab")
    raise AssertionError(f"no way to {text}")


class LargeFleet:
    """Implements `Subject`: two hundred instances, of which some change from look to look."""

    def __init__(self) -> None:
        self._rng = random.Random(SEED)
        self.now = 0.0
        self.is_over = False
        self.picture = {
            "proxy": {"version": "1", "life": "a", "ready": True, "draining": False, "can_change": True},
            "fleet": {card["role"] + "/" + card["name"]: card for card in map(self._card, range(200))},
            "flow": self._flow(),
            "slow": [self._row(number) for number in range(12)],
        }

    def take(self) -> dict[str, Any]:
        self.now += 1.0
        return dict(self.picture)

    def change(self, *names: str) -> None:
        """Their pages, and nothing else."""
        fleet = dict(self.picture["fleet"])
        for name in names:
            key = f"decode/{name}"
            fleet[key] = fleet[key] | {"held": (fleet[key]["held"] + 7) % 64}
        self.picture["fleet"] = fleet

    def be(self, word: str, name: str) -> None:
        key = f"decode/{name}"
        self.picture["fleet"] = self.picture["fleet"] | {key: self.picture["fleet"][key] | {"word": word}}

    def keep(self, *names: str) -> None:
        """All others have gone."""
        self.picture["fleet"] = {key: card for key, card in self.picture["fleet"].items() if card["name"] in names}

    def _card(self, number: int) -> dict[str, Any]:
        role = "prefill" if number < 80 else "decode"
        words = {3: "down", 90: "down", 91: "draining", 120: "breaker open", 150: "alive", 151: "unknown"}
        card = {
            "name": f"{role}-{number}", "role": role, "url": f"http://10.0.0.{number}:7100", "engine": "builtin",
            "word": words.get(number, "ready"), "state": "ready", "routable": True, "draining": number == 91,
            "why": "it cannot be reached: connection refused" if words.get(number) == "down" else "",
            "breaker": "open" if number == 120 else "closed", "weight": 1.0, "models": ["tiny"], "legs": number % 5,
            "requests": number % 5 + 1,
            "queued_tokens": self._rng.randrange(5000) if role == "prefill" else 0, "epoch": f"{number:032x}",
        }  # fmt: skip
        if role == "decode":
            held = self._rng.randrange(65)
            card |= {"capacity": 64, "held": held, "queue": 3 if held > 60 else 0, "queued_pages": 12}
        return card

    def _flow(self) -> dict[str, Any]:
        wave = [round(40 + 20 * self._rng.random(), 1) for _ in range(60)]
        unseen = range(30, 40)
        return {
            "in_flight": 143, "now": {"slot_wait": 3, "prefill": 31, "kv_wait": 2, "first_byte": 1, "decode": 106},
            "unsettled": 2, "window_s": 60, "collecting_s": 0, "per_s": 49.7, "tokens_per_s": 6210.4,
            "ended": {"done": 2960, "failed": 7, "client_gone": 15},
            "failures": {"leg_failed": 4, "deadline_exceeded": 2, "kv_failed": 1},
            "first_token_s": {"num": 2910, "least": 20, "p50": 0.684, "p95": 2.31},
            "phase_s": {"receive": 0.0004, "tokenize": 0.0031, "slot_wait": 0.21, "prefill": 0.62, "kv_wait": 0.018,
                        "first_byte": 0.041, "decode": 4.93},
            "all": [None if place in unseen else each for place, each in enumerate(wave)],
            "failed": [None if place in unseen else 3.0 * (20 < place < 23) for place in range(60)],
            "tokens": [None if place in unseen else each * 125 for place, each in enumerate(wave)],
        }  # fmt: skip

    def _row(self, number: int) -> dict[str, Any]:
        return {
            "id": f"req-{number:08x}", "started": -4000.0 / (1 + number), "step": "decode" if number % 3 else "kv_wait",
            "since": -3900.0 / (1 + number), "attempts": 1 + (number == 4),
            "model": "meta-llama/Llama-3.3-70B-Instruct", "prefiller": f"prefill-{number}",
            "decoder": f"decode-{100 + number}", "tokens": 1200 * number + 7, "pages": 5 * number + 1,
        }  # fmt: skip


async def test_two_hundred_instances_stay_readable_and_smooth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "EVERY_S", 0.2)
    monkeypatch.setattr(feed_module, "GAP_S", 0.1)
    monkeypatch.setattr(routes, "LIFE_S", 0.7)
    large_fleet = LargeFleet()
    feed = Feed(large_fleet)
    running = asyncio.create_task(feed.run())
    async with listening(Starlette(routes=[*dashboard_routes(feed)])) as port, browser(tmp_path / "browser") as page:
        await page.resize(1440, 900)
        await page.open(f"http://127.0.0.1:{port}/ui")
        await page.until("document.querySelectorAll('.card').length === 200")
        await page.ask(NOTES_HOW_THE_LINK_IS)
        assert "194 of 200 instances are ready" in await page.text("#verdict")
        await fits(page, 1440)
        await draws_what_nobody_observed_as_a_gap(page)
        await page.shoot(picture_file(tmp_path, "desktop"))
        await touches_only_what_has_changed(page, large_fleet)
        await leaves_late_answers_to_what_they_are_about(page)
        await page.prefer(prefers_color_scheme="dark")
        await page.shoot(picture_file(tmp_path, "desktop-dark"))
        await page.prefer(prefers_color_scheme="light", prefers_reduced_motion="reduce")
        assert await page.ask("getComputedStyle(document.querySelector('.fill')).transitionDuration") == "0s"
        await page.resize(390, 844, is_phone=True)
        await fits(page, 390)
        await page.shoot(picture_file(tmp_path, "phone"), is_whole=False)
        await page.ask("document.querySelector('#flow-section').scrollIntoView()")
        await page.shoot(picture_file(tmp_path, "phone-requests"), is_whole=False)
        await keeps_the_place_of_who_uses_keys(page, large_fleet)
        await page.until("window.numStreams > 3")
        assert await page.ask("[...window.links]") == ["live"], "a stream that ends by itself is no loss of the proxy"
        assert page.complaints == []
        await page.open("about:blank")
        await until(lambda: feed.num_viewers == 0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def draws_what_nobody_observed_as_a_gap(page: Page) -> None:
    assert "not observed: 10 seconds, in grey" in await page.text("#history-says")
    inside = "[29.5, 30.5, 39.5, 40.5].map((x) => document.querySelector('#history .gaps').isPointInFill({ x, y: 1 }))"
    assert await page.ask(inside) == [False, True, True, False]


async def fits(page: Page, width: int) -> None:
    """Nothing is wider than the window, and no name or figure of a card is cut off."""
    assert await page.ask("document.documentElement.scrollWidth") <= width
    margin = "parseFloat(getComputedStyle(document.body).paddingRight)"
    assert await page.ask(f"document.querySelector('#slow').getBoundingClientRect().right + {margin}") <= width
    cut = await page.ask(
        "[...document.querySelectorAll('.card-name, .card-word, .card-load, .card-queue')]"
        ".filter((each) => each.scrollWidth > each.clientWidth + 1).map((each) => each.textContent)"
    )
    assert cut == []
    least = await page.ask("Math.min(...[...document.querySelectorAll('.card')].map((card) => card.offsetHeight))")
    assert least >= 44, "a finger finds it"


async def touches_only_what_has_changed(page: Page, large_fleet: LargeFleet) -> None:
    await page.ask(
        """(() => {
          window.touched = new Set();
          const note = (changes) => changes.forEach(({ target }) => {
            const node = target.nodeType === 1 ? target : target.parentElement;
            const card = node?.closest(".card");
            if (card) window.touched.add(card.querySelector(".card-name").textContent);
          });
          const options = { subtree: true, childList: true, characterData: true, attributes: true };
          new MutationObserver(note).observe(document.querySelector("#groups"), options);
          window.longest = 0;
          new PerformanceObserver((list) => list.getEntries().forEach((each) => {
            window.longest = Math.max(window.longest, each.duration);
          })).observe({ type: "longtask" });
        })()"""
    )
    large_fleet.change("decode-100", "decode-101")
    await page.until("window.touched.size >= 2", 5.0)
    everybody = [f"decode-{number}" for number in range(80, 200)]
    assert sorted(await page.ask("[...window.touched]")) == ["decode-100", "decode-101"]
    for _ in range(2):
        await page.ask("window.touched.clear()")
        large_fleet.change(*everybody)
        await page.until(f"window.touched.size === {len(everybody)}", 5.0)
    assert await page.ask("window.longest") < 200, "no frame is held up for long"


NOTES_HOW_THE_LINK_IS = """(() => {
  const root = document.documentElement;
  window.links = new Set([root.dataset.link]);
  new MutationObserver(() => window.links.add(root.dataset.link)).observe(root, { attributeFilter: ["data-link"] });
  window.numStreams = 0;
  const usual = window.EventSource;
  window.EventSource = function (url) { window.numStreams += 1; return new usual(url); };
  window.EventSource.CLOSED = usual.CLOSED;
})()"""
ANSWERS_LATE = """
  window.fetch = () => new Promise((resolve) => {
    window.answer = (status, told) => resolve(new Response(JSON.stringify(told), { status }));
  });
"""


async def leaves_late_answers_to_what_they_are_about(page: Page) -> None:
    """Somebody has turned to another instance before the proxy has answered."""
    await page.ask(ANSWERS_LATE)
    refused = (401, '{ error: { message: "no" } }', "decode-100: no")
    for status, told, outcome in (refused, (200, "{}", "decode-100 was removed.")):
        await page.ask(f"{card_of('decode-100')}.click()")
        await page.click(button_of("Remove"))
        await page.until("document.activeElement.id === 'admin-key'")
        await page.type(KEY)
        await page.press("Enter")
        await page.press("Escape")
        await page.until("!document.querySelector('#details').open")
        await page.ask(f"{card_of('decode-101')}.click()")
        await page.click(button_of("Drain"))
        await page.ask(f"window.answer({status}, {told})")
        await page.until(says("#done", outcome))
        assert await page.ask("document.querySelector('#details').open"), "of another one"
        assert await page.text("#details-name") == "decode-101"
        assert await page.text("#actions .error") == ""
        assert await page.ask(f"{button_of('Drain decode-101')} !== undefined")
        await page.press("Escape")
        await page.until("!document.querySelector('#details').open")
    await page.click("document.querySelector('#forget')")


async def keeps_the_place_of_who_uses_keys(page: Page, large_fleet: LargeFleet) -> None:
    """Whatever comes and goes meanwhile."""
    await page.ask("document.querySelector('.trouble[data-word=draining]').focus()")
    for number in (110, 111):
        large_fleet.be("down", f"decode-{number}")
        await page.until(says("#troubles", f"decode-{number}"))
        large_fleet.be("ready", f"decode-{number}")
        await page.until(f"!({says('#troubles', f'decode-{number}')})")
    assert "decode-91" in await focused(page), "it has moved down and up"
    await page.ask("document.querySelector('#find').focus()")
    await page.type("decode-10")
    assert await page.text("#found") == "10 of 200"
    await page.ask(f"{card_of('decode-104')}.focus()")
    large_fleet.keep("prefill-0", "decode-0", "decode-100", "decode-102", "decode-106")
    await page.until("document.querySelectorAll('.card').length === 4")
    assert "decode-106" in await focused(page), "the next of those that are shown"
    assert await page.text("#found") == "3 of 4"
    assert await page.ask("!document.querySelector('#finder').hidden"), "what hides somebody can be undone"
    await page.ask("document.querySelector('#find').focus()")
    await page.type("7")
    assert await page.text("#found") == "No instance has that in its name or state."
    assert await page.text("#groups") == ""
    await page.ask("document.querySelector('#find').select()")
    await page.press("Backspace")
    assert await page.ask("document.querySelectorAll('li:not([hidden]) > .card').length") == 4
