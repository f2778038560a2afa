"""Engines that have keys, over NIXL: answers and sharing are as without, and who has other keys gets nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")

from tests.fakes.engine_pair import CHUNK, Pair, engine_pairs, new_job
from transfer.dataplane.plane import PlanePush
from transfer.engine.config import EngineSettings
from transfer.errors import PeerLost, ReservationRefused
from transfer.plan.blocks import page_table
from transfer.plan.keys import chunk_keys
from transfer.trust import AttemptKey, FleetKey, new_key, write_key

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


async def test_a_fleet_with_a_key_answers_and_shares_as_without(folder: Path, tmp_path: Path) -> None:
    """The second of two prompts that begin alike is not sent again."""
    file, job = tmp_path / "fleet.key", new_job(5 * CHUNK)
    write_key(file)
    async with engine_pairs() as make:
        pair = await make(folder, prefill={"fleet_key_file": file}, fleet_key_file=file)
        found = FleetKey.find(None, file)
        assert found is not None
        assert {engine.buffer_facts().fleet_key for engine in (pair.prefiller, pair.decoder)} == {found.fingerprint}
        pushed = []
        for _ in range(2):
            assert await pair.answer(job) == pair.expected(job)
            await pair.all_is_back()
            pushed.append(pair.prefiller.statistics()["pushed_bytes"])
        assert pushed[0] == pushed[1] > 0


@pytest.mark.parametrize("prefix_cache", [True, False])
async def test_chunks_have_names_that_only_the_fleet_knows(
    folder: Path, prefix_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, job, seen = new_key(), new_job(2 * CHUNK), []
    async with engine_pairs() as make:
        pair: Pair = await make(folder, prefill={"fleet_key": text, "prefix_cache": prefix_cache}, fleet_key=text)
        plane = pair.prefiller._plane
        assert plane is not None
        begin = plane.open

        def watched(*args: Any, keys: list[bytes], **options: Any) -> PlanePush:
            seen.append(keys)
            return begin(*args, keys=keys, **options)

        monkeypatch.setattr(plane, "open", watched)
        assert await pair.answer(job) == pair.expected(job)
        table = page_table(pair.prefiller._runner.layout.kv.groups, len(job.prompt_token_ids), CHUNK)
        secret = FleetKey.parse(text).chunk_secret
        assert seen == [chunk_keys(job.prompt_token_ids, table, secret=secret)]
        assert not {*seen[0]} & {*chunk_keys(job.prompt_token_ids, table)}


async def test_engines_of_different_fleets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.roles.session.HANDSHAKE_TIMEOUT_S", 0.5)
    async with engine_pairs() as make:
        pair: Pair = await make(folder, prefill={"fleet_key": new_key()})
        assert pair.decoder.buffer_facts().fleet_key == "none"
        with pytest.raises(PeerLost, match="this side has a fleet key, the receiver perhaps none"):
            await pair.prefill(new_job(5))


async def test_a_decoder_takes_attempts_of_its_proxy_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, job = new_key(), new_job(9)
    async with engine_pairs() as make:
        pair: Pair = await make(folder, attempt_key=text)
        with pytest.raises(ReservationRefused, match="attempt key"):
            await pair.prefill(job)
        monkeypatch.setattr("tests.fakes.engine_pair.wire.PushParams", signing(AttemptKey.parse(text)))
        assert await pair.answer(job) == pair.expected(job)


def signing(key: AttemptKey) -> Callable[..., Any]:
    """What a proxy with this key sends."""
    from transfer.wire import PushParams

    def params(**fields: Any) -> PushParams:
        return PushParams(**fields, capability=key.sign(fields["attempt"], fields["notify"]))

    return params


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fleet_key": "secret-but-short"}, "no fleet key: 64 hexadecimal digits"),
        ({"attempt_key": "secret-but-short"}, "no attempt key: 64 hexadecimal digits"),
        ({"fleet_key_file": Path("/nowhere/fleet.key")}, "/nowhere/fleet.key cannot be read"),
        ({"notify_hosts": "proxy.local, tcp://x:1"}, "'tcp://x:1' is no host"),
    ],
)
def test_options_that_are_wrong_are_refused_at_the_start(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        EngineSettings(role="decode", model=Path("m"), **options)
    (told,) = error.value.errors()
    assert message in told["msg"], "all that a command line is told"
    assert "secret-but-short" not in told["msg"]


def test_keys_come_from_files_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    text = new_key()
    monkeypatch.setenv("PDENGINE_FLEET_KEY", text)
    settings = EngineSettings(role="decode", model=Path("m"), notify_hosts=" proxy.local:7500 ,10.0.0.0/8,")
    assert settings.fleet is not None
    assert settings.fleet.fingerprint == FleetKey.parse(text).fingerprint
    assert settings.attempts is None
    assert settings.proxies == ("proxy.local:7500", "10.0.0.0/8")
    assert text not in repr(settings)
