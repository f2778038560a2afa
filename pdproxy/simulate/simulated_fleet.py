"""The module runs a whole fleet under simulated time: the proxy's own parts in front of engines that compute nothing,
as one proxy or as several that one leads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio

from pdproxy.config.settings import Settings
from pdproxy.config.values import Role
from pdproxy.errors import IntegrityError
from pdproxy.kv_signals.board import KvBoard
from pdproxy.openai.request import GenerationRequest
from pdproxy.simulate.adapter import LEASE_S
from pdproxy.simulate.client import SimulatedClient
from pdproxy.simulate.engines import Decoder, Engine, Prefiller
from pdproxy.simulate.simulated_link import Weather
from pdproxy.simulate.simulated_proxies import Proxies, Switch
from pdproxy.simulate.simulated_proxy import SimulatedProxy, settings_of
from pdproxy.simulate.speed import Speed
from pdproxy.telemetry.record import RequestRecord

SETTLE_S = 600.0
"""The seconds, at the end, for what was left behind to be settled; they are longer than an engine's lease."""


class SimulatedFleet:
    """SimulatedFleet is `num_prefillers` and `num_decoders`, all ready, behind the proxy's parts. It has to be made
    within the loop whose time it goes by.

    `seed` is for what the routing policies and the network leave to chance. With more than one of `num_proxies`, one
    more process leads them, and `weather` is that between them and it; `can_be_lost` says that faults are done to them.
    """

    def __init__(
        self,
        settings: Settings,
        speed: Speed,
        num_prefillers: int,
        num_decoders: int,
        seed: int,
        *,
        num_proxies: int = 1,
        weather: Weather | None = None,
        can_be_lost: bool = False,
    ) -> None:
        self.board = KvBoard(clock=asyncio.get_running_loop().time)
        switch = Switch()
        signals = self.board if num_proxies == 1 else switch
        lease_s = settings.engine_lease_s or LEASE_S
        decoding, prefilling = _names("decode", num_decoders), _names("prefill", num_prefillers)
        is_both = settings.role_controller
        self.decoders = {
            name: Decoder(name, speed, signals, lease_s=lease_s) for name in decoding + prefilling * is_both
        }
        self.prefillers = {name: Prefiller(name, speed, self.decoders) for name in prefilling + decoding * is_both}
        self.engines: dict[str, Engine] = {
            **{name: self.prefillers[name] for name in prefilling},
            **{name: self.decoders[name] for name in decoding},
        }
        """The engines in the roles in which they begin."""
        for engine in (*self.prefillers.values(), *self.decoders.values()):
            engine.is_both = is_both
        self.proxies: Proxies | None = None
        if num_proxies > 1:
            self.proxies = Proxies(
                settings,
                self.engines,
                switch,
                seed,
                num_proxies=num_proxies,
                weather=weather or Weather(),
                can_be_lost=can_be_lost,
            )
        else:
            known = {name: settings_of(engine) for name, engine in self.engines.items()}
            halves: dict[Role, Mapping[str, Engine]] = {"prefill": self.prefillers, "decode": self.decoders}
            self._alone = SimulatedProxy(settings, lambda one: halves[one.role][one.name], known, self.board, seed)
            self._alone.make_ready(self.engines)

    @property
    def proxy(self) -> SimulatedProxy:
        """Returns the proxy that admits now."""
        return self._alone if self.proxies is None else self.proxies.leader.proxy

    def serve(
        self, index: int, request: GenerationRequest, client: SimulatedClient, record: RequestRecord
    ) -> Coroutine[Any, Any, None]:
        """Returns the service of the request of this index, which has to be awaited to whatever end."""
        if self.proxies is None:
            return self._alone.orchestrator.serve(request, client, record)
        return self.proxies.serve(index, request, client, record)

    @asynccontextmanager
    async def running(self, *, is_probed: bool) -> AsyncIterator[None]:
        """Runs what goes on behind requests, while the block runs. `is_probed` means that the fleet is looked at, as it
        has to be where anybody may fall."""
        proxies = self.proxies
        async with anyio.create_task_group() as tasks:
            if proxies is None:
                tasks.start_soon(self._alone.reaper.run)
            else:
                proxies.begin(is_probed=is_probed)
            async with anyio.create_task_group() as looking:
                if is_probed and proxies is None:
                    looking.start_soon(self._alone.probe.run)
                    for follow in self._alone.followers:
                        looking.start_soon(follow)
                elif not is_probed:
                    looking.start_soon(self.proxy.look_at_memory, self.engines)
                yield
                looking.cancel_scope.cancel()
            if proxies is not None:
                proxies.mend()
            for engine in self.engines.values():  # nobody could say of the others what became of their pages
                engine.thaw()
                engine.start()
            with anyio.move_on_after(SETTLE_S):
                await (self._alone.reaper.idle() if proxies is None else proxies.settled())
                while any(decoder.pages_in_use for decoder in self.decoders.values()):  # noqa: ASYNC110
                    await anyio.sleep(1.0)  # until leases have run out, which takes no time here
            tasks.cancel_scope.cancel()

    def close(self) -> None:
        """Ends all processes."""
        if self.proxies is not None:
            self.proxies.end()

    @property
    def whom(self) -> dict[str, Any]:
        """Returns to whom anything can happen, by name."""
        return {**self.engines, **({} if self.proxies is None else self.proxies.whom)}

    def ledger(self) -> dict[str, int]:
        """Returns how many pages all decoders together have granted, got back and still hold, by the account of the
        proxy that admits now."""
        return self.proxy.ledger()

    @property
    def moves(self) -> list[tuple[float, str]]:
        """Returns the changes of role so far: when each ended, and the instance's name and new role."""
        return [] if self.proxies is not None else self._alone.moves

    @property
    def num_without_room(self) -> int:
        """Returns for how many transfers a decoder had no room when they came."""
        return sum(decoder.num_without_room for decoder in self.decoders.values())

    @property
    def num_given_way(self) -> int:
        """Returns how many answers gave way to others in the KV cache of their decoder."""
        return sum(decoder.num_given_way for decoder in self.decoders.values())

    def check_idle(self) -> None:
        """Raises `IntegrityError` unless everything that was granted, expected or written is settled."""
        if self.proxies is None:
            self._alone.pool.check_integrity()
            self.board.check_integrity()
        else:
            self.proxies.check_integrity()
        left = self._alone.left() if self.proxies is None else self.proxies.left()
        left["pages in use"] = sum(decoder.pages_in_use for decoder in self.decoders.values())
        if any(left.values()):
            raise IntegrityError(f"nobody asks any more, and there are left: {left}")


def _names(role: str, num: int) -> list[str]:
    return [f"{role}-{index}" for index in range(num)]
