"""The module plans the engines that a file describes: each is planned as a fleet of one engine, by the options that
follow from its table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from pdproxy.config.instances import InstanceSettings, LaunchSettings
from pdproxy.config.settings import Settings
from pdproxy.launch.errors import PreflightError
from pdproxy.launch.fleet_plan import PROXY, Needs
from pdproxy.launch.kinds import KINDS
from pdproxy.launch.kinds.base import EnginePlan, Seat
from pdproxy.launch.lmcache_file import read_lmcache_file
from pdproxy.launch.machine import Machine
from pdproxy.launch.options import EVERYWHERE, FleetOptions, RunOptions, Side
from pdproxy.launch.preflight import is_builtin_device

USUAL = FleetOptions()
FIELDS = {
    "--prefill-port": "url",
    "--decode-port": "url",
    "--receiver-port": "receiver_ports",
    "--alloc-port": "alloc_ports",
    "--bootstrap-port": "bootstrap_port",
    "--kv-port": "kv_port",
    "--side-channel-port": "launch.side_channel_port",
    "--dist-port": "launch.dist_port",
}
"""The field of the file that says the same as an option, for each of these options."""
SAYS_ITSELF = frozenset({"builtin", "vllm_transfer"})
"""The kinds of engines which tell the proxy what it has to know of their buffers."""
RESERVED = frozenset({PROXY, "command", "tiny"})


class FileEngines:
    """FileEngines are the engines of one file that are started here. The object never changes. What is wrong in
    the file raises `PreflightError`."""

    def __init__(
        self,
        settings: Settings,
        local: Sequence[InstanceSettings],
        run: RunOptions,
        python: Path | None,
        machine: Machine,
    ) -> None:
        self._settings = settings
        self._local = local
        self._run = run
        self._python = python
        self._machine = machine

    @property
    def folder(self) -> Path:
        return replace(USUAL, work_dir=self._run.work_dir, port=self._settings.port).folder

    @property
    def tiny_model(self) -> Path | None:
        """Returns the folder of the tiny model, where an engine is to be started and the file does not say with which
        model; else None."""
        return self._run.tiny_model if any(self._model(one) is None for one in self._local) else None

    def plan(self, one: InstanceSettings) -> EnginePlan:
        try:
            return self._plan(one)
        except PreflightError as error:
            raise PreflightError(f"instance {one.name!r}: {error}") from None

    def needs(self, one: InstanceSettings) -> Needs:
        options = self._options(one)
        modules = tuple(KINDS[one.engine].modules(options))
        return Needs(model=self._model(one), python=options.python, modules=modules)

    def proxy_options(self) -> tuple[str, ...]:
        """Returns the options that tell the proxy what it has to know of the engines, and what neither they nor the
        file tell it."""
        chosen: dict[str, str] = {}
        if self.tiny_model is not None and not self._settings.models:
            chosen["--model"] = str(self.tiny_model)
        for one in self._local:
            for option, value in self._unsaid(one):
                if chosen.setdefault(option, value) != value:
                    raise PreflightError(
                        f"{_field(option)} is {value} for {one.name!r} and {chosen[option]} for another engine; say it "
                        "at the file's top"
                    )
        return tuple(word for pair in chosen.items() for word in pair)

    def _unsaid(self, one: InstanceSettings) -> Iterator[tuple[str, str]]:
        if one.engine in SAYS_ITSELF:
            return
        words = KINDS[one.engine].proxy_options(self._options(one))
        for option, value in zip(words[::2], words[1::2], strict=True):
            if _field(option) not in self._settings.model_fields_set:
                yield option, value

    def _plan(self, one: InstanceSettings) -> EnginePlan:
        if not re.fullmatch(r"[\w.-]+", one.name) or one.name in RESERVED:
            raise PreflightError("its log has its name; give it one of letters, digits, '.', '-' and '_'")
        options = self._options(one)
        plan = KINDS[one.engine].plan(options, self._seat(one, options), self._machine)
        table = plan.tables[0]
        _check_rank_ports(one, table)
        ports = (replace(use, option=f"{one.name}'s {FIELDS[use.option]}", host=options.host) for use in plan.ports)
        return replace(plan, ports=tuple(ports), tables=({**table, "name": one.name},))

    def _options(self, one: InstanceSettings) -> FleetOptions:
        """Returns the options of a fleet that has this instance and no other."""
        launch, settings, ordinal = _launch(one), self._settings, self._local.index(one)
        host, port = _place(one)
        model = self._model(one)
        if model is None and one.engine != "builtin":
            raise PreflightError("nobody says which model it has; give model, a folder, at the file's top")
        side = Side(args=launch.args, env=launch.env, lmcache=_lmcache(one), args_option="launch.args")
        buffer = one.pd_buffer_size or settings.pd_buffer_size
        return FleetOptions(
            engine=one.engine,
            num_prefillers=int(one.role == "prefill"),
            num_decoders=int(one.role == "decode"),
            model=model or self._run.tiny_model,
            served_model_name=one.model,
            work_dir=self._run.work_dir,
            host=host,
            port=settings.port,
            prefill_port=port,
            decode_port=port,
            receiver_port=one.receiver_ports[0] if one.receiver_ports else USUAL.receiver_port + ordinal,
            alloc_port=one.alloc_ports[0] if one.alloc_ports else USUAL.alloc_port + ordinal,
            notify_port=settings.notify_port or settings.signal_port([one]),
            notify_host=settings.notify_address,
            side_channel_port=launch.side_channel_port or USUAL.side_channel_port + ordinal,
            bootstrap_port=one.bootstrap_port or settings.bootstrap_port,
            kv_port=one.kv_port or settings.kv_port,
            dist_port=launch.dist_port or USUAL.dist_port,
            pd_buffer_size=str(buffer) if buffer else None,
            chunk_size=one.chunk_size or _given(settings, "chunk_size"),
            dtype=launch.dtype,
            python=launch.python or self._python,
            prefill=side,
            decode=side,
            proxy_args=("--first-token", settings.first_token),
            kv_transfer_config=launch.kv_transfer_config,
        )

    def _model(self, one: InstanceSettings) -> Path | None:
        """Returns the folder of the instance's model, or None where the file does not say it."""
        named = {model.name: model.path for model in self._settings.models}
        return named.get(one.model or "", self._settings.model)

    def _seat(self, one: InstanceSettings, options: FleetOptions) -> Seat:
        ordinal, cores = self._local.index(one), self._machine.cores
        share = max(1, len(cores) // len(self._local))
        first = ordinal * share % len(cores)
        return Seat(
            role=one.role,
            index=0,
            # A port of the file's own choice is that of this instance, whichever it is in the file.
            ordinal=0 if _launch(one).dist_port else ordinal,
            device=self._device(one, options),
            name=one.name,
            gpus=_launch(one).gpus,
            cores=cores[first : first + share],
        )

    def _device(self, one: InstanceSettings, options: FleetOptions) -> str:
        launch, kind = _launch(one), KINDS[one.engine]
        device = launch.device or ("cuda" if launch.gpus else kind.device)
        if one.engine != "builtin" and device not in ("cpu", "cuda"):
            raise PreflightError(f"launch.device {device} is neither cpu nor cuda; which GPU it gets launch.gpus says")
        if one.engine == "builtin" and not is_builtin_device(device):
            raise PreflightError(f"launch.device {device} is neither cpu nor cuda nor cuda:N")
        if launch.gpus and device != "cuda":
            raise PreflightError(f"launch.gpus names GPUs, and launch.device is {device}; leave one of them out")
        if one.engine != "builtin" and device == "cuda":
            num_gpus = kind.num_devices(options.args(one.role))
            if len(launch.gpus) != num_gpus:
                raise PreflightError(f"launch.gpus names {len(launch.gpus)} GPUs, and it computes on {num_gpus}")
        return device


def _launch(one: InstanceSettings) -> LaunchSettings:
    assert one.launch is not None
    return one.launch


def _place(one: InstanceSettings) -> tuple[str, int]:
    url = urlsplit(one.url)
    is_place = url.scheme == "http" and url.port is not None and not url.path.strip("/")
    if not is_place or url.hostname is None or url.hostname in EVERYWHERE:
        raise PreflightError(f"url {one.url!r} is not http://host:port, where it is to be started and found by others")
    assert url.port is not None
    return url.hostname, url.port


def _lmcache(one: InstanceSettings) -> Mapping[str, object]:
    return {} if one.lmcache_config is None else read_lmcache_file(one.lmcache_config, "lmcache_config")


def _given(settings: Settings, name: str) -> int | None:
    """Returns a setting, or None where it is the option's own default: an engine may have another default."""
    value: int | None = getattr(settings, name) if name in settings.model_fields_set else None
    return value


def _field(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _check_rank_ports(one: InstanceSettings, table: Mapping[str, object]) -> None:
    """Checks that each rank has a port, and that the ports of one decoder are neighbours. Raises `PreflightError`."""
    for field, given in (("receiver_ports", one.receiver_ports), ("alloc_ports", one.alloc_ports)):
        taken = table.get(field)
        if taken is not None and list(given) != taken and (given or one.engine not in SAYS_ITSELF):
            raise PreflightError(f"{field} is {list(given)}, and of what is started here it would be {taken}")
