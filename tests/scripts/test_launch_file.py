"""A fleet that a file describes: what of it would be started, and every reason not to; no process runs here."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pdproxy.cli import app as pdproxy
from pdproxy.config.instances import InstanceSettings
from pdproxy.config.settings import load
from pdproxy.config.values import Engine
from pdproxy.errors import ConfigError
from pdproxy.launch import command
from pdproxy.launch.agreement import check_all_agree
from pdproxy.launch.errors import PreflightError
from pdproxy.launch.file_plan import plan_file
from pdproxy.launch.fleet import check_file
from pdproxy.launch.fleet_plan import FleetPlan
from pdproxy.launch.kinds import KINDS
from pdproxy.launch.kinds.base import EnginePlan
from pdproxy.launch.machine import Machine
from pdproxy.launch.options import RunOptions
from pdproxy.launch.restarts import NEVER, RestartPolicy
from transfer.roles.allowed_hosts import AllowedHosts

MACHINE = Machine(cores=(0, 1), gpus=("0", "1"), environ={})
MIXED = """
port = 9200
chunk_size = 64
pd_buffer_size = "1MiB"

[[instances]]
name = "reader"
role = "prefill"
url = "http://127.0.0.1:7100"
launch = true

[[instances]]
name = "near"
role = "decode"
url = "http://127.0.0.1:7200"
receiver_ports = [7333]
launch = { args = "--threads 2 --no-windowed", env = { A = "b" }, dtype = "float32" }

[[instances]]
name = "far"
role = "decode"
url = "http://10.0.0.2:7200"
"""

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """The file's path; MODEL in it is a model's folder."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "llama"
    model.mkdir()
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    (model / "config.json").write_text(json.dumps({"model_type": "none-such", "dtype": "float32", **config}))

    def write(text: str) -> Path:
        path = tmp_path / "fleet.toml"
        path.write_text(text.replace("MODEL", str(model)))
        return path

    return write


def plan(path: Path, **options: Any) -> FleetPlan:
    return plan_file(path, RunOptions(), MACHINE, **options)


