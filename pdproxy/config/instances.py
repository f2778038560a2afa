"""The module defines what a configuration file says of one instance, and what instances of one fleet must not share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from itertools import combinations
from math import inf
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from pdproxy.config.values import (
    MAX_NAME_CHARS,
    ByteSize,
    Engine,
    ModelFolder,
    ModelName,
    Name,
    PortNumber,
    Ranks,
    Role,
    ZmqAddress,
    check_printable,
    is_wanted,
    split_texts,
    split_words,
)
from pdproxy.errors import ConfigError

ONLY_FOR: dict[str, frozenset[Engine]] = {
    "receiver_ports": frozenset({"builtin", "lmcache"}),
    "alloc_ports": frozenset({"lmcache"}),
    "receiver_host": frozenset({"lmcache"}),
    "pd_buffer_size": frozenset({"lmcache"}),
    "lmcache_config": frozenset({"lmcache"}),
    "bootstrap_port": frozenset({"sglang", "mooncake"}),
    "kv_port": frozenset({"vllm_transfer"}),
    "max_rooms": frozenset({"sglang"}),
    "num_blocks": frozenset({"vllm_nixl", "mooncake"}),
    "data_parallel_rank": frozenset({"vllm_nixl", "sglang", "mooncake"}),
    "data_parallel_size": frozenset({"vllm_nixl", "sglang", "mooncake"}),
}
"""The kinds of engines that have a field; a field that is not here is for all kinds."""


SERVICE_PREFIX = "dns+"
"""The beginning of a url that stands for many: each address of its name is an instance."""
MAX_URL_CHARS = 2048
MAX_URLS_KNOWN = 4096
"""The most urls that are kept as they were read. A fleet is checked as a whole with each change."""
_NOT_IN_URLS = frozenset(' "<>\\^`{|}')
_LINK_LOCAL = ip_network("169.254.0.0/16"), ip_network("fe80::/10")
_NAT64 = ip_network("64:ff9b::/96")
_METADATA = frozenset(map(ip_address, ("100.100.100.200", "fd00:ec2::254", "fd20:ce::254")))
"""The addresses outside of `_LINK_LOCAL` at which clouds tell a machine its secrets."""
_METADATA_NAMES = frozenset({"metadata.google.internal", "metadata.goog"})


class LaunchSettings(BaseModel):
    """`LaunchSettings` say how ``pdproxy up`` starts an instance on this machine. All other code finds an instance by
    its `url`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    args: Annotated[tuple[str, ...], BeforeValidator(split_words)] = ()
    """The further options of the engine."""
    env: dict[str, str] = Field(default_factory=dict)
    """The environment variables of the engine."""
    python: Path | None = None
    """The Python of the environment in which the engine is installed."""
    device: str | None = None
    """The device: cpu or cuda, for builtin also cuda:N. The default is the device that is usual for the kind."""
    gpus: Annotated[tuple[str, ...], BeforeValidator(split_texts)] = ()
    """The GPUs that the engine has to itself."""
    dtype: str | None = None
    """The dtype of weights and KV. The default is the model's own."""
    kv_transfer_config: dict[str, object] = Field(default_factory=dict)
    """Members that are added to vLLM's own configuration of this name."""
    side_channel_port: PortNumber | None = None
    """The port at which decoders find a prefiller with NixlConnector."""
    dist_port: PortNumber | None = None
    """The port at which SGLang's ranks meet."""


