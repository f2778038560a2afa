"""Fleets that cannot work are refused at the start, with the field's name and a way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pdproxy.assemble import events_addresses
from pdproxy.config.instances import InstanceSettings
from pdproxy.config.settings import Settings, load
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
        Settings(instances=(P0, D0), port=7500, proxy_port=7500).fleet()


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


def test_ports_of_lmcaches_decoders_count_up_on_one_host() -> None:
    flags = "--engine lmcache --prefill http://p:1 --decode http://a:1,http://b:1,http://a:2"
    settings = load([*flags.split(), "--decoder-init-port", "7300,7310", "--decoder-alloc-port", "7400,7410"])
    decoders = [one for one in settings.fleet() if one.role == "decode"]
    assert [one.receiver_ports for one in decoders] == [(7300, 7310), (7300, 7310), (7301, 7311)]
    assert [one.alloc_ports for one in decoders] == [(7400, 7410), (7400, 7410), (7401, 7411)]


def test_a_model_is_served_by_one_kind_of_engine() -> None:
    one = InstanceSettings(name="p0", role="prefill", url="http://p:1", engine="vllm_nixl", model="m")
    other = InstanceSettings(name="d0", role="decode", url="http://d:1", engine="sglang", model="m")
    with pytest.raises(ConfigError, match="'p0' is vllm_nixl and 'd0' is sglang, and both have the model 'm'"):
        Settings(instances=(one, other)).fleet()


def test_two_models_on_engines_of_two_kinds() -> None:
    fleet = tuple(
        InstanceSettings(
            name=f"{engine}-{role}", role=role, url=f"http://{engine}-{role}:1", engine=engine, model=model
        )
        for engine, model in (("vllm_nixl", "a"), ("sglang", "b"))
        for role in ("prefill", "decode")
    )
    assert Settings(instances=fleet).fleet() == fleet


def test_data_parallel_ranks_share_a_url() -> None:
    ranks = tuple(
        InstanceSettings(name=f"p{rank}", role="prefill", url="http://p:1", engine="vllm_nixl", data_parallel_rank=rank)
        for rank in (0, 1)
    )
    decoder = InstanceSettings(name="d0", role="decode", url="http://d:1", engine="vllm_nixl")
    assert Settings(instances=(*ranks, decoder)).fleet() == (*ranks, decoder)
    twice = ranks[0].model_copy(update={"name": "again"})
    with pytest.raises(ConfigError, match=r"http://p:1 \(data-parallel rank 0\)' is used more than once"):
        Settings(instances=(*ranks, twice, decoder)).fleet()


def test_a_table_stands_for_all_ranks_of_an_engine() -> None:
    whole = InstanceSettings(name="p", role="prefill", url="http://p:1", engine="vllm_nixl", data_parallel_size=3)
    one = InstanceSettings(name="d0", role="decode", url="http://d:1", engine="vllm_nixl", data_parallel_size=1)
    *ranks, decoder = Settings(instances=(whole, one)).fleet()
    assert [(rank.name, rank.place) for rank in ranks] == [(f"p/{i}", ("http://p:1", i)) for i in range(3)]
    assert decoder == one
    third = ranks[2].model_copy(update={"name": "again"})
    with pytest.raises(ConfigError, match=r"http://p:1 \(data-parallel rank 2\)' is used more than once"):
        Settings(instances=(whole, third, one)).fleet()
    with pytest.raises(
        ValueError, match="data_parallel_rank counts from 0, so it must be less than data_parallel_size"
    ):
        InstanceSettings(
            name="p", role="prefill", url="http://p:1", engine="sglang", data_parallel_size=3, data_parallel_rank=3
        )


def test_ranks_of_instances_that_flags_name() -> None:
    flags = ["--prefill", "http://p:1,http://p:2", "--decode", "dns+http://d:1", "--decode-data-parallel-size", "4"]
    settings = load([*flags, "--engine", "vllm_nixl", "--prefill-data-parallel-size", "2"])
    assert [one.name for one in settings.fleet()] == ["prefill-0/0", "prefill-0/1", "prefill-1/0", "prefill-1/1"]
    assert [one.data_parallel_size for one in settings.services()] == [4]
    found = settings.found(InstanceSettings(name="pod", role="decode", url="http://pod:1", engine="vllm_nixl"))
    assert [one.name for one in found.ranks()] == ["pod/0", "pod/1", "pod/2", "pod/3"]
    with pytest.raises(
        ConfigError, match="decode_data_parallel_size is for mooncake and sglang and vllm_nixl, and 'decode-0'"
    ):
        load(["--prefill", "http://p:1", "--decode", "http://d:1", "--decode-data-parallel-size", "2"]).fleet()


def test_one_rank_and_all_ranks_of_an_engine() -> None:
    whole = InstanceSettings(name="p", role="prefill", url="http://p:1/", engine="vllm_nixl")
    second = whole.model_copy(update={"name": "p1", "url": "http://p:1", "data_parallel_rank": 1})
    decoder = InstanceSettings(name="d0", role="decode", url="http://d:1", engine="vllm_nixl")
    with pytest.raises(ConfigError, match=r"data_parallel_rank: 'p' is all ranks of http://p:1/, and another"):
        Settings(instances=(whole, second, decoder)).fleet()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"alloc_ports": (1,)}, "alloc_ports is for lmcache, not for builtin"),
        ({"engine": "lmcache", "bootstrap_port": 1}, "bootstrap_port is for mooncake and sglang, not for lmcache"),
        ({"data_parallel_rank": 0}, "data_parallel_rank is for mooncake and sglang and vllm_nixl, not for builtin"),
    ],
)
def test_fields_of_other_kinds_are_refused(more: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        InstanceSettings(**({"name": "d0", "role": "decode", "url": "http://d:1"} | more))


@pytest.mark.parametrize("flags", [[], ["--engine", "mooncake"]], ids=["file", "flag"])
def test_the_files_engine_is_that_of_the_tables_that_name_none(tmp_path: Path, flags: list[str]) -> None:
    file = tmp_path / "fleet.toml"
    tables = {"p0": ("prefill", ""), "d0": ("decode", ""), "odd": ("decode", 'engine = "sglang"\n')}
    file.write_text(
        'engine = "vllm_nixl"\n'
        + "".join(
            f'[[instances]]\nname = "{name}"\nrole = "{role}"\nurl = "http://{name}:1"\n{more}'
            for name, (role, more) in tables.items()
        )
    )
    kind = flags[1] if flags else "vllm_nixl"
    assert [one.engine for one in load(["--config", str(file), *flags]).instances] == [kind, kind, "sglang"]
    file.write_text(file.read_text().partition("\n")[2])
    assert [one.engine for one in load(["--config", str(file)]).instances] == ["builtin", "builtin", "sglang"]


def test_addresses_of_kv_events() -> None:
    """By the table, each rank at the port after the one before; or by the options, at the host of the url."""
    table = InstanceSettings(
        name="p",
        role="prefill",
        url="http://10.0.0.1:8100",
        engine="vllm_nixl",
        kv_events="tcp://10.0.0.9:5557",
        kv_events_replay="tcp://[fd00::1]:5657",
        data_parallel_size=2,
    )
    assert [rank.events_addresses(1, 2) for rank in table.ranks()] == [
        ("tcp://10.0.0.9:5557", "tcp://[fd00::1]:5657"),
        ("tcp://10.0.0.9:5558", "tcp://[fd00::1]:5658"),
    ]
    for url, host in (("http://10.0.0.1:8100", "10.0.0.1"), ("http://[fd00::2]:8100", "[fd00::2]")):
        flag = InstanceSettings(name="d", role="decode", url=url, engine="vllm_nixl", data_parallel_rank=3)
        assert flag.events_addresses(None, None) is None
        assert flag.events_addresses(5557, None) == (f"tcp://{host}:5560", None)
        assert flag.events_addresses(5557, 5657) == (f"tcp://{host}:5560", f"tcp://{host}:5660")


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1:5557",
        "tcp://*:5557",
        "tcp://10.0.0.1",
        "tcp://10.0.0.1:0",
        "tcp://h:65536",
        "ipc:///x",
        "tcp://a b:1",
        "",
    ],
)
@pytest.mark.parametrize("field", ["kv_events", "kv_events_replay"])
def test_addresses_that_are_none(field: str, address: str) -> None:
    with pytest.raises(ValidationError, match=rf"{field}\n.*is not tcp://HOST:PORT"):
        InstanceSettings.model_validate({"name": "p", "role": "prefill", "url": "http://h:1", field: address})


def test_a_replay_needs_events() -> None:
    with pytest.raises(ValidationError, match="kv_events_replay needs kv_events"):
        InstanceSettings(name="p", role="prefill", url="http://h:1", kv_events_replay="tcp://h:1")
    with pytest.raises(ConfigError, match="kv_events_replay_port: needs kv_events_port"):
        events_addresses(Settings(kv_events_replay_port=5657))
