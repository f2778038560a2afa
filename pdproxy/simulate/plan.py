"""The module holds one simulation, as it is asked for: the fleet, the traffic, and what happens to them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pdproxy.config.settings import Settings
from pdproxy.loadtest.fault_schedule import Fault
from pdproxy.loadtest.slo import Slo
from pdproxy.simulate.simulated_link import Weather
from pdproxy.simulate.speed import Speed
from pdproxy.simulate.traffic import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Plan is one simulation. `num_warmup` requests come before those that count. A client that has no token after
    `patience_s` seconds leaves; None: it never does. For several `proxies` a leader admits, and what they and it say to
    each other takes `link_delay_s` seconds one way, and up to `link_jitter_s` more. A share `link_loss` of it is said
    again after `link_retransmit_s`. Each message costs the leader `message_cpu_s` seconds of a core."""

    prefillers: int
    decoders: int
    num_requests: int
    seed: int
    traffic: Traffic
    speed: Speed = field(default_factory=Speed)
    settings: Settings = field(default_factory=Settings)
    slo: Slo = field(default_factory=Slo)
    num_warmup: int = 0
    faults: tuple[Fault, ...] = ()
    stragglers: str = ""
    patience_s: float | None = None
    proxies: int = 1
    link_delay_s: float = 0.0002
    link_jitter_s: float = 0.0
    link_loss: float = 0.0
    link_retransmit_s: float = 0.2
    message_cpu_s: float = 0.0

    @property
    def name(self) -> str:
        several = f" behind {self.proxies} proxies" if self.proxies > 1 else ""
        return f"{self.prefillers}p{self.decoders}d{several}"

    @property
    def weather(self) -> Weather:
        """Returns what the links between fronts and leader are like."""
        return Weather(self.link_delay_s, self.link_jitter_s, self.link_loss, self.link_retransmit_s)

    @property
    def is_about_proxies(self) -> bool:
        """Tells whether anything is done to proxies, or to what lies between them."""
        return any(fault.whom == "leader" or fault.whom.startswith("front-") for fault in self.faults)

    def as_plain(self) -> dict[str, Any]:
        """Returns the plan for a JSON file."""
        traffic, settings = self.traffic, self.settings
        return {
            "prefillers": self.prefillers,
            "decoders": self.decoders,
            "rate": None if traffic.clients else traffic.rate,
            "arrivals": traffic.kind,
            "burstiness": traffic.burstiness if traffic.kind == "gamma" else None,
            "clients": traffic.clients or None,
            "think_s": traffic.think_s if traffic.clients else None,
            "lengths": str(traffic.sizes),
            **({"then": str(traffic.then)} if traffic.then is not None else {}),
            "groups": traffic.num_groups or None,
            "shared_share": traffic.shared_share if traffic.num_groups else None,
            "prefill_policy": settings.prefill_policy,
            "decode_policy": settings.decode_policy,
            "admission": settings.admission,
            "slo": str(self.slo) or None,
            "faults": [f"{one.at_s:g} {one.what} {one.whom}" for one in self.faults],
            "stragglers": self.stragglers or None,
            "patience_s": self.patience_s,
            **(
                {
                    "proxies": self.proxies,
                    "link_delay_s": self.link_delay_s,
                    "link_jitter_s": self.link_jitter_s,
                    "link_loss": self.link_loss,
                    "link_retransmit_s": self.link_retransmit_s,
                }
                if self.proxies > 1
                else {}
            ),
            "speed": msgspec.to_builtins(self.speed),
            "changed": json.loads(settings.model_dump_json(exclude_unset=True)),
        }


def prefill_capacity(speed: Speed, traffic: Traffic) -> float:
    """Returns the prompts per second that one prefiller can read at most, with batches as full as they get."""
    mean = traffic.means[0]
    num = max(1.0, speed.prefill_batch_tokens // mean)
    return num / speed.prefill_takes(round(num * mean))


def decode_capacity(speed: Speed, traffic: Traffic) -> float:
    """Returns the answers per second that one decoder can write at most."""
    batch = speed.max_batch
    tokens_per_s = batch / speed.step_takes(batch)
    return tokens_per_s / max(1.0, traffic.means[1] - 1.0)


def rate_for(load: float, prefillers: int, decoders: int, speed: Speed, traffic: Traffic) -> float:
    """Returns the requests per second at which the busier side carries `load` times the most it can do."""
    return load * min(prefillers * prefill_capacity(speed, traffic), decoders * decode_capacity(speed, traffic))