class InstanceSettings(BaseModel):
    """`InstanceSettings` are one ``[[instances]]`` table of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name
    """The name that logs, metrics and the admin API use for the instance."""
    role: Role
    """The instance's part in a pair."""
    url: str
    """The address at which the instance listens, as ``http://host:port``. With ``dns+http://name:port`` the table
    stands for as many instances as the name has addresses.
    """
    engine: Engine = "builtin"
    """The kind of the engine."""
    receiver_ports: tuple[PortNumber, ...] = ()
    """A decoder's control ports, where the operator knows them.

    A built-in decoder has one port, which all ranks share; it is checked against what the decoder says itself. LMCache
    has init ports, one per rank, which LMCache does not tell.
    """
    alloc_ports: tuple[PortNumber, ...] = ()
    """The allocation ports of an LMCache decoder, one per rank."""
    receiver_host: Annotated[str, AfterValidator(check_printable)] | None = None
    """The host at which prefillers reach an LMCache decoder, where that is not the host of `url`."""
    pd_buffer_size: ByteSize | None = None
    """The bytes of an LMCache decoder's PD buffer per rank. The default is the value of the option of this name."""
    lmcache_config: Path | None = None
    """An LMCache decoder's own configuration (YAML), which is read for what is not given here."""
    bootstrap_port: PortNumber | None = None
    """The port of the bootstrap server of a prefiller of SGLang or Mooncake. The default is the value of the option of
    this name.
    """
    kv_port: PortNumber | None = None
    """The port at which pdproxy's connector in vLLM tells of its part of the transfer. The default is the value of the
    option of this name.
    """
    max_rooms: int | None = Field(None, ge=1)
    """The number of requests that an SGLang prefiller may have under way, where that is less than it allows itself."""
    num_blocks: int | None = Field(None, ge=1)
    """The number of blocks of a vLLM prefiller's KV cache, of `chunk_size` tokens each, where vLLM does not tell it
    (``--disable-log-stats``).
    """
    data_parallel_rank: int | None = Field(None, ge=0)
    """The data-parallel rank which this instance is, of those that requests to `url` can name."""
    data_parallel_size: Ranks = None
    """The number of data-parallel ranks behind `url`. The table stands for an instance for each of them."""
    kv_events: ZmqAddress | None = None
    """The address at which the engine publishes what its prefix cache holds, as ``tcp://host:5557``. With
    `data_parallel_size` it is the first rank's, and each other rank has the next port.
    """
    kv_events_replay: ZmqAddress | None = None
    """The address at which the engine repeats such events. Without it what is cached there is never known exactly."""
    model: ModelName | None = None
    """A name under which the instance serves its model. It is checked against the others here, and against what the
    instance says itself.
    """
    chunk_size: int | None = Field(None, ge=1)
    """The number of tokens per page. It is checked like `model`."""
    revision: Name | None = None
    """The name of what the instance runs, where the engine does not tell all that a counterpart must have alike. It
    exchanges KV only with instances of the same name; those without one have none in common with it.
    """
    launch: Annotated[LaunchSettings | None, BeforeValidator(is_wanted)] = None
    """``true`` or a table where ``pdproxy up`` starts the instance. Otherwise the operator starts it, here or on
    another machine.
    """

    @model_validator(mode="after")
    def _check_fields(self) -> InstanceSettings:
        """Raises `ValueError` for a field which belongs to another kind of engine."""
        for name, engines in ONLY_FOR.items():
            if getattr(self, name) not in (None, ()) and self.engine not in engines:
                raise ValueError(f"{name} is for {' and '.join(sorted(engines))}, not for {self.engine}")
        if self.num_blocks is not None and self.chunk_size is None:
            raise ValueError("num_blocks needs chunk_size, the tokens of one block (vLLM's --block-size)")
        if self.kv_events_replay is not None and self.kv_events is None:
            raise ValueError("kv_events_replay needs kv_events, the address at which the events are published")
        if self.data_parallel_rank is not None and self.data_parallel_rank >= (self.data_parallel_size or inf):
            raise ValueError("data_parallel_rank counts from 0, so it must be less than data_parallel_size")
        return self

    @property
    def is_service(self) -> bool:
        """Tells whether this stands for all instances behind a name in DNS."""
        return self.url.startswith(SERVICE_PREFIX)

    def ranks(self) -> tuple[InstanceSettings, ...]:
        """Returns the instances that the table stands for: one for each data-parallel rank, where it says how many
        there are."""
        if self.data_parallel_rank is not None or (self.data_parallel_size or 1) == 1:
            return (self,)
        return tuple(
            self.model_copy(
                update={
                    "name": f"{self.name[: MAX_NAME_CHARS - 5]}/{rank}",
                    "data_parallel_rank": rank,
                    "kv_events": _of_rank(self.kv_events, rank),
                    "kv_events_replay": _of_rank(self.kv_events_replay, rank),
                }
            )
            for rank in range(self.data_parallel_size or 1)
        )

    def events_addresses(self, port: int | None, replay_port: int | None) -> tuple[str, str | None] | None:
        """Returns the addresses at which the engine publishes and repeats its KV events; None where it does not.

        For an instance that does not name them they are at the host of its url, at these ports, to which the number
        of its data-parallel rank is added.
        """
        if self.kv_events is not None:
            return self.kv_events, self.kv_events_replay
        if port is None:
            return None
        name, rank = urlsplit(self.url).hostname or "", self.data_parallel_rank or 0
        host = f"tcp://[{name}]" if ":" in name else f"tcp://{name}"
        return f"{host}:{port + rank}", None if replay_port is None else f"{host}:{replay_port + rank}"

    @property
    def place(self) -> tuple[str, int | None]:
        """Returns the url and the data-parallel rank (or None). No two instances have the same."""
        return self.url.rstrip("/"), self.data_parallel_rank


