"""The module defines every option of the proxy once.

Flags, ``PDPROXY_*`` environment, TOML file and help come from these fields. A flag beats the environment, the
environment beats the file, the file beats the default. The reference proxy's flags (LMCache's example) are here under
their own names, so that its launch lines work as they are.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, PrivateAttr, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    CliSuppress,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from pdproxy.config.instances import (
    ONLY_FOR,
    SERVICE_PREFIX,
    InstanceSettings,
    LaunchSettings,
    ModelSettings,
    check_clashes,
    check_models,
    check_names,
    check_service,
    is_one_model,
    is_place,
    listener,
    named,
    of_ranks,
)
from pdproxy.config.lmcache_flags import LMCACHE_SIGNAL_PORT, REFERENCE_FLAGS, pair_hosts_and_ports
from pdproxy.config.values import (
    AsciiKey,
    Assemble,
    ByteSize,
    CommaList,
    DecodePolicy,
    Discover,
    DiscoverPresets,
    Engine,
    EngineClientKind,
    FirstToken,
    Key,
    Keys,
    ModelFolder,
    Oversized,
    Port,
    Ports,
    Ranks,
    Role,
    RoutingPolicy,
    Seconds,
    WhenNobody,
    Workers,
)
from pdproxy.errors import ConfigError
from transfer.command_line.commands import did_you_mean
from transfer.command_line.settings_help import suggestion

_NO_OPTIONS = re.compile(
    r"(URL|REQUIRE_PUBLISHED|SCREENSHOTS|VLLM_PYTHON|COMPILE)$|TEST_|SERVICE_(HOST|PORT)|PORT_\d+_"
)
"""The names, after the prefix, of variables that are not meant for the proxy."""


def setting(default: object, text: str, **more: Any) -> Any:
    """Returns an option of the proxy: its default, its help, and what else pydantic's `Field` takes."""
    return Field(default, description=text, **more)


