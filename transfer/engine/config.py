"""The built-in engine's options. Each has one definition, for flags, environment (``PDENGINE_…``) and help."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, CliSuppress, SettingsConfigDict

from transfer.agents.nixl_options import PROGRESS_DELAY_US, NixlOptions
from transfer.errors import TransferError
from transfer.geometry import parse_size
from transfer.memory_budget import least_budget
from transfer.roles.allowed_hosts import AllowedHosts
from transfer.trust import AttemptKey, FleetKey

PROGRAM = "python -m transfer.engine"


class EngineSettings(BaseSettings):
    """A prefiller or decoder on torch and transformers, for laptops, tests and demonstrations."""

    model_config = SettingsConfigDict(
        env_prefix="PDENGINE_",
        cli_kebab_case=True,
        cli_prog_name=PROGRAM,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_exit_on_error=False,
        extra="forbid",
    )

    role: Literal["prefill", "decode", "both"] = Field(description="What other processes may ask of this one")
    model: Path = Field(description="Folder with config.json, weights and tokenizer of any decoder-only causal LM")
    served_model_name: str | None = Field(None, description="Name in the API; default: the model folder's name")
    host: str = Field("127.0.0.1", description="Address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0 takes any free one")
    receiver_host: str | None = Field(
        None, description="Address on which prefillers reach this decoder's receiver; default: --host"
    )
    receiver_port: int = Field(
        0, ge=0, le=65535, description="Port of that receiver; 0 takes any free one, told by GET /kv_buffer"
    )
    device: str = Field("cpu", description="Device that computes: cpu, cuda or cuda:N")
    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Dtype of weights and KV; auto takes the model's own"
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=256,
        description="Processes that divide each layer's heads between them, each with a cache and a PD buffer of the"
        " sizes given here. On CPUs, without --windowed",
    )
    chunk_size: int = Field(256, ge=1, description="Tokens per page; the same on every prefiller and decoder")
    pd_buffer_size: int = Field(256 << 20, description="Decoder: bytes that prefillers may fill, e.g. 2GiB")
    kv_cache_size: int = Field(512 << 20, description="Bytes of KV this engine computes with, e.g. 4GiB")
    prefix_cache: bool = Field(
        True,
        description="Keep the KV of prompts for those that begin alike, until its room is needed (models without"
        " windowed layers)",
    )
    kv_events: str | None = Field(
        None,
        pattern=r"^tcp://(\*|\[[0-9A-Fa-f:.]+\]|[\w.-]+):(\*|\d{1,5})$",
        description="Address at which it publishes what its prefix cache holds, as tcp://*:5557 (vLLM's wire)",
    )
    kv_events_replay: str | None = Field(
        None,
        pattern=r"^tcp://(\*|\[[0-9A-Fa-f:.]+\]|[\w.-]+):(\*|\d{1,5})$",
        description="Address at which it repeats what it has published",
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="Longest prompt + answer, tokens; default: the model's context, or what the cache holds",
    )
    layers_per_write: int | None = Field(
        None,
        ge=1,
        description="Prefiller: layers of a page that are sent together, as soon as the last of them is computed;"
        " default: as few as make 256 KiB",
    )
    max_num_seqs: int = Field(256, ge=1, description="Requests taken in at once; the next one is answered 503")
    max_body_bytes: int = Field(64 << 20, ge=1, description="Largest request body")
    memory_budget: int = Field(
        256 << 20, description="Bytes of request bodies held at once, beyond which a request is answered 503, e.g. 1GiB"
    )
    threads: int | None = Field(None, ge=1, description="Torch CPU threads; default: OMP_NUM_THREADS or torch's choice")
    reservation: Literal["whole", "incremental"] = Field(
        "whole",
        description="Decoder: grant a request all its pages or none (whole), or page by page (incremental: deadlocks"
        " under load unless the proxy's admission prevents it; only there to show that)",
    )
    windowed: bool = Field(
        True, description="Decoder: let a prompt larger than the PD buffer pass through it, while it is alone there"
    )
    heartbeat_s: float = Field(5.0, gt=0, description="Decoder: how often prefillers with attempts here must be heard")
    writer_timeout_s: float = Field(
        30.0,
        gt=0,
        description="Decoder: the attempts of a prefiller silent for this long fail; their pages are used again when"
        " it says that it writes no more, or its process is known to have ended",
    )
    fleet_key_file: Path | None = Field(
        None,
        description="File with the key that all prefillers and decoders share (pdproxy keys makes one): it locks the"
        " receivers to everybody else and names the chunks; default: PDENGINE_FLEET_KEY, else no key and no lock",
    )
    fleet_key: CliSuppress[str | None] = Field(None, repr=False)
    """The key itself, where there is no file. It comes from the environment, because every user of the machine can see
    command lines."""
    attempt_key_file: Path | None = Field(
        None,
        description="Decoder: file with the key that it shares with the proxy; only attempts that were signed with it"
        " get pages; default: PDENGINE_ATTEMPT_KEY, else no key and attempts of everybody who reaches the receiver",
    )
    attempt_key: CliSuppress[str | None] = Field(None, repr=False)
    """The attempt key itself, in the same way as `fleet_key`."""
    notify_hosts: str = Field(
        "",
        description="Decoder: proxies that may be told of KV, separated by commas: HOST or HOST:PORT, where HOST is an"
        " address, a network, a name, *.NAME or *; default: with an attempt key the one that the proxy signed, else"
        " those on this machine",
    )
    data_plane: Literal["thread", "process"] = Field(
        "thread",
        description="Prefiller: where KV is sent from: a thread of this process, or a process of its own, which a busy"
        " engine does not slow down, and whose end costs the requests that it was sending and not the engine",
    )
    nixl_backends: str = Field("UCX", description="NIXL backends, separated by commas; only UCX is used so far")
    nixl_progress_delay_us: int = Field(
        PROGRESS_DELAY_US,
        ge=1,
        description="Decoder: how long NIXL's progress thread sleeps when nothing wakes it; 1000 where KV comes over"
        " plain TCP, for 2 % of a core",
    )
    nixl_threads: int | None = Field(
        None, ge=1, description="UCX threads that copy; more than one helps only where there are cores to spare"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe messages that are logged"
    )

    @field_validator("pd_buffer_size", "kv_cache_size", "max_body_bytes", "memory_budget", mode="before")
    @classmethod
    def _size(cls, value: object) -> object:
        return parse_size(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _receiver_can_be_reached(self) -> Self:
        if self.role != "prefill" and (self.receiver_host or self.host) in ("0.0.0.0", "::"):
            raise ValueError("receiver_host must be an address that prefillers can connect to, not a wildcard")
        return self

    @model_validator(mode="after")
    def _events_are_published(self) -> Self:
        if self.kv_events_replay is not None and self.kv_events is None:
            raise ValueError("kv_events_replay needs kv_events, the address at which they are published")
        return self

    @model_validator(mode="after")
    def _a_body_fits_in(self) -> Self:
        if self.memory_budget < (least := least_budget(self.max_body_bytes)):
            raise ValueError(f"memory_budget must be at least {least} bytes for a body of max_body_bytes")
        return self

    @model_validator(mode="after")
    def _ranks_can_be_started(self) -> Self:
        if self.tensor_parallel_size > 1 and self.device != "cpu":
            raise ValueError("tensor_parallel_size above 1 needs device cpu: the built-in engine adds up over sockets")
        return self

    @model_validator(mode="after")
    def _keys_can_be_read(self) -> Self:
        try:
            _ = self.fleet, self.attempts, AllowedHosts(self.proxies)
        except TransferError as error:
            raise ValueError(str(error)) from None
        return self

    @model_validator(mode="after")
    def _nixl_options_agree(self) -> Self:
        _ = self.nixl_options
        return self

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model.resolve().name

    @property
    def fleet(self) -> FleetKey | None:
        """The fleet's key, or None. Raises `TransferError` where what is given is no key; so does `attempts`."""
        return FleetKey.find(self.fleet_key, self.fleet_key_file)

    @property
    def attempts(self) -> AttemptKey | None:
        return AttemptKey.find(self.attempt_key, self.attempt_key_file)

    @property
    def proxies(self) -> tuple[str, ...]:
        """The patterns of `notify_hosts`."""
        return tuple(part.strip() for part in self.notify_hosts.split(",") if part.strip())

    @property
    def nixl_options(self) -> NixlOptions:
        """The settings of NIXL agents. Raises `ValueError` where they contradict each other."""
        threads = {"UCX": {"num_threads": str(self.nixl_threads)}} if self.nixl_threads else {}
        return NixlOptions(
            backends=tuple(self.nixl_backends.split(",")),
            backend_options=threads,
            progress_delay_us=self.nixl_progress_delay_us,
        )