class ModelSettings(BaseModel):
    """`ModelSettings` are one ``[[models]]`` table of the file: the folder of one model, where several models are
    served.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: ModelName
    """The name under which the engines serve the model."""
    path: ModelFolder
    """The folder with the model's tokenizer and config."""


def named(role: Role, urls: Sequence[str], engine: Engine) -> list[InstanceSettings]:
    """Returns the instances at `urls`, named by role and number."""
    return [
        InstanceSettings(name=f"{role}-{index}", role=role, url=url, engine=engine) for index, url in enumerate(urls)
    ]


def in_role(one: InstanceSettings, role: Role) -> InstanceSettings:
    """Returns the same instance in this role."""
    return one if one.role == role else one.model_copy(update={"role": role})


def of_ranks(one: InstanceSettings, num_ranks: int | None) -> InstanceSettings:
    """Returns the instance with its number of data-parallel ranks, where that is given. Raises `ConfigError` for a kind
    whose ranks cannot be named."""
    if num_ranks is None:
        return one
    if one.engine not in (kinds := ONLY_FOR["data_parallel_size"]):
        raise ConfigError(
            f"{one.role}_data_parallel_size is for {' and '.join(sorted(kinds))}, and {one.name!r} is {one.engine}"
        )
    return one.model_copy(update={"data_parallel_size": num_ranks})


def _of_rank(address: str | None, rank: int) -> str | None:
    """Returns the address of a data-parallel rank, where `address` is that of rank 0."""
    if address is None:
        return None
    head, _, port = address.rpartition(":")
    return f"{head}:{int(port) + rank}"


def _told(place: tuple[str, int | None]) -> str:
    url, rank = place
    return url if rank is None else f"{url} (data-parallel rank {rank})"


def is_one_model(one: InstanceSettings, other: InstanceSettings) -> bool:
    """Tells whether both may have the same model, as far as is known here."""
    return one.model is None or other.model is None or one.model == other.model


def check_models(fleet: Sequence[InstanceSettings]) -> None:
    """Raises `ConfigError` unless each instance has a counterpart with its model, and all instances of a model are of
    one kind.
    """
    for one, other in combinations(fleet, 2):
        if one.model is not None and one.model == other.model and one.engine != other.engine:
            raise ConfigError(
                f"instances.engine: {one.name!r} is {one.engine} and {other.name!r} is {other.engine}, and both have "
                f"the model {one.model!r}; give all instances of a model the same engine"
            )
    for one in fleet:
        others = [other for other in fleet if other.role != one.role]
        if not any(is_one_model(one, other) and one.engine == other.engine for other in others):
            known = ", ".join(f"{_model_of(other)} ({other.name!r}, {other.role})" for other in others)
            raise ConfigError(
                f"instances.model: {one.name!r} ({one.role}) has {_model_of(one)}, and the others {known}; "
                "a prefiller and a decoder work together only on the same model and with the same engine"
            )