class Settings(BaseSettings):
    """`Settings` hold what an operator can set. The field descriptions are the help texts. Times are in seconds."""

    model_config = SettingsConfigDict(
        env_prefix="PDPROXY_",
        extra="forbid",
        frozen=True,
        cli_prog_name="pdproxy serve",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_exit_on_error=False,
    )

    config: Path | None = setting(None, "TOML file with any of these options and [[instances]]")
    host: str = setting("127.0.0.1", "Address to serve on")
    port: Port = setting(9100, "Port to serve on")
    workers: Workers = setting(1, "Processes that carry the traffic, or auto: one for each core but one")

    coordinator: str | None = setting(
        None,
        "Store by which replicas of this proxy agree who admits: redis://HOST:PORT, rediss://, etcd://HOST:PORT, "
        "etcds://, or Leases of the cluster: kubernetes, kubernetes://NAMESPACE/NAME",
        repr=False,
    )
    fleet_name: str = setting(
        "default", "Name of the fleet in the store; replicas of one fleet have the same", pattern=r"^[\w.-]{1,64}$"
    )
    replica_host: str | None = setting(
        None, "Address at which other replicas reach this one; default: the one that this machine has towards the store"
    )
    replica_port: Port = setting(0, "Port at which other replicas reach this one; 0 takes a free one")
    replica_advertise: str | None = setting(
        None,
        "HOST:PORT at which other replicas reach this one where it is not the address on which it listens: behind NAT, "
        "or in a container",
        pattern=r"^(\[[0-9A-Fa-f:.]+\]|[\w.-]+):[1-9]\d{0,4}$",
    )
    replica_certfile: Path | None = setting(None, "Certificate (PEM) that this replica shows to others: encrypt")
    replica_keyfile: Path | None = setting(None, "Private key of that certificate")
    replica_cafile: Path | None = setting(None, "Certificates (PEM) of which one must have signed the others'")
    term_s: Seconds = setting(12.0, "Longest time without anybody who admits, when the replica that did has gone")

    instances: CliSuppress[tuple[InstanceSettings, ...]] = setting((), "Instances by name (file only)")
    prefill: CommaList = setting((), "Addresses of the prefillers; dns+http://NAME:PORT is all addresses of the name")
    decode: CommaList = setting((), "Addresses of the decoders; dns+http://NAME:PORT is all addresses of the name")
    models: CliSuppress[tuple[ModelSettings, ...]] = setting((), "Folders of several models (file only)")
    engine: Engine | None = setting(
        None,
        "Kind of the instances, where their tables name none; default: builtin, or lmcache with the reference proxy's "
        "flags",
    )
    prefill_data_parallel_size: Ranks = setting(
        None, "Data-parallel ranks of each prefiller that a flag names or that is found; each rank is an instance"
    )
    decode_data_parallel_size: Ranks = setting(None, "Data-parallel ranks of each such decoder")
    prefiller_host: CommaList = setting((), "Hosts of the prefillers (reference proxy)")
    prefiller_port: Ports = setting((7100,), "Ports of the prefillers")
    num_prefillers: int = setting(1, "Number of prefillers on consecutive ports of one host", ge=1)
    decoder_host: CommaList = setting((), "Hosts of the decoders (reference proxy)")
    decoder_port: Ports = setting((7200,), "Ports of the decoders")
    num_decoders: int = setting(1, "Number of decoders on consecutive ports of one host", ge=1)
    decoder_init_port: Ports = setting((), "Control ports of the decoders (lmcache: one per rank), to be checked")
    decoder_alloc_port: Ports = setting((), "Allocation ports of the decoders, one per rank; checked for clashes")
    bootstrap_port: Port = setting(8998, "Port of the prefillers' bootstrap servers (sglang, mooncake)", ge=1)
    kv_port: Port = setting(5700, "Port at which the engines' connectors tell of their KV (vllm_transfer)", ge=1)
    kv_events_port: int | None = setting(
        None,
        "Port at which each engine publishes what its prefix cache holds (vLLM, SGLang: --kv-events-config); a "
        "data-parallel rank has its number added",
        ge=1,
        le=65535,
    )
    kv_events_replay_port: int | None = setting(
        None,
        "Port at which each engine repeats such events; without it what is cached is never known exactly",
        ge=1,
        le=65535,
    )
    discover: Discover | None = setting(None, "Where instances are found while the proxy runs: kubernetes")
    prefill_selector: str | None = setting(None, "Labels of the pods that are prefillers, as k=v,k=v")
    decode_selector: str | None = setting(None, "Labels of the pods that are decoders")
    prefill_service: str | None = setting(None, "Service whose ready endpoints are the prefillers")
    decode_service: str | None = setting(None, "Service whose ready endpoints are the decoders")
    discover_preset: DiscoverPresets = setting(
        (), "Labels that are usual with llm-d, aibrix or lws (of LeaderWorkerSets the leaders alone)"
    )
    discover_namespace: str | None = setting(None, "Namespace of the pods, * for all; default: the proxy's own")
    discover_port: str | None = setting(
        None, "Number or name of the pods' port; default: their port named http, or the only one they declare"
    )
    inference_pool: str | None = setting(None, "InferencePool to which the pods must belong, and whose port they have")
    dns_interval_s: Seconds = setting(5.0, "Time between two looks at the addresses of a name (dns+http://)")
    dns_server: str | None = setting(
        None, "Name server that is asked for them, as ADDRESS:PORT; default: those of this machine"
    )

    first_token: FirstToken = setting(
        "auto",
        "Side whose first token a client gets (lmcache): decoder, where decoders run without "
        "skip_last_n_tokens; with it (1, as in LMCache's examples) auto, or prefiller, which shows the prefiller's "
        "first token where that makes no difference",
    )
    prefill_policy: RoutingPolicy = setting("least_queued_tokens", "Policy that chooses among ready prefillers")
    decode_policy: DecodePolicy = setting("least_resident", "Policy that chooses among ready decoders")
    session_header: str = setting("x-session-id", "Request header with a session (session_affinity)", min_length=1)
    prefix_chunks: int = setting(2, "Chunks of a prompt by which prefix_affinity knows it again", ge=1)
    prefix_load_factor: float = setting(1.25, "Most requests of an instance, in fair shares (prefix_affinity)", ge=1)
    proxy_host: str = setting("127.0.0.1", "Address for the decoders' KV signals")
    proxy_port: Port | None = setting(
        None,
        "Port for the engines' KV signals; 0 takes a free one; by default 7500 in front of LMCache, whose "
        "prefillers have it in their own configuration, else a free one",
    )
    notify_host: str | None = setting(None, "Host at which decoders reach this proxy, if proxy-host is a wildcard")
    notify_port: int | None = setting(None, "Port at which decoders reach this proxy", ge=1, le=65535)

    model: ModelFolder | None = setting(
        None,
        "Model folder, or name of one in the Hugging Face cache: its tokenizer counts texts where the "
        "engines' agrees with it, and its config tells the KV's size",
    )
    pd_buffer_size: ByteSize | None = setting(None, "Size of a decoder's PD buffer per rank, as 2GiB or in bytes")
    chunk_size: int = setting(256, "Tokens per page", ge=1)
    tp_size: int = setting(1, "Tensor-parallel ranks of a decoder", ge=1)
    kv_cache_dtype: str = setting("auto", "Dtype of the KV cache; auto is the model's own")

    admission: bool = setting(True, "Grant a request its pages before it is prefilled")
    concurrent_pages: int | None = setting(None, "Most pages of one decoder in use at once; default: all", ge=1)
    max_queue: int = setting(1024, "Requests that may wait for one decoder's pages", ge=0)
    max_overtakes: int = setting(16, "Smaller requests that may pass a waiting larger one", ge=0)
    oversubscribe: float = setting(
        1.0, "Share of a decoder's KV cache that may be promised; above 1 answers may have to give way to others", gt=0
    )
    min_prompt_tokens: int = setting(0, "Tokens of a prompt below which the decoder alone serves it", ge=0)
    oversized: Oversized = setting(
        "local",
        "Way of prompts larger than the PD buffer: the decoder alone serves them (local), they are refused "
        "with 400 (refuse), or they pass through the buffer piece by piece (window)",
    )
    when_no_prefiller: WhenNobody = setting(
        "local", "Answer while no prefiller is there: decoders serve alone (local), or 503 (refuse)"
    )
    when_no_decoder: WhenNobody = setting(
        "local", "Answer while no decoder is there: prefillers serve alone (local), or 503 (refuse)"
    )
    path_by_load: bool = setting(
        False, "Let one instance answer alone where that is clearly sooner: its counterpart is far behind, or full"
    )
    retries: int = setting(1, "New attempts of one request, in a row, that may fail without getting it further", ge=0)
    retry_share: float = setting(0.2, "Retries that are allowed, as a share of all requests", ge=0)
    retry_min_per_s: float = setting(1.0, "Retries per second that are allowed besides retry-share", ge=0)
    continue_streams: bool = setting(True, "Let another pair go on with a stream whose decoder is lost")
    continue_limit: ByteSize = setting(2**20, "Most bytes of a stream's events that are kept to continue it")
    assemble: Assemble = setting(
        "all", "Whole answers that engines are asked for as streams: all that can be, those of completions, or none"
    )
    assemble_min_tokens: int = setting(17, "Tokens below which a whole answer is not asked for as a stream", ge=0)
    min_priority: int = setting(0, "Least urgent priority that a request may have")
    max_priority: int = setting(0, "Most urgent priority that a request may have; requests of higher priority go first")

    request_timeout_s: Seconds = setting(600.0, "Longest time for a whole request")
    body_timeout_s: Seconds = setting(30.0, "Longest wait for the client's body")
    connect_timeout_s: Seconds = setting(5.0, "Longest wait for a connection to an engine")
    slot_timeout_s: Seconds = setting(60.0, "Longest wait for a decoder's pages")
    affinity_wait_s: Seconds = setting(1.0, "Longest wait for the instance that has a request's session")
    prefill_timeout_s: Seconds = setting(120.0, "Longest time for the prefill leg")
    kv_timeout_s: Seconds = setting(30.0, "Longest wait for KV-ready after the prefill reply")
    first_byte_timeout_s: Seconds = setting(60.0, "Longest wait for the first token after the decode leg was sent")
    idle_timeout_s: Seconds = setting(60.0, "Longest silence within an answer, and of a client who should take it")
    whole_timeout_s: Seconds = setting(600.0, "Longest wait for an answer that has to be asked for as a whole")
    engine_lease_s: Seconds | None = setting(
        None, "Time after which an engine drops KV that nobody asks for; default: what is usual for its kind"
    )
    drain_grace_s: float = setting(
        5.0,
        "Time after SIGTERM in which new requests are still served, while /ready says 503 so that load balancers "
        "stop sending",
        ge=0,
        allow_inf_nan=False,
    )
    drain_timeout_s: Seconds = setting(30.0, "Longest time for running requests at shutdown")
    probe_interval_s: Seconds = setting(5.0, "Time between two looks at an instance")
    probe_timeout_s: Seconds = setting(5.0, "Longest time for one look at an instance")
    probe_misses: int = setting(3, "Looks without an answer, in a row, after which an instance is down", ge=1)
    probe_successes: int = setting(2, "Looks with an answer, in a row, after which an instance is up again", ge=1)
    breaker_faults: int = setting(5, "Faults in a row after which an instance is left alone for a while", ge=1)
    breaker_cool_off_s: Seconds = setting(5.0, "Time for which a faulty instance is left alone")
    slow_start_s: float = setting(10.0, "Time in which an instance that came back gets to its full share", ge=0)
    role_controller: bool = setting(False, "Have instances change their roles as the load does")
    role_change_timeout_s: Seconds = setting(
        300.0, "Longest time in which an instance that changes its role has to finish what is under way there"
    )
    watch_config: bool = setting(True, "Follow the instances in the config file while running")
    watch_interval_s: float = setting(1.0, "Time between two looks at the config file", ge=1)
    admin_key: Key | None = setting(None, "Key of the admin API, which is off without one", repr=False)
    admin_key_file: Path | None = setting(None, "File with the admin API's key, or several, one per line")
    allow_link_local: bool = setting(False, "Let the admin API add instances at link-local and metadata addresses")
    canary: bool = setting(True, "Call an instance ready only after a tiny request went through it")
    canary_timeout_s: Seconds = setting(30.0, "Longest time for the canary's tiny request")
    max_body_bytes: ByteSize = setting(16 * 2**20, "Largest request body")
    max_answer_bytes: ByteSize = setting(
        256 * 2**20, "Largest answer that an engine gives, or that is put together, whole"
    )
    memory_budget: ByteSize | None = setting(
        None,
        "Most bytes of requests and answers held at once, beyond which new requests are refused with 503; "
        "default: a quarter of what this process may have",
    )
    max_prompt_bytes: ByteSize = setting(4 * 2**20, "Largest prompt or messages, where they are text")
    max_prompts: int = setting(2048, "Most prompts of one body of /v1/completions", ge=1)
    max_event_bytes: ByteSize = setting(
        8 * 2**20, "Largest event of an engine's stream, and most bytes of a stream before its first token", ge=2**16
    )
    api_keys: Keys = setting((), "Keys of which a client must show one; without any, all may ask", repr=False)
    api_keys_file: Path | None = setting(
        None, "File with more keys of clients, KEY or KEY name=NAME [rpm=N] [tpm=N] per line; may change"
    )
    usage_log: bool = setting(False, "Log a line of JSON for each request: key name, model, tokens, outcome, time")
    engine_client: EngineClientKind = setting(
        "auto", "Client for the engines: relay (HTTP/1.1 in clear text, light) or httpx (any); auto prefers relay"
    )
    engine_api_key: AsciiKey | None = setting(
        None, "Key for the engines; with neither it nor api-keys, they get the client's Authorization", repr=False
    )
    engine_cafile: Path | None = setting(
        None,
        "Certificates (PEM) of which one must have signed those of engines at https://; default: public authorities",
    )
    attempt_key_file: Path | None = setting(
        None,
        "File with the key that this proxy shares with the decoders, which then take no attempts "
        "but its own (builtin; pdproxy keys makes one); default: PDPROXY_ATTEMPT_KEY, else none",
    )
    attempt_key: CliSuppress[str | None] = Field(None, repr=False)
    """The key itself, where there is no file. It comes from the environment, because every user of the machine can see
    command lines.
    """
    cors_origins: CommaList = setting((), "Origins whose pages may ask, as https://host:port, or *")
    ssl_certfile: Path | None = setting(None, "Certificate chain (PEM): serve HTTPS")
    ssl_keyfile: Path | None = setting(None, "Private key of the certificate, where ssl-certfile does not contain it")
    ssl_keyfile_password: str | None = setting(None, "Password of the private key", repr=False)
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "Least severe messages that are logged")
    log_format: Literal["text", "json"] = setting("text", "Format of logged messages")
    otlp_endpoint: str | None = setting(None, "OpenTelemetry collector (OTLP over HTTP); else by OTEL_* variables")

    _arguments: tuple[str, ...] = PrivateAttr(())

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, _FileSource(settings_cls)

    @model_validator(mode="before")
    @classmethod
    def _with_engine(cls, values: Any) -> Any:
        """Gives the kind of engine to the tables that name none."""
        if not isinstance(values, Mapping) or values.get("engine") is None:
            return values
        tables = values.get("instances")
        if not isinstance(tables, list | tuple):
            return values
        told = [{"engine": values["engine"], **table} if isinstance(table, Mapping) else table for table in tables]
        return {**values, "instances": told}

    def fleet(self) -> tuple[InstanceSettings, ...]:
        """Returns every instance, from the file and from both kinds of flags. Raises `ConfigError` naming
        the option.
        """
        told = self._told()
        for role, flag in (("prefill", "--prefill"), ("decode", "--decode")):
            if self.discover is None and not any(instance.role == role for instance in told):
                raise ConfigError(
                    f"instances: no {role} instance is configured; give {flag} URL, or a file with --config"
                )
        fleet = [rank for one in told if not one.is_service for rank in one.ranks()]
        self.check_instances(fleet)
        if not self.is_discovering:
            check_models(fleet)
        return tuple(fleet)

    def services(self) -> tuple[InstanceSettings, ...]:
        """Returns what stands for all instances behind a name in DNS. Raises `ConfigError` naming the option."""
        services = [one for one in self._told() if one.is_service]
        for service in services:
            check_service(service)
        return tuple(services)

    @property
    def is_discovering(self) -> bool:
        """Tells whether instances are found while the proxy runs."""
        return self.discover is not None or any(one.is_service for one in self._told())

    def expected(self) -> list[InstanceSettings]:
        """Returns what there may be behind this proxy, of which kinds of engines: the instances, the services, and one
        that stands for all pods. Raises `ConfigError`."""
        expected = [*self.fleet(), *self.services()]
        if self.discover is not None:
            expected.append(InstanceSettings(name=self.discover, role="decode", url="", engine=self.flag_engine))
        return expected

    def found(self, one: InstanceSettings) -> InstanceSettings:
        """Returns a discovered instance with what the options say of its kind."""
        one = of_ranks(one, self._num_ranks(one.role))
        return next(iter(self._with_ports([one]))) if one.role == "decode" else one

    def _num_ranks(self, role: Role) -> int | None:
        return self.prefill_data_parallel_size if role == "prefill" else self.decode_data_parallel_size

    def _named(self, role: Role, urls: Sequence[str]) -> list[InstanceSettings]:
        """Returns the instances that a flag names."""
        return [of_ranks(one, self._num_ranks(role)) for one in named(role, urls, self.flag_engine)]

    def _told(self) -> list[InstanceSettings]:
        """Returns the instances and services that the file and the flags name."""
        return [
            *self.instances,
            *self._named("prefill", self.prefill),
            *self._with_ports(self._named("decode", self.decode)),
            *self._reference_prefillers(),
            *self._reference_decoders(),
        ]

    def check_instances(self, fleet: Sequence[InstanceSettings]) -> None:
        """Raises `ConfigError`, which names the field, where these instances cannot be together behind this proxy."""
        check_names(fleet)
        self._check_chunk_sizes(fleet)
        self._check_ports(fleet)

    def reread(self) -> Settings:
        """Returns the settings as they would be if the proxy were started now. Raises `ConfigError`.

        For settings which `load` did not make, only the file's ``[[instances]]`` are read again.
        """
        if self._arguments:
            return load(self._arguments)
        return self.model_copy(update={"instances": explained(lambda: Settings(config=self.config)).instances})

    @property
    def is_reference(self) -> bool:
        """Tells whether instances are given by the reference proxy's flags."""
        return bool(self.model_fields_set & REFERENCE_FLAGS)

    @property
    def flag_engine(self) -> Engine:
        """Returns the kind of the instances given by flags. For the reference proxy's flags the default is LMCache,
        which that proxy is for.
        """
        return self.engine or ("lmcache" if self.is_reference else "builtin")

    @property
    def notify_address(self) -> str:
        """Returns the host to which decoders send their signals, without the port.

        Raises `ConfigError` where that is an address of no single host, such as 0.0.0.0.
        """
        host = self.notify_host or self.proxy_host
        if host in ("0.0.0.0", "*", "::"):
            raise ConfigError(f"notify_host: needed, because proxy_host {self.proxy_host} is no address to send to")
        return host

    def signal_port(self, fleet: Iterable[InstanceSettings]) -> int:
        """Returns the port on which KV signals of `fleet` are taken. 0 means any free port, which each request tells
        its engines.
        """
        if self.proxy_port is not None:
            return self.proxy_port
        return LMCACHE_SIGNAL_PORT if any(one.engine == "lmcache" for one in fleet) else 0

    def _reference_prefillers(self) -> Iterable[InstanceSettings]:
        hosts = self._hosts(self.prefiller_host, "prefiller_port", "num_prefillers")
        pairs = pair_hosts_and_ports("prefiller", hosts, self.prefiller_port, self.num_prefillers)
        for index, (host, port) in enumerate(pairs):
            url = _url(host, port)
            yield InstanceSettings(name=f"prefiller-{index}", role="prefill", url=url, engine=self.flag_engine)

    def _reference_decoders(self) -> Iterable[InstanceSettings]:
        hosts = self._hosts(self.decoder_host, "decoder_port", "num_decoders")
        pairs = pair_hosts_and_ports("decoder", hosts, self.decoder_port, self.num_decoders)
        for index, (host, port) in enumerate(pairs):
            engine = self.flag_engine
            init_ports = self._rank_ports(self.decoder_init_port, hosts, index)
            alloc_ports = self._rank_ports(self.decoder_alloc_port, hosts, index)
            yield InstanceSettings(
                name=f"decoder-{index}",
                role="decode",
                url=_url(host, port),
                engine=engine,
                receiver_ports=init_ports if engine in ONLY_FOR["receiver_ports"] else (),
                alloc_ports=alloc_ports if engine in ONLY_FOR["alloc_ports"] else (),
            )

    def _with_ports(self, decoders: Iterable[InstanceSettings]) -> Iterable[InstanceSettings]:
        """Gives LMCache's decoders their ports, which these do not tell. Ports count up among the
        decoders on one host.
        """
        num_on: Counter[str | None] = Counter()
        for one in decoders:
            url = one.url.removeprefix(SERVICE_PREFIX)
            host = urlsplit(url).hostname if is_place(url) else None
            if one.engine == "lmcache":
                inits, allocs = (
                    tuple(port + num_on[host] for port in ports)
                    for ports in (self.decoder_init_port, self.decoder_alloc_port)
                )
                one = one.model_copy(update={"receiver_ports": inits, "alloc_ports": allocs})
            num_on[host] += 1
            yield one

    def _hosts(self, hosts: tuple[str, ...], *companions: str) -> tuple[str, ...]:
        """Returns `hosts`, or localhost where only a port or a count is given, as the reference proxy does."""
        return hosts or (("localhost",) if self.model_fields_set & set(companions) else ())

    def _rank_ports(self, ports: Sequence[int], hosts: Sequence[str], index: int) -> tuple[int, ...]:
        """Returns one decoder's ports. They count up with the decoders on one host, and repeat on hosts
        of their own.
        """
        step = index if len(hosts) == len(self.decoder_port) == 1 else 0
        return tuple(port + step for port in ports)

    def _check_chunk_sizes(self, fleet: Sequence[InstanceSettings]) -> None:
        """Raises `ConfigError` where instances of the same model have different numbers of tokens per page."""
        cut = [instance for instance in fleet if instance.chunk_size is not None]
        for instance in cut:
            if "chunk_size" in self.model_fields_set and instance.chunk_size != self.chunk_size:
                raise ConfigError(
                    f"instances.chunk_size: {instance.name!r} has {instance.chunk_size}, and the option chunk_size "
                    f"is {self.chunk_size}; leave one of them out, or make them equal"
                )
        # Those of one model are alike, or the first two that differ are found: so the first of each stands for all.
        firsts: dict[str | None, InstanceSettings] = {}
        for other in cut:
            firsts.setdefault(other.model, other)
        for one, other in product(firsts.values(), cut):
            if is_one_model(one, other) and one.chunk_size != other.chunk_size:
                raise ConfigError(
                    f"instances.chunk_size: {one.name!r} ({one.role}) has {one.chunk_size} and {other.name!r} "
                    f"({other.role}) has {other.chunk_size}; give all engines of a model the same tokens per page"
                )

    def _check_ports(self, fleet: Sequence[InstanceSettings]) -> None:
        """Raises `ConfigError` where two listeners are on one host and port. Port 0 takes a free one."""
        taken = [("port", self.host, self.port), ("proxy_port", self.proxy_host, self.signal_port(fleet))]
        for instance in fleet:
            host, port = listener(instance.url)
            if not instance.data_parallel_rank:  # the others share the first one's listener
                taken.append((f"instance {instance.name!r}", host, port))
            receiver = instance.receiver_host or host
            taken += [(f"receiver of {instance.name!r}", receiver, port) for port in instance.receiver_ports]
            taken += [(f"alloc_ports of {instance.name!r}", receiver, port) for port in instance.alloc_ports]
        self._check_alloc_ports(taken)

    def _check_alloc_ports(self, taken: list[tuple[str, str, int]]) -> None:
        """Adds the allocation ports of decoders that the reference proxy's flags give, where their kind has none, and
        checks all.

        Raises `ConfigError`.
        """
        hosts = self._hosts(self.decoder_host, "decoder_port", "num_decoders")
        if self.flag_engine == "lmcache":
            hosts = ()
        decoders = pair_hosts_and_ports("decoder", hosts, self.decoder_port, self.num_decoders)
        for index, (host, _) in enumerate(decoders):
            ports = self._rank_ports(self.decoder_alloc_port, hosts, index)
            taken += [(f"decoder_alloc_port of 'decoder-{index}'", host, port) for port in ports]
        check_clashes(taken)


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _FileSource(PydanticBaseSettingsSource):
    """`_FileSource` reads the TOML file that flags or environment name as ``config``."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        raise NotImplementedError  # the file is read whole

    def __call__(self) -> dict[str, Any]:
        path = self.current_state.get("config")
        if path is None:
            return {}
        try:
            with Path(path).open("rb") as file:
                values = tomllib.load(file)
        except OSError as error:
            raise ConfigError(f"config: {path} cannot be read: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"config: {path} is not valid TOML: {error}") from None
        return {name.replace("-", "_"): value for name, value in values.items()}


def load(arguments: Sequence[str] = ()) -> Settings:
    """Returns the settings of this command line, environment and file. Raises `ConfigError` naming what is wrong."""
    settings = explained(lambda: Settings(_cli_parse_args=list(arguments)))
    settings._arguments = tuple(arguments)
    return settings


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Returns a sentence about each variable that looks like an option of the proxy and is none.

    Those of the tools around it are left out, and those that Kubernetes sets for a service named pdproxy.
    """
    prefix = Settings.model_config.get("env_prefix", "")
    known = [name.upper() for name in Settings.model_fields]
    given = {name: name.upper().removeprefix(prefix) for name in environ if name.upper().startswith(prefix)}
    wrong = {name: rest for name, rest in sorted(given.items()) if rest not in known and not _NO_OPTIONS.match(rest)}
    near = {name: get_close_matches(rest, known, n=1) for name, rest in wrong.items()}
    return [
        f"{name} is in the environment, and there is no such option; "
        + (f"did you mean {prefix}{meant[0]}?" if meant else "pdproxy serve --help lists those there are")
        for name, meant in near.items()
    ]


def explained(make: Callable[[], Settings]) -> Settings:
    """Returns the settings that `make` makes. Raises `ConfigError` naming what is wrong."""
    try:
        return make()
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None
    except SettingsError as error:
        raise ConfigError(f"{error}{suggestion(Settings, str(error))}") from None


def _explain(error: ValidationError) -> str:
    """Returns the name of each field and what is wrong with it, without pydantic's links."""
    return "; ".join(_explain_one(detail["loc"], detail["type"], detail["msg"]) for detail in error.errors())


def _explain_one(loc: tuple[int | str, ...], kind: str, message: str) -> str:
    name = ".".join(str(part) for part in loc)
    if kind == "extra_forbidden":
        is_table = loc[0] == "instances"
        names = Settings.model_fields
        if is_table:
            names = LaunchSettings.model_fields if "launch" in loc[:-1] else InstanceSettings.model_fields
        known = f"there are {', '.join(names)}" if is_table else "pdproxy serve --help lists those there are"
        return f"{name}: there is no such option; {did_you_mean([str(loc[-1])], names, most=1) or known}"
    return f"{name}: {message.removeprefix('Value error, ')}"
