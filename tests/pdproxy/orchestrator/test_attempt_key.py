"""The key by which decoders know this proxy's attempts: where it comes from, what it signs, and who never sees it."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from pdproxy.assemble import assemble
from pdproxy.config.settings import Settings, load
from pdproxy.engines.adapter import AttemptInfo
from pdproxy.engines.builtin import BuiltinAdapter
from pdproxy.errors import ConfigError
from pdproxy.launch.fleet_plan import FleetPlan, plan_fleet
from pdproxy.launch.keys import with_fresh_keys
from pdproxy.launch.machine import Machine
from pdproxy.launch.options import FleetOptions, Side
from pdproxy.openai.request import COMPLETIONS, parse
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fleet import make_instance
from tests.fakes.proxy_harness import proxy_in_front_of
from transfer.trust import AttemptKey, FleetKey

KEY, OTHER = "0123456789abcdef" * 4, "fedcba9876543210" * 4
PAIR = ["--prefill", "http://p:1", "--decode", "http://d:1"]
REQUEST = parse(COMPLETIONS, b'{"model":"m","prompt":"hi"}')


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PDPROXY_ATTEMPT_KEY", "PDPROXY_ATTEMPT_KEY_FILE", "PDENGINE_FLEET_KEY", "PDENGINE_ATTEMPT_KEY"):
        monkeypatch.delenv(name, raising=False)


def params(adapter: BuiltinAdapter) -> dict[str, object]:
    facts = FakeEngine("decode").known_facts()
    info = AttemptInfo(
        attempt="a1", prefiller=facts, decoder=facts, timeout_s=1.0, notify="tcp://p:7500", prompt_ids=None
    )
    body: dict[str, dict[str, object]] = msgspec.json.decode(adapter.prefill_body(REQUEST, info))
    return body["kv_transfer_params"]


def test_an_attempt_is_signed_with_the_place_of_its_signals() -> None:
    key = AttemptKey.parse(KEY)
    signed = params(BuiltinAdapter(attempt_key=key))
    assert signed["capability"] == key.sign("a1", "tcp://p:7500")
    assert "capability" not in params(BuiltinAdapter())


async def test_every_attempt_has_a_capability_and_nothing_shows_the_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "attempt.key"
    file.write_text(KEY)
    key = AttemptKey.parse(KEY)
    for options in ({"attempt_key_file": file}, {"attempt_key": KEY}):
        async with proxy_in_front_of(**options) as house:
            assert (await house.post()).status == 200
            (sent,) = (call.body["kv_transfer_params"] for call in house.prefiller.generations())
            assert sent["capability"] == key.sign(sent["attempt"], sent["notify"])
            shown = [(await house.get(path)).body.decode() for path in ("/status", "/metrics", "/ui")]
            shown += [repr(house.proxy.settings), repr(house.proxy), str(house.proxy.pool.instances), caplog.text]
            assert not [text for text in shown if KEY in text or sent["capability"] in text]


def test_where_the_key_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(PAIR).attempt_key is None
    monkeypatch.setenv("PDPROXY_ATTEMPT_KEY", KEY)
    assert load(PAIR).attempt_key == KEY
    assert KEY not in repr(load(PAIR))
    monkeypatch.setenv("PDPROXY_ATTEMPT_KEY_FILE", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"attempt_key_file: .*none cannot be read"):
        assemble(load(PAIR))
    monkeypatch.setenv("PDPROXY_ATTEMPT_KEY_FILE", str(tmp_path))
    with pytest.raises(ConfigError, match="Is a directory"):
        assemble(load(PAIR))


@pytest.mark.parametrize("text", ["", "secret", KEY[:-1], f"{KEY[:-1]}x"])
def test_what_is_no_key_is_refused_unseen(text: str, tmp_path: Path) -> None:
    file = tmp_path / "attempt.key"
    file.write_text(text)
    instances = {"prefill": ("http://p:1",), "decode": ("http://d:1",)}
    for name, options in (("attempt_key", {"attempt_key": text}), ("attempt_key_file", {"attempt_key_file": file})):
        with pytest.raises(ConfigError, match=f"{name}: .*64 hexadecimal digits") as error:
            assemble(Settings(**instances, **options))
        assert not text or text not in str(error.value)


def test_a_pair_of_unequal_fleet_keys_is_kept_apart_with_the_reason() -> None:
    """Before any request would wait for a handshake that cannot come about."""

    def fit(ours: str, theirs: str) -> str | None:
        prefiller, decoder = make_instance("p0", "prefill"), make_instance("d0")
        prefiller.heard(FakeEngine("prefill").known_facts(fleet_key=ours))
        decoder.heard(FakeEngine("decode").known_facts(fleet_key=theirs))
        return prefiller.misfit(decoder)

    ours, other = FleetKey.parse(KEY).fingerprint, FleetKey.parse(OTHER).fingerprint
    assert fit(ours, ours) is None
    assert fit("none", "none") is None
    assert fit(ours, "") is None, "an engine that does not say is not held to it"
    assert fit(ours, "none") == f"it does not fit d0: its fleet_key is {ours}, d0's is none"
    assert fit(ours, other) is not None


# ── launches ────────────────────────────────────────────────────────────────────────────────────────────────────────

MACHINE = Machine(cores=(0, 1), gpus=(), environ={})


def launched(environ: dict[str, str] | None = None, **options: object) -> FleetPlan:
    whole = plan_fleet(FleetOptions(num_prefillers=2, num_decoders=2, **options), MACHINE)  # type: ignore[arg-type]
    return with_fresh_keys(whole, environ or {})


def keys_of(plan: FleetPlan) -> dict[str, dict[str, str]]:
    programs = [*(engine.program for engine in plan.engines), plan.proxy]
    return {one.name: {name: value for name, value in one.env.items() if "_KEY" in name} for one in programs}


def test_a_launch_of_builtin_engines_has_keys_of_its_own() -> None:
    """Prefillers have no attempt key, no engine has the proxy's other secrets, and no command line shows any."""
    plan = launched()
    keys = keys_of(plan)
    fleet, attempts = keys["prefill-0"]["PDENGINE_FLEET_KEY"], keys["proxy"]["PDPROXY_ATTEMPT_KEY"]
    for index in range(2):
        assert keys[f"prefill-{index}"] == {"PDENGINE_FLEET_KEY": fleet}
        assert keys[f"decode-{index}"] == {"PDENGINE_FLEET_KEY": fleet, "PDENGINE_ATTEMPT_KEY": attempts}
    assert keys["proxy"] == {"PDPROXY_ATTEMPT_KEY": attempts}
    FleetKey.parse(fleet)
    AttemptKey.parse(attempts)
    words = [word for program in (plan.proxy, *(e.program for e in plan.engines)) for word in program.command]
    assert not {fleet, attempts} & {*words, *plan.files.values()}
    assert keys_of(launched())["proxy"] != keys["proxy"], "each launch has its own"