def fault(path: Path, **options: Any) -> str:
    """The one line with which a launch is refused, less the file's name."""
    with pytest.raises(PreflightError) as caught:
        check_file(plan(path, **options), path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


def line(engine: EnginePlan) -> str:
    return " ".join(engine.program.command[1:])


class TestMixed:
    def test_only_those_with_launch_are_started(self, write: Write) -> None:
        whole = plan(write(MIXED))
        assert whole.names == ("reader", "near", "proxy")
        assert whole.instances == ("reader", "near")
        assert whole.what == "1 prefiller, 1 decoder and the proxy"

    def test_each_is_where_its_url_says_and_as_its_table_says(self, write: Write) -> None:
        reader, near = plan(write(MIXED)).engines
        assert line(reader) == (
            "-m transfer.engine --role prefill --port 7100 --model .demo/tiny-model --served-model-name tiny-model "
            "--host 127.0.0.1 --device cpu --chunk-size 64"
        )
        assert line(near) == (
            "-m transfer.engine --role decode --port 7200 --model .demo/tiny-model --served-model-name tiny-model "
            "--host 127.0.0.1 --device cpu --receiver-port 7333 --pd-buffer-size 1048576 --chunk-size 64 "
            "--dtype float32 --threads 2 --no-windowed"
        )
        assert near.program.env["A"] == "b"
        assert "A" not in reader.program.env
        assert near.program.ready_url == "http://127.0.0.1:7200/health"

    @pytest.mark.parametrize(
        ("top", "told"),
        [
            ("", "127.0.0.1"),
            ('proxy_host = "10.0.0.9"', "10.0.0.9"),
            ('proxy_host = "10.0.0.9"\nproxy_port = 7500', "10.0.0.9:7500"),
            ('proxy_host = "0.0.0.0"\nnotify_host = "proxy.local"\nnotify_port = 7501', "proxy.local:7501"),
            ('proxy_host = "fd00::9"', "[fd00::9]"),
        ],
    )
    def test_a_decoder_may_signal_to_where_the_proxy_listens(self, write: Write, top: str, told: str) -> None:
        """Though that be another address than its own; unless its table says otherwise."""
        reader, near = plan(write(f"{top}\n{MIXED}")).engines
        assert "PDENGINE_NOTIFY_HOSTS" not in reader.program.env
        assert near.program.env["PDENGINE_NOTIFY_HOSTS"] == told
        AllowedHosts([told])
        own = write(f"{top}\n{MIXED}".replace('A = "b"', 'PDENGINE_NOTIFY_HOSTS = "b"'))
        assert plan(own).engines[1].program.env["PDENGINE_NOTIFY_HOSTS"] == "b"

    def test_the_proxy_is_given_the_file_itself(self, write: Write) -> None:
        path = write(MIXED)
        whole = plan(path, proxy_args=("--retries", "3"))
        assert " ".join(whole.proxy.command[1:]) == (
            f"-m pdproxy serve --config {path} --drain-grace-s 0 --model .demo/tiny-model --retries 3"
        )
        assert whole.proxy.ready_url == "http://127.0.0.1:9200/ready"
        assert whole.drain_s == 30
        assert plan(path, proxy_args=("--drain-timeout-s", "3")).drain_s == 3
        patient = plan(write(f"drain_grace_s = 7\n{MIXED}"))
        assert patient.drain_s == 37
        assert "--drain-grace-s" not in patient.proxy.command
        assert whole.url == "http://127.0.0.1:9200"

    def test_the_proxy_alone_takes_the_same_file(self, write: Write) -> None:
        fleet = load(["--config", str(write(MIXED))]).fleet()
        assert [(one.name, one.launch is not None) for one in fleet] == [
            ("reader", True),
            ("near", True),
            ("far", False),
        ]

    def test_every_port_is_looked_at_and_named_by_its_field(self, write: Write) -> None:
        assert [(use.port, use.option) for use in plan(write("proxy_port = 7500\n" + MIXED)).ports] == [
            (9200, "the file's port"),
            (7500, "the file's proxy_port"),
            (7100, "reader's url"),
            (7200, "near's url"),
            (7333, "near's receiver_ports"),
        ]

    def test_a_tiny_model_is_made_only_where_an_engine_wants_one(self, write: Write) -> None:
        assert plan(write(MIXED)).tiny_model == Path(".demo/tiny-model")
        named = plan(write('model = "MODEL"\n' + MIXED))
        assert named.tiny_model is None
        assert "--served-model-name llama" in line(named.engines[0])
        assert "--model" not in named.proxy.command
        nobody = plan(write(MIXED.replace("launch =", "model = 'm'  #")))
        assert (nobody.engines, nobody.tiny_model) == ((), None)

    def test_a_model_of_several(self, write: Write) -> None:
        tables = MIXED[MIXED.index("[[") :].replace("role = ", 'model = "small"\nrole = ')
        whole = plan(write(f'[[models]]\nname = "small"\npath = "MODEL"\n{tables}'))
        assert "llama --served-model-name small" in line(whole.engines[0])
        assert [needs.model is None for needs in whole.needs] == [False, False]

    def test_https_and_everywhere(self, write: Write) -> None:
        whole = plan(write('host = "0.0.0.0"\nssl_certfile = "c.pem"\n' + MIXED))
        assert whole.url == "https://127.0.0.1:9200"
        assert whole.ports[0].host == "0.0.0.0"


class TestOtherKinds:
    def two(self, engine: Engine, prefill: str = "", decode: str = "", top: str = "", launch: str = "true") -> str:
        return f"""
model = "MODEL"
{top}
[[instances]]
name = "p"
role = "prefill"
url = "http://127.0.0.1:7100"
engine = "{engine}"
launch = {launch}
{prefill}
[[instances]]
name = "d"
role = "decode"
url = "http://127.0.0.1:7200"
engine = "{engine}"
launch = {launch}
{decode}
"""

    def test_vllm(self, write: Write) -> None:
        launch = '{ device = "cpu", dtype = "float32", args = "--max-model-len 512" }'
        prefiller, decoder = plan(write(self.two("vllm_nixl", launch=launch)), python=Path("/venv/python")).engines
        assert prefiller.program.command[0] == "/venv/python"
        assert prefiller.program.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"
        assert decoder.program.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5601"
        assert line(decoder).endswith("--dtype float32 --max-model-len 512")

    def test_what_the_file_does_not_tell_the_proxy_of_lmcache(self, write: Write) -> None:
        both = "{ gpus = [0] }"
        text = self.two("lmcache", decode="receiver_ports = [7300]\nalloc_ports = [7400]", launch=both)
        assert plan(write(text)).proxy.command[8:] == (
            *("--first-token", "auto", "--pd-buffer-size", "2GiB", "--chunk-size", "256", "--tp-size", "1"),
        )
        said = text.replace("[[", 'first_token = "decoder"\npd_buffer_size = "1GiB"\n[[', 1)
        whole = plan(write(said))
        assert whole.proxy.command[8:] == ("--chunk-size", "256", "--tp-size", "1")
        assert "pd_proxy_port: 7500" in whole.files["p.yaml"]
        assert "skip_last_n_tokens" not in line(whole.engines[1])

    def test_ports_that_only_the_file_can_name(self, write: Write) -> None:
        message = fault(write(self.two("lmcache", launch="{ gpus = 0 }")))
        assert message == ("instance 'd': receiver_ports is [], and of what is started here it would be [7301]")

    def test_mooncake_and_sglang(self, write: Write) -> None:
        text = self.two("sglang", launch='{ gpus = ["0"] }', prefill="bootstrap_port = 9000")
        prefiller, decoder = plan(write(text)).engines
        assert "--disaggregation-bootstrap-port 9000 --dist-init-addr 127.0.0.1:25000" in line(prefiller)
        assert "--dist-init-addr 127.0.0.1:25008" in line(decoder)
        (prefiller, _) = plan(write(self.two("mooncake", launch='{ device = "cpu" }'))).engines
        assert prefiller.program.env["VLLM_MOONCAKE_BOOTSTRAP_PORT"] == "8998"

    @pytest.mark.parametrize("engine", [engine for engine in KINDS if engine != "builtin"])
    def test_gpus_are_named_one_by_one(self, write: Write, engine: Engine) -> None:
        message = fault(write(self.two(engine)))
        assert message == "instance 'p': launch.gpus names 0 GPUs, and it computes on 1"


class TestRefused:
    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            ("launch = true", "launch = { args = '--port 3' }", "instance 'reader': launch.args: --port is for the la"),
            ("launch = true", "launch = { args = '\"' }", "instances.0.launch.args: No closing quotation"),
            ("launch = true", "launch = { argz = 3 }", "instances.0.launch.argz: there is no such option; did"),
            ("http://127.0.0.1:7100", "https://127.0.0.1:7100", "'reader': url 'https://127.0.0.1:7100' is not"),
            ("http://127.0.0.1:7100", "http://127.0.0.1", "instance 'reader': url 'http://127.0.0.1' is not"),
            ("http://127.0.0.1:7100", "http://0.0.0.0:7100", "url 'http://0.0.0.0:7100' is not"),
            ("http://127.0.0.1:7100", "http://127.0.0.1:71000", "'http://127.0.0.1:71000' of 'reader' is not"),
            ('"reader"', '"proxy"', "instance 'proxy': its log has its name"),
            ('"reader"', '"../x"', "instance '../x': its log has its name"),
            ("port = 9200", "port = 0", "port is 0, any free one"),
            ("launch = true", "launch = { dtype = 'float16' }", "is float16 for 'reader' and float32 for 'near'"),
            ("launch = true", "chunk_size = 32\nlaunch = true", "instances.chunk_size: "),
            ('"1MiB"', '"1KiB"', "smaller than one page"),
        ],
    )  # fmt: skip
    def test_what_cannot_be(self, write: Write, old: str, new: str, message: str) -> None:
        text = 'model = "MODEL"\n' + MIXED
        if "dtype" not in new:
            text = text.replace(', dtype = "float32"', "")
        assert message in fault(write(text.replace(old, new)))

    def test_no_file(self, tmp_path: Path) -> None:
        assert fault(tmp_path / "none.toml").startswith("config: ")

    def test_those_that_would_not_understand_one_another(self, write: Write) -> None:
        """Also where they have one role."""
        text = MIXED.replace('http://10.0.0.2:7200"', "http://127.0.0.1:7201\"\nlaunch = { dtype = 'float64' }")
        with pytest.raises(PreflightError, match="--dtype is auto for 'reader' and float32 for 'near'"):
            check_all_agree(plan(write(text)).engines)
        alike = text.replace("launch = true", "launch = { dtype = 'float32' }")
        with pytest.raises(PreflightError, match="--dtype is float32 for 'reader' and float64 for 'far'"):
            check_all_agree(plan(write(alike)).engines)


