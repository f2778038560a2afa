"""One definition of each option: where values come from, which one wins, and how mistakes are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdproxy.config.lmcache_flags import pair_hosts_and_ports
from pdproxy.config.settings import load, unknown_variables
from pdproxy.errors import ConfigError

PAIR = ["--prefill", "http://p:1", "--decode", "http://d:1"]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("PDPROXY_")]:
        monkeypatch.delenv(name)


def file(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "proxy.toml"
    path.write_text(text)
    return ["--config", str(path)]


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = file(tmp_path, "port = 1\nretries = 2\nmax-queue = 3\n")
    assert load(config).chunk_size == 256
    assert (load(config).port, load(config).retries, load(config).max_queue) == (1, 2, 3)
    monkeypatch.setenv("PDPROXY_PORT", "10")
    monkeypatch.setenv("PDPROXY_RETRIES", "20")
    assert (load(config).port, load(config).retries, load(config).max_queue) == (10, 20, 3)
    settings = load([*config, "--port", "100"])
    assert (settings.port, settings.retries, settings.max_queue) == (100, 20, 3)


def test_file_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDPROXY_CONFIG", file(tmp_path, "port = 77")[1])
    assert load().port == 77


def test_lists_sizes_and_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(["--prefill", "http://a:1, http://b:1", "--pd-buffer-size", "2GiB", "--no-admission"])
    assert settings.prefill == ("http://a:1", "http://b:1")
    assert settings.pd_buffer_size == 2 << 30
    assert not settings.admission
    monkeypatch.setenv("PDPROXY_DECODER_PORT", "1,2")
    monkeypatch.setenv("PDPROXY_ADMISSION", "false")
    assert load().decoder_port == (1, 2)
    assert not load().admission


def test_instances_in_the_file(tmp_path: Path) -> None:
    text = """
    prefill = ["http://p:1"]
    [[instances]]
    name = "big"
    role = "decode"
    url = "http://d:1"
    receiver_ports = [7300, 7301]
    """
    fleet = load(file(tmp_path, text)).fleet()
    assert [(i.name, i.role, i.engine) for i in fleet] == [
        ("big", "decode", "builtin"),
        ("prefill-0", "prefill", "builtin"),
    ]
    assert fleet[0].receiver_ports == (7300, 7301)


@pytest.mark.parametrize(
    ("hosts", "ports", "count", "pairs"),
    [
        ((), (1,), 3, []),
        (("h",), (1,), 1, [("h", 1)]),
        (("h",), (1,), 3, [("h", 1), ("h", 2), ("h", 3)]),
        (("h",), (1, 5), 1, [("h", 1), ("h", 5)]),
        (("h", "i"), (1,), 1, [("h", 1), ("i", 1)]),
        (("h", "i"), (1, 2), 1, [("h", 1), ("i", 2)]),
    ],
)
def test_the_reference_proxys_pairing(
    hosts: tuple[str, ...], ports: tuple[int, ...], count: int, pairs: list[tuple[str, int]]
) -> None:
    assert pair_hosts_and_ports("decoder", hosts, ports, count) == pairs


def test_the_reference_proxys_flags() -> None:
    flags = "--host localhost --port 9100 --prefiller-host localhost --prefiller-port 7100 --num-prefillers 2"
    flags += " --decoder-host localhost --decoder-port 7200 --decoder-init-port 7300,7310 --decoder-alloc-port 7400"
    flags += " --num-decoders 2 --proxy-host localhost --proxy-port 7500 --pd-buffer-size 2147483648 --chunk-size 256"
    settings = load(flags.split())
    fleet = settings.fleet()
    assert [(i.name, i.url) for i in fleet] == [
        ("prefiller-0", "http://localhost:7100"),
        ("prefiller-1", "http://localhost:7101"),
        ("decoder-0", "http://localhost:7200"),
        ("decoder-1", "http://localhost:7201"),
    ]
    assert [i.receiver_ports for i in fleet[2:]] == [(7300, 7310), (7301, 7311)]
    assert settings.notify_address == "localhost"


def test_ports_repeat_on_hosts_of_their_own() -> None:
    flags = "--prefill http://p:1 --decoder-host a,b --decoder-port 7200 --decoder-init-port 7300"
    assert [i.receiver_ports for i in load(flags.split()).fleet()[1:]] == [(7300,), (7300,)]


def test_only_ports_means_this_host() -> None:
    fleet = load(["--prefiller-port", "7100", "--decoder-port", "7200"]).fleet()
    assert [i.url for i in fleet] == ["http://localhost:7100", "http://localhost:7200"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--no-such-flag", "1"], "no-such-flag"),
        (["--port", "many"], "port: "),
        (["--port", "70000"], "port: "),
        (["--retries", "-1"], "retries: "),
        (["--slot-timeout-s", "0"], "slot_timeout_s: "),
        (["--oversized", "maybe"], "oversized: "),
        (["--pd-buffer-size", "2 elephants"], "pd_buffer_size: '2 elephants' is not a size"),
        (["--config", "/no/such/file"], "config: /no/such/file cannot be read"),
    ],
)
def test_mistakes_name_the_option(flags: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(flags)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot = 3", "prot: there is no such option"),
        ("port = [", "not valid TOML"),
        ('[[instances]]\nname = "a"\nrole = "both"\nurl = "http://x:1"', "instances.0.role"),
        (
            '[[instances]]\nname = "a"\nrole = "decode"\nurl = "http://x:1"\nfoo = 1',
            "instances.0.foo: there is no such",
        ),
    ],
)
def test_mistakes_in_the_file_name_the_option(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(file(tmp_path, text))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "no prefill instance"),
        (["--prefill", "http://p:1"], "no decode instance"),
        (["--prefill", "http://p:1,http://p:1/", "--decode", "http://d:1"], "url 'http://p:1' is used more than once"),
        (["--prefill", "p:1", "--decode", "http://d:1"], "is not http://host:port"),
        (["--prefill", "http://p:71000", "--decode", "http://d:1"], "is not http://host:port"),
        (["--prefill", "http://p:1", "--decode", "http://[d:1"], "is not http://host:port"),
        ([*PAIR, "--engine", "lmcache", "--port", "7500"], "port and proxy_port: both use port 7500"),
        (["--prefill", "http://localhost:9100", "--decode", "http://d:1"], "both use port 9100"),
        (["--decoder-host", "a,b", "--decoder-port", "1,2,3", "--prefill", "http://p:1"], "2 hosts and 3 ports"),
        (
            [*PAIR[:2], "--decoder-port", "1", "--decoder-init-port", "7", "--decoder-alloc-port", "7"],
            "both use port 7 on localhost",
        ),
    ],
)
def test_fleets_that_cannot_be(flags: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(flags).fleet()
    assert says in str(caught.value)


def test_two_instances_of_one_name(tmp_path: Path) -> None:
    table = '[[instances]]\nname = "a"\nrole = "{}"\nurl = "http://{}:1"\n'
    text = table.format("decode", "x") + table.format("prefill", "y")
    with pytest.raises(ConfigError, match="name 'a' is used more than once"):
        load(file(tmp_path, text)).fleet()


def test_decoders_need_an_address_to_send_to() -> None:
    with pytest.raises(ConfigError, match="notify_host"):
        _ = load(["--proxy-host", "0.0.0.0"]).notify_address
    assert load(["--proxy-host", "0.0.0.0", "--notify-host", "proxy.local"]).notify_address == "proxy.local"


def test_keys_are_not_shown() -> None:
    assert "secret" not in repr(load(["--api-keys", "secret"]))


def test_an_option_that_is_nearly_one_is_named() -> None:
    with pytest.raises(ConfigError, match=r"unrecognized arguments: --prot=9 .*did you mean --port"):
        load(["--prot=9"])
    with pytest.raises(ConfigError, match=r"unrecognized arguments: --qqqqqqqq$"):
        load(["--qqqqqqqq"])


def test_a_variable_that_is_no_option_is_told() -> None:
    kubernetes = {"PDPROXY_SERVICE_HOST": "10.0.0.1", "PDPROXY_PORT_9100_TCP_ADDR": "10.0.0.1"}
    right = {"PDPROXY_MAX_QUEUE": "1", "pdproxy_host": "h", "PDPROXY_URL": "http://h:1", "OTHER": "1"}
    assert unknown_variables(right | kubernetes) == []
    assert unknown_variables(right | {"PDPROXY_MAX_QEUE": "1", "PDPROXY_FROBNICATE": "1"}) == [
        f"{wrong} is in the environment, and there is no such option; {way_out}"
        for wrong, way_out in (
            ("PDPROXY_FROBNICATE", "pdproxy serve --help lists those there are"),
            ("PDPROXY_MAX_QEUE", "did you mean PDPROXY_MAX_QUEUE?"),
        )
    ]


def test_keys_from_a_file_with_one_per_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes gives a Secret's file as it is, with its line breaks."""
    monkeypatch.setenv("PDPROXY_API_KEYS", "one\ntwo\r\n three ,four\n\n")
    monkeypatch.setenv("PDPROXY_ADMIN_KEY", "operator\n")
    monkeypatch.setenv("PDPROXY_ENGINE_API_KEY", " theirs\r\n")
    settings = load(PAIR)
    assert settings.api_keys == ("one", "two", "three", "four")
    assert (settings.admin_key, settings.engine_api_key) == ("operator", "theirs")


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("api_keys", "one\nsecret key", "key 2 of 2: a blank or a control character is within the key"),
        ("api_keys", "secret\x00key", "key 1 of 1: a blank or a control character is within the key"),
        ("api_keys", "secret\tkey", "and comments, names and limits go into api_keys_file"),
        ("admin_key", "secret\nkey", "a blank or a control character is within the key; give a key without them"),
        ("admin_key", " \n", "the key is empty; give one, or leave the option out"),
        ("engine_api_key", "secret key", "a blank or a control character is within the key"),
        ("engine_api_key", "secret-schlüssel", "the key has characters beyond ASCII; give a key without them"),
        ("engine_api_key", "", "the key is empty"),
    ],
)
def test_keys_that_no_client_could_show(tmp_path: Path, name: str, given: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([*PAIR, f"--{name.replace('_', '-')}", given])
    assert str(caught.value).startswith(f"{name}: ")
    assert says in str(caught.value)
    assert "secret" not in str(caught.value)