@pytest.mark.parametrize("where", ["environment", "engine's environment", "command line"])
def test_what_the_user_says_of_a_key_is_left_to_him(where: str) -> None:
    if where == "environment":
        plan = launched({"PDENGINE_FLEET_KEY_FILE": "/k"})
    elif where == "command line":
        plan = launched(engine_args=("--fleet-key-file=/k",))
    else:
        plan = launched(prefill=Side(env={"PDENGINE_FLEET_KEY": KEY}), decode=Side(env={"PDENGINE_FLEET_KEY": KEY}))
    keys = keys_of(plan)
    assert keys["prefill-0"].get("PDENGINE_FLEET_KEY") in (None, KEY)
    assert keys["decode-0"].keys() - {"PDENGINE_FLEET_KEY"} == {"PDENGINE_ATTEMPT_KEY"}, "the other one is fresh"
    assert keys["proxy"].keys() == {"PDPROXY_ATTEMPT_KEY"}


def test_an_attempt_key_of_the_users_is_left_to_him() -> None:
    for plan in (launched({"PDPROXY_ATTEMPT_KEY": KEY}), launched(proxy_args=("--attempt-key-file", "/k"))):
        assert keys_of(plan)["proxy"] == {}
        assert keys_of(plan)["decode-1"].keys() == {"PDENGINE_FLEET_KEY"}


def test_engines_of_other_kinds_have_none(tmp_path: Path) -> None:
    assert not any(keys_of(launched(engine="vllm_nixl", model=tmp_path, device="cpu")).values())