class TestLaunchTable:
    def one(self, launch: str) -> InstanceSettings:
        text = f'name = "a"\nrole = "decode"\nurl = "http://a:1"\nlaunch = {launch}'
        return InstanceSettings.model_validate(tomllib.loads(text))

    def test_words_lists_and_numbers(self) -> None:
        launch = self.one("{ args = ['--x', 'a b'], gpus = [0, 1] }").launch
        assert launch is not None
        assert (launch.args, launch.gpus) == (("--x", "a b"), ("0", "1"))
        for gpus in ("'0, 1'", '["0", "1"]'):
            assert self.one(f"{{ gpus = {gpus} }}").launch == self.one("{ gpus = [0, 1] }").launch
        three = self.one("{ gpus = 3 }").launch
        assert three is not None
        assert three.gpus == ("3",)

    def test_true_is_a_table_of_defaults_and_false_is_none(self) -> None:
        assert self.one("true") == self.one("{}")
        assert self.one("false").launch is None

    def test_the_message_for_a_key_nobody_knows_lists_those_of_the_table(self, tmp_path: Path) -> None:
        path = tmp_path / "f.toml"
        path.write_text('[[instances]]\nname="a"\nrole="decode"\nurl="http://a:1"\nlaunch={ qqqqqq = 1 }\n')
        with pytest.raises(ConfigError, match=r"instances\.0\.launch\.qqqqqq: .*there are args, env, python"):
            load(["--config", str(path)])


