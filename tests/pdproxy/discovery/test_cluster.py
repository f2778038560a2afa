"""Lists and watches, against a stand-in that does what real servers and networks do to them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pdproxy.discovery import api_server, cluster
from pdproxy.discovery.api_server import kubernetes_client, own_namespace
from pdproxy.discovery.cluster import Reflector
from pdproxy.discovery.pods import Pod
from pdproxy.errors import ConfigError
from tests.fakes.calls import until
from tests.fakes.kubernetes_api import NAMESPACE, KubernetesApi, Request, pod, ready, send_bytes, terminating

pytestmark = pytest.mark.usefixtures("config")
PATH = f"api/v1/namespaces/{NAMESPACE}/pods"


class Seen:
    """The pods by what has been told, and how often all of them were."""

    def __init__(self) -> None:
        self.pods: dict[str, Pod] = {}
        self.num_lists = 0
        self.num_events = 0

    def replace(self, objects: list[Pod]) -> None:
        self.num_lists += 1
        self.pods = {one.metadata.name: one for one in objects}

    def change(self, what: str, one: Pod) -> None:
        self.num_events += 1
        if what == "DELETED":
            self.pods.pop(one.metadata.name)
        else:
            self.pods[one.metadata.name] = one

    def names(self) -> set[str]:
        return set(self.pods)


@asynccontextmanager
async def reflecting(**more: Any) -> AsyncIterator[Seen]:
    """A reflector of pods, which goes on while the block runs."""
    seen = Seen()
    reflector = Reflector(kubernetes_client, PATH, Pod, seen, **more)
    task = asyncio.ensure_future(reflector.run())
    try:
        yield seen
        assert not task.done(), "it has ended"
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def sees(seen: Seen, *names: str) -> Callable[[], bool]:
    return lambda: seen.num_lists > 0 and seen.names() == set(names)


async def is_watched(api: KubernetesApi, times: int = 1) -> None:
    await until(lambda: api.counts["watch pods"] >= times)


async def test_listed_and_then_told(api: KubernetesApi) -> None:
    api.put("pods", pod("a"))
    async with reflecting() as seen:
        await until(sees(seen, "a"))
        api.put("pods", pod("b"))
        await until(sees(seen, "a", "b"))
        api.change("pods", "b", terminating)
        await until(lambda: seen.pods["b"].metadata.deletion_timestamp is not None)
        api.remove("pods", "a")
        await until(sees(seen, "b"))
    assert seen.num_lists == 1
    assert own_namespace() == NAMESPACE


async def test_by_labels(api: KubernetesApi) -> None:
    api.put("pods", pod("a", role="prefill"))
    api.put("pods", pod("b", role="decode"))
    async with reflecting(labels="role in (prefill, both)") as seen:
        await until(sees(seen, "a"))
        api.put("pods", pod("b", role="both"))
        await until(sees(seen, "a", "b"))
        api.put("pods", pod("a", role="decode"))
        await until(sees(seen, "b"))


async def test_pages(api: KubernetesApi) -> None:
    api.page = 3
    names = [f"p{number}" for number in range(10)]
    for name in names:
        api.put("pods", pod(name))
    async with reflecting() as seen:
        await until(sees(seen, *names))
        assert seen.num_lists == 1
        assert api.counts["list pods"] == 4


async def test_a_page_that_is_gone_begins_anew(api: KubernetesApi) -> None:
    api.page = 3
    names = [f"p{number}" for number in range(5)]
    for name in names:
        api.put("pods", pod(name))
    api.faults.is_continue_gone = True
    async with reflecting() as seen:
        await until(sees(seen, *names))
        assert seen.num_lists == 1


async def test_events_cut_anywhere(api: KubernetesApi) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    api.faults.cut_bytes = random.Random(seed)
    # The separators of which text knows more than bytes do.
    odd = {"note": "a\u2028b\u0085c\u00e4"}
    async with reflecting() as seen:
        await is_watched(api)
        for number in range(40):
            api.put("pods", pod(f"p{number}", annotations=odd))
        await until(sees(seen, *(f"p{number}" for number in range(40))))
        assert seen.pods["p7"].metadata.annotations == odd
        assert seen.num_lists == 1


async def test_a_watch_that_ends_in_order_goes_on_from_there(api: KubernetesApi) -> None:
    api.put("pods", pod("a"))
    async with reflecting() as seen:
        for times in range(1, 4):
            await is_watched(api, times)
            api.put("pods", pod(f"b{times}"))
            await until(lambda times=times: f"b{times}" in seen.pods)
            api.end_watches()
        await is_watched(api, 4)
        assert seen.num_lists == 1
        assert seen.num_events == 3


async def test_a_bookmark_keeps_a_quiet_watch_from_going_stale(api: KubernetesApi) -> None:
    api.put("pods", pod("a"))
    async with reflecting() as seen:
        await is_watched(api)
        # All that is told is about others; then the old versions are forgotten.
        for _ in range(5):
            api.put("endpointslices", {"metadata": {"name": "s"}, "addressType": "IPv4", "endpoints": []})
        api.end_watches()
        await is_watched(api, 2)
        api.oldest = api.version
        api.end_watches()
        await is_watched(api, 3)
        api.put("pods", pod("b"))
        await until(sees(seen, "a", "b"))
        assert seen.num_lists == 1


async def test_a_watch_that_ends_within_an_event(api: KubernetesApi) -> None:
    async with reflecting() as seen:
        await is_watched(api)
        api.faults.is_cut_within = True
        api.put("pods", pod("a"))
        await until(sees(seen, "a"))
        assert api.counts["watch pods"] == 2
        assert seen.num_events == 1


async def test_gone_as_an_event(api: KubernetesApi) -> None:
    api.put("pods", pod("a"))
    async with reflecting() as seen:
        await is_watched(api)
        api.cut()
        api.remove("pods", "a")
        api.put("pods", pod("b"))
        api.forget()
        await until(sees(seen, "b"))


async def test_gone_as_a_status(api: KubernetesApi) -> None:
    api.put("pods", pod("a"))
    api.faults.watch_status = [(410, {})]
    async with reflecting() as seen:
        await until(sees(seen, "a"))
        await is_watched(api, 2)
        assert seen.num_lists == 2


async def test_gone_again_and_again_is_no_storm(api: KubernetesApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "FIRST_PAUSE_S", 0.2)
    api.faults.watch_status = [(410, {})] * 100
    async with reflecting():
        await asyncio.sleep(0.5)
        assert api.counts["watch pods"] < 8


async def test_a_connection_that_breaks(api: KubernetesApi) -> None:
    api.put("pods", pod("a"))
    async with reflecting() as seen:
        await is_watched(api)
        api.remove("pods", "a")
        api.cut()
        api.put("pods", pod("b"))
        await until(sees(seen, "b"))


async def test_a_connection_that_is_half_open(api: KubernetesApi) -> None:
    api.put("pods", pod("a"))
    async with reflecting(watch_s=1, silent_s=0.2) as seen:
        await is_watched(api)
        await api.freeze()
        api.remove("pods", "a")
        api.put("pods", pod("b"))
        await asyncio.sleep(0.3)
        assert seen.names() == {"a"}
        await until(sees(seen, "b"))
        assert seen.num_lists == 2


async def test_a_token_that_is_another(api: KubernetesApi, config: Path) -> None:
    api.token = "first"
    api.put("pods", pod("a"))
    async with reflecting() as seen:
        await is_watched(api)
        api.token = "second"
        (config.parent / "token").write_text("second\n")
        api.cut()
        api.put("pods", pod("b"))
        await until(sees(seen, "a", "b"))
    assert api.counts["401"] <= 1


async def test_a_token_that_comes_later(
    api: KubernetesApi, config: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "MAX_PAUSE_S", 0.1)
    api.token = "second"
    api.put("pods", pod("a"))
    async with reflecting() as seen:
        await until(lambda: api.counts["401"] > 3)
        assert not seen.num_lists
        (config.parent / "token").write_text("second\n")
        await until(sees(seen, "a"))
    told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 1
    assert "HTTP 401" in told[0]


async def test_too_many_requests(api: KubernetesApi) -> None:
    api.put("pods", pod("a"))
    api.faults.list_status = [(429, {"Retry-After": "1"})]
    async with reflecting() as seen:
        loop = asyncio.get_running_loop()
        since = loop.time()
        await until(sees(seen, "a"))
        assert loop.time() - since >= 0.95


async def test_a_server_that_is_away_changes_nothing(
    api: KubernetesApi, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cluster, "MAX_PAUSE_S", 0.1)
    api.put("pods", pod("a"))
    async with reflecting() as seen:
        await is_watched(api)
        await api.stop()
        await asyncio.sleep(0.3)
        assert seen.names() == {"a"}
        api.put("pods", pod("b"))
        await api.start()
        await until(sees(seen, "a", "b"))
    assert any("stay as they are" in record.message for record in caplog.records)


async def test_forbidden_is_said(api: KubernetesApi, caplog: pytest.LogCaptureFixture) -> None:
    api.faults.list_status = [(403, {})]
    api.put("pods", pod("a"))
    async with reflecting() as seen:
        await until(sees(seen, "a"))
        api.put("pods", pod("a2"))
        await until(sees(seen, "a", "a2"))
    assert "HTTP 403" in caplog.text


@pytest.mark.parametrize("is_watch", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        b"<html>",
        b'{"metadata": {"resourceVersion": "\xff"}}\n',
        b'{"metadata": {}, "x": ' + b"[" * 50_000 + b"]" * 50_000 + b"}\n",
        b'{"type": "ERROR", "object": {"metadata": ' + b"[" * 50_000 + b"]" * 50_000 + b"}}\n",
        b'{"type": "ADDED", "object": {"metadata": {"name": "\xff\xfe"}}}\n',
        b'{"metadata": {}, "items": [{"metadata": {"name": 7}}]}\n',
        b"[]\n",
        b"\x1f\x8b\x00",
    ],
    ids=["html", "no text", "deep", "deep error", "no name", "a number", "a list", "gzip"],
)
async def test_answers_that_are_none(
    api: KubernetesApi, body: bytes, is_watch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stands in the server's place for a moment says nothing of the pods, and ends nothing."""
    monkeypatch.setattr(cluster, "MAX_PAUSE_S", 0.05)
    api.put("pods", pod("a"))
    num_left = 3

    async def instead(request: Request, writer: asyncio.StreamWriter) -> bool:
        nonlocal num_left
        if request.is_watch != is_watch or num_left == 0:
            return False
        num_left -= 1
        await send_bytes(writer, body)
        return True

    api.faults.instead = instead
    async with reflecting() as seen:
        await until(sees(seen, "a"))
        await until(lambda: num_left == 0)
        api.put("pods", pod("b"))
        await until(sees(seen, "a", "b"))


