"""The connector's options: the members of ``kv_connector_extra_config`` in vLLM's ``--kv-transfer-config``."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from transfer.errors import TransferError
from transfer.geometry import parse_size
from transfer.roles.receiver import ReceiverConfig
from transfer.trust import AttemptKey, FleetKey

KV_PORT = 5700
"""The port of ``/kv_buffer`` where none is given."""


class ConnectorSettings(BaseModel):
    """The options of one engine. Names that the built-in engine has, too, mean the same there."""

    model_config = ConfigDict(extra="forbid")

    host: str = Field("127.0.0.1", description="address on which prefillers and the proxy reach this engine")
    kv_port: int = Field(
        KV_PORT, ge=1, le=65535, description="port of GET /kv_buffer, which the proxy asks; rank N of several: + N"
    )
    receiver_port: int = Field(0, ge=0, le=65535, description="decoder: port of the receiver; 0 takes any free one")
    pd_buffer_size: int = Field(256 << 20, description="decoder: bytes per rank that prefillers may fill, e.g. 2GiB")
    chunk_size: int | None = Field(
        None,
        ge=1,
        description="tokens per page, the same on every prefiller and decoder: vLLM's block size (the default), or a "
        "divisor of it",
    )
    layer_by_layer: bool = Field(
        True,
        description="send layers while vLLM computes, for which it takes piecewise CUDA graphs alone; a decoder sends "
        "none, and decodes faster without",
    )
    model_name: str | None = Field(
        None, description="name of the weights, where the folders of equal ones have unlike names"
    )
    heartbeat_s: float = Field(5.0, gt=0, description="decoder: how often prefillers with attempts here must be heard")
    writer_timeout_s: float = Field(30.0, gt=0, description="decoder: silence after which a prefiller's attempts fail")
    fleet_key_file: Path | None = Field(None, description="file with the key of all prefillers and decoders")
    attempt_key_file: Path | None = Field(None, description="decoder: file with the key that it shares with the proxy")
    notify_hosts: tuple[str, ...] = Field((), description="decoder: proxies that may be told of KV")

    @field_validator("pd_buffer_size", mode="before")
    @classmethod
    def _size(cls, value: object) -> object:
        return parse_size(value) if isinstance(value, str) else value

    @classmethod
    def read(cls, extra: dict[str, object]) -> ConnectorSettings:
        """Reads the options. Raises `TransferError`, which names the member at fault."""
        try:
            settings = cls.model_validate(extra)
        except ValidationError as error:
            faults = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            raise TransferError(f"kv_connector_extra_config: {'; '.join(faults)}") from None
        _ = settings.fleet_key, settings.attempt_key
        return settings

    @property
    def fleet_key(self) -> FleetKey | None:
        """The fleet's key, or None. Raises `TransferError` where the file holds none; so does `attempt_key`."""
        return FleetKey.find(None, self.fleet_key_file)

    @property
    def attempt_key(self) -> AttemptKey | None:
        return AttemptKey.find(None, self.attempt_key_file)

    @property
    def receiver(self) -> ReceiverConfig:
        return ReceiverConfig(
            host=self.host,
            port=self.receiver_port,
            heartbeat_s=self.heartbeat_s,
            writer_timeout_s=self.writer_timeout_s,
            fleet_key=self.fleet_key,
            attempt_key=self.attempt_key,
            notify_hosts=self.notify_hosts,
        )