class TestCommandLine:
    @pytest.fixture
    def seen(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
        seen: list[tuple[Any, ...]] = []

        async def launch(options: Any, words: list[str], console: object) -> int:
            seen.append((options, words))
            return 0

        async def launch_file(path: Path, run: RunOptions, words: list[str], console: object, **more: Any) -> int:
            seen.append((path, run, words, more))
            return 0

        monkeypatch.setattr("pdproxy.launch.command.launch", launch)
        monkeypatch.setattr("pdproxy.launch.command.launch_file", launch_file)
        monkeypatch.setattr("signal.signal", lambda *_: None)
        return seen

    def test_pdproxy_up_hands_everything_on(self, seen: list[tuple[Any, ...]]) -> None:
        result = CliRunner().invoke(pdproxy, ["up", "--decoders", "3", "--once", "--", "true", "--now", "--", "x"])
        assert result.exit_code == 0, result.output
        ((options, words),) = seen
        assert (options.num_decoders, options.is_once, words) == (3, True, ["true", "--now", "--", "x"])
        assert options.restarts == NEVER

    def test_a_file_and_how_it_is_run(self, seen: list[tuple[Any, ...]]) -> None:
        words = ["fleet.toml", "--restart", "on-failure", "--restart-limit", "9", "--timeout", "7", "--log-dir", "logs"]
        words += ["--python", "/p", "--proxy-args", "--retries 3", "--", "true"]
        result = CliRunner().invoke(command.app, words)
        assert result.exit_code == 0, result.output
        ((path, run, words, more),) = seen
        assert (path, words) == (Path("fleet.toml"), ["true"])
        assert run == RunOptions(timeout_s=7, log_dir=Path("logs"), restarts=RestartPolicy(limit=9))
        assert more == {"python": Path("/p"), "proxy_args": ("--retries", "3")}

    @pytest.mark.parametrize("where", [(), ("fleet.toml",)])
    def test_the_proxys_processes_are_the_proxys_to_count(self, seen: list[tuple[Any, ...]], where: tuple[str]) -> None:
        result = CliRunner().invoke(command.app, [*where, "--workers", "2", "--proxy-args", "--retries 3"])
        assert result.exit_code == 0, result.output
        told = seen[0][-1]["proxy_args"] if where else seen[0][0].proxy_args
        assert told == ("--workers", "2", "--retries", "3")

    @pytest.mark.usefixtures("seen")
    def test_a_number_of_processes_that_is_none_is_named(self) -> None:
        result = CliRunner().invoke(command.app, ["--workers", "few"])
        assert result.exit_code == 1
        assert result.output.startswith("launch: --workers: ")

    @pytest.mark.usefixtures("seen")
    def test_help_is_that_of_the_launcher(self) -> None:
        result = CliRunner().invoke(pdproxy, ["up", "--help"], env={"COLUMNS": "160"})
        assert result.exit_code == 0
        assert "usage: pdproxy up [options] [file] [-- command...]" in result.output.lower()
        assert "--restart-limit" in result.output

    @pytest.mark.parametrize("words", [["--prefillers", "2"], ["--model", "/m"], ["--prefill-args", "-x"]])
    def test_two_may_not_say_which_engines_there_are(self, seen: list[tuple[Any, ...]], words: list[str]) -> None:
        result = CliRunner().invoke(command.app, ["fleet.toml", *words], env={"COLUMNS": "300"})
        assert result.exit_code == 1
        assert result.output == f"launch: {words[0]}: fleet.toml says which engines there are; say it there\n"
        assert seen == []


def test_a_start_has_longer_where_many_share_few_cores(tmp_path: Path) -> None:
    from pdproxy.launch.fleet_plan import plan_fleet
    from pdproxy.launch.options import FleetOptions

    def timeout_s(count: int, cores: int) -> float:
        machine = Machine(cores=tuple(range(cores)), gpus=(), environ={})
        return plan_fleet(FleetOptions(num_prefillers=count, num_decoders=count), machine).timeout_s

    assert (timeout_s(1, 1), timeout_s(1, 64), timeout_s(8, 64)) == (180, 180, 180)
    assert (timeout_s(8, 2), timeout_s(8, 8)) == (4 * 180, 180)


def test_the_interpreter_of_the_launcher_runs_the_proxy(write: Write) -> None:
    assert plan(write(MIXED)).proxy.command[0] == sys.executable
