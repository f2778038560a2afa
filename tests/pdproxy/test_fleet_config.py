"""Fleets that cannot work are refused at the start, with the field's name and a way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdproxy.config import Settings, load
from pdproxy.errors import ConfigError
from tests.fakes.fleet import settings

P0, D0 = settings("p0", "prefill"), settings("d0")


@pytest.mark.parametrize(
    ("fleet", "field", "way_out"),
    [
        (
            (P0, D0, settings("d0", url="http://x:1")),
            "instances.name: the name 'd0'",
            "give each instance one of its own",
        ),
        ((P0, D0, settings("d1", url="http://d0:1/")), "instances.url: the url 'http://d0:1'", "one of its own"),
        (
            (settings("p0", "prefill", model="small"), settings("d0", model="large")),
            "instances.model: 'p0' (prefill) has 'small' on builtin, and the others 'large' on builtin ('d0', decode)",
            "only on the same model",
        ),
        (
            (settings("p0", "prefill", chunk_size=16), settings("d0", chunk_size=256)),
            "instances.chunk_size: 'p0' (prefill) has 16 and 'd0' (decode) has 256",
            "the same tokens per page",
        ),
    ],
)
def test_fleets_that_do_not_fit_together(fleet: tuple[object, ...], field: str, way_out: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(instances=fleet).fleet()
    assert field in str(caught.value)
    assert way_out in str(caught.value)


def test_an_instance_and_the_option_cut_differently() -> None:
    fleet = (P0, settings("d0", chunk_size=16))
    Settings(instances=fleet).fleet()
    with pytest.raises(ConfigError, match=r"instances.chunk_size: 'd0' has 16, and the option chunk_size is 256"):
        Settings(instances=fleet, chunk_size=256).fleet()


def test_two_models_side_by_side_may_be_cut_differently() -> None:
    Settings(
        instances=tuple(
            settings(f"{role[0]}-{model}", role, model=model, chunk_size=chunk_size)  # type: ignore[arg-type]
            for model, chunk_size in (("small", 16), ("large", 256))
            for role in ("prefill", "decode")
        )
    ).fleet()


def test_a_clash_of_ports_has_a_way_out() -> None:
    with pytest.raises(ConfigError, match=r"port and proxy_port: both use port 7500 on .*; give one of them another"):
        Settings(instances=(P0, D0), port=7500).fleet()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("decode-polcy = 'round_robin'", "decode_polcy: there is no such option; did you mean decode_policy?"),
        ("qqqqqq = 3", "qqqqqq: there is no such option; pdproxy serve --help lists those there are"),
        (
            "[[instances]]\nname='a'\nrole='decode'\nurl='http://a:1'\nchunksize=3",
            "instances.0.chunksize: there is no such option; did you mean chunk_size?",
        ),
        (
            "[[instances]]\nname='a'\nrole='decode'\nurl='http://a:1'\nqqqqqq=3",
            "instances.0.qqqqqq: there is no such option; there are name, role, url",
        ),
        ("decode-policy = 'least_queued_tokens'", "decode_policy: "),
        ("breaker-faults = 0", "breaker_faults: "),
        ("watch-interval-s = 0.1", "watch_interval_s: "),
    ],
)
def test_keys_nobody_knows_and_values_that_cannot_be(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "proxy.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(["--config", str(path)])
    assert says in str(caught.value)


def test_the_admin_key_is_not_shown() -> None:
    assert "secret" not in repr(load(["--admin-key", "secret"]))