async def _list_of(writer: asyncio.StreamWriter, pieces: AsyncIterator[bytes]) -> None:
    with contextlib.suppress(ConnectionError):
        writer.write(b"HTTP/1.1 200 X\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        async for piece in pieces:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()


@pytest.mark.parametrize("what", ["large", "slow", "many", "endless"])
async def test_a_list_without_bounds(
    api: KubernetesApi, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A list that is too large, or never ends, is no list. What was known stays."""
    monkeypatch.setattr(api_server, "MAX_PAGE_BYTES", 1 << 20)
    monkeypatch.setattr(cluster, "MAX_OBJECTS", 1000)
    monkeypatch.setattr(api_server, "WHOLE_S", 0.3)
    monkeypatch.setattr(cluster, "LIST_S", 0.6)
    is_over = False
    num_bytes = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal num_bytes
        yield b'{"metadata": {'
        while what in ("large", "slow"):
            piece = b" " * (1 << 16 if what == "large" else 1)
            num_bytes += len(piece)
            yield piece
            await asyncio.sleep(0 if what == "large" else 0.02)
        items = ",".join('{"metadata": {"name": "x"}}' for _ in range(400 if what == "many" else 0))
        yield f'"continue": "more"}}, "items": [{items}]}}'.encode()

    async def instead(request: Request, writer: asyncio.StreamWriter) -> bool:
        if request.is_watch or is_over:
            return False
        await _list_of(writer, body())
        writer.write(b"0\r\n\r\n")
        return True

    api.put("pods", pod("a"))
    async with reflecting() as seen:
        await is_watched(api)
        api.faults.instead = instead
        api.put("pods", pod("b"))
        api.cut()
        api.forget()
        await until(lambda: "did not end within" in caplog.text or "has more than" in caplog.text)
        assert seen.num_lists == 1
        assert num_bytes < 8 << 20
        is_over = True
        await until(sees(seen, "a", "b"))


async def test_an_event_without_an_end(
    api: KubernetesApi, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(api_server, "MAX_LINE", 1 << 18)
    api.put("pods", pod("a"))
    is_over = False

    async def body() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 4096

    async def instead(request: Request, writer: asyncio.StreamWriter) -> bool:
        if not request.is_watch or is_over:
            return False
        await _list_of(writer, body())
        return True

    api.faults.instead = instead
    async with reflecting() as seen:
        await until(lambda: "an event has more than" in caplog.text)
        is_over = True
        api.put("pods", pod("b"))
        await until(sees(seen, "a", "b"))


async def test_watches_that_end_after_one_event_are_no_storm(api: KubernetesApi) -> None:
    mark = b'{"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "1001"}}}\n'

    async def instead(request: Request, writer: asyncio.StreamWriter) -> bool:
        if request.is_watch:
            await send_bytes(writer, mark)
        return request.is_watch

    api.faults.instead = instead
    async with reflecting():
        await is_watched(api)
        await asyncio.sleep(0.5)
        assert api.counts["watch pods"] < 10


async def test_it_ends_at_once_while_a_server_hangs(api: KubernetesApi) -> None:
    """A proxy that is told to end does not wait for a cluster that is silent."""

    async def instead(request: Request, writer: asyncio.StreamWriter) -> bool:
        await asyncio.sleep(3600)
        return True

    api.faults.instead = instead
    loop = asyncio.get_running_loop()
    async with reflecting():
        await until(lambda: api.counts["list pods"] > 0)
        since = loop.time()
    assert loop.time() - since < 2.0


async def test_another_uid_under_the_same_name(api: KubernetesApi) -> None:
    api.put("pods", pod("a", uid="one"))
    async with reflecting() as seen:
        await is_watched(api)
        api.remove("pods", "a")
        api.put("pods", pod("a", uid="two"))
        await until(lambda: seen.pods.get("a") is not None and seen.pods["a"].metadata.uid == "two")


async def test_the_last_word_wins_whatever_happens(api: KubernetesApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes and faults in any order: what is seen is what there is, soon after the last of them."""
    monkeypatch.setattr(cluster, "MAX_PAUSE_S", 0.02)
    monkeypatch.setattr(cluster, "FIRST_PAUSE_S", 0.01)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    api.page = 2
    api.faults.cut_bytes = rng
    names = [f"p{number}" for number in range(6)]
    here: set[str] = set()

    def change() -> None:
        name = rng.choice(names)
        if name in here and rng.random() < 0.4:
            api.remove("pods", name)
            here.remove(name)
        else:
            here.add(name)
            api.put("pods", pod(name, is_ready=rng.random() < 0.5))

    acts: list[Callable[[], object]] = [change] * 12
    acts += [api.cut, api.forget, api.end_watches]
    acts += [lambda: api.faults.watch_status.append((rng.choice((410, 500, 429)), {}))]
    acts += [lambda: api.faults.list_status.append((rng.choice((410, 500, 503)), {}))]
    acts += [lambda: setattr(api.faults, "is_continue_gone", True)]
    async with reflecting() as seen:
        for _ in range(300):
            rng.choice(acts)()
            await asyncio.sleep(rng.choice((0, 0, 0.002)))
        await until(
            lambda: (
                {name: one.is_ready for name, one in seen.pods.items()}
                == {name: api.get("pods", name)["status"]["conditions"][0]["status"] == "True" for name in here}
            )
        )


def test_ready_is_what_the_helper_says() -> None:
    one = pod("a")
    ready(False)(one)
    assert one["status"]["conditions"][0]["status"] == "False"


GOOD = """\
apiVersion: v1
kind: Config
current-context: it
contexts: [{name: it, context: {cluster: it, user: it, namespace: x}}]
clusters: [{name: it, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: it, user: {}}]
"""


@pytest.mark.parametrize("text", ["", "- a", "hello", "\t{", "contexts:", *(GOOD[:length] for length in (70, 95, 150))])
def test_a_kubeconfig_that_is_none(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever writes the file may be half through when it is read again."""
    path = tmp_path / "broken"
    path.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(ConfigError, match=r"discover: .*KUBECONFIG"):
        own_namespace()
    with pytest.raises(ConfigError, match=r"discover: .*KUBECONFIG"):
        kubernetes_client()


def test_no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="no cluster is configured"):
        own_namespace()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            GOOD.replace("current-context: it", "current-context: gone"),
            "'gone' of .* cannot be used .*'gone' not found",
        ),
        (GOOD.replace("current-context: it", ""), "None of .* cannot be used .*No current context"),
        (GOOD.replace("cluster: it, user", "cluster: y, user"), "'it' of .* cannot be used"),
    ],
)
def test_a_context_that_is_not_there(text: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert text != GOOD
    path = tmp_path / "config"
    path.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(ConfigError, match=rf"discover: the current-context {why}.*; correct it \(kubectl config use"):
        own_namespace()