def _model_of(one: InstanceSettings) -> str:
    return f"{'an unknown model' if one.model is None else repr(one.model)} on {one.engine}"


@lru_cache(maxsize=MAX_URLS_KNOWN)
def is_place(url: str) -> bool:
    if len(url) > MAX_URL_CHARS or not url.isprintable() or not _NOT_IN_URLS.isdisjoint(url):
        return False  # `urlsplit` takes such a url, and leaves some of it out
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number from 0 to 65535, or a bracket is left open
        return False


def ends_in_v1(url: str) -> bool:
    """Tells whether a url is the base of an OpenAI client, and not where the engine listens."""
    return urlsplit(url).path.rstrip("/").endswith("/v1")


@lru_cache(maxsize=MAX_URLS_KNOWN)
def listener(url: str) -> tuple[str, int]:
    """Returns the host and the port of a url for which `is_place` is true."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def check_service(service: InstanceSettings) -> None:
    """Raises `ConfigError` where the url is none of a service in DNS."""
    url = service.url.removeprefix(SERVICE_PREFIX)
    if not is_place(url):
        raise ConfigError(f"instances: the url {service.url!r} of {service.name!r} is not dns+http://name:port")
    host = urlsplit(url).hostname or ""
    with suppress(ValueError):
        ip_address(host)
        raise ConfigError(f"instances: the url {service.url!r} of {service.name!r} has an address; leave out dns+")
    if service.launch is not None:
        raise ConfigError(
            f"instances.launch: {service.name!r} cannot be started here, for its url {service.url!r} stands for the "
            "instances that DNS names"
        )


def is_link_local(host: str) -> bool:
    """Tells whether `host`, an address or a name, is a link-local address or one of a cloud's metadata service. A name
    is not resolved: only those are known that every cloud gives."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host.rstrip(".").lower() in _METADATA_NAMES
    if isinstance(address, IPv6Address):
        address = address.ipv4_mapped or address.sixtofour or _embedded(address)
    return address in _METADATA or any(address in network for network in _LINK_LOCAL)


def _embedded(address: IPv6Address) -> IPv4Address | IPv6Address:
    """Returns the IPv4 address that a NAT64 gateway makes of this one; the address itself where none does."""
    return IPv4Address(address.packed[-4:]) if address in _NAT64 else address


def check_names(fleet: Sequence[InstanceSettings]) -> None:
    for instance in fleet:
        if not is_place(instance.url):
            raise ConfigError(f"instances: the url {instance.url!r} of {instance.name!r} is not http://host:port")
    for what, counts in (
        ("name", Counter(instance.name for instance in fleet)),
        ("url", Counter(_told(instance.place) for instance in fleet)),
    ):
        twice = [value for value, number in counts.items() if number > 1]
        if twice:
            raise ConfigError(
                f"instances.{what}: the {what} {twice[0]!r} is used more than once; give each instance one of its own"
            )
    ranked = {instance.place[0] for instance in fleet if instance.data_parallel_rank is not None}
    for instance in fleet:
        if instance.data_parallel_rank is None and instance.place[0] in ranked:
            raise ConfigError(
                f"instances.data_parallel_rank: {instance.name!r} is all ranks of {instance.url}, and another instance "
                "is one of them; give every instance there a rank"
            )


def check_clashes(taken: Sequence[tuple[str, str, int]]) -> None:
    owners: dict[tuple[str, int], str] = {}
    for owner, host, port in taken:
        place = ("127.0.0.1" if host in ("localhost", "0.0.0.0", "::1", "::", "*") else host, port)
        if port and place in owners:
            raise ConfigError(f"{owners[place]} and {owner}: both use port {port} on {host}; give one of them another")
        owners[place] = owner
