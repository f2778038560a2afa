"""The module finds out whether admission ever promised pages that were not free: it reads the decoders' own count of
attempts that had to wait.

A decoder grants pages first come first served, and lets an attempt wait while they are not free. An attempt that the
proxy has admitted should never have to wait: its pages were set aside before its prefiller was asked. Attempts of a
proxy that was killed may still ask for pages after its successor has looked, until their engines' lease is over; those
that wait then are counted by themselves.

It also finds out whether the engines themselves are too slow, by asking them past the proxy.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from scripts.dev.soak.outages import Outages
from scripts.dev.soak.plan import ENGINE_LEASE_S, MODEL, REQUEST_TIMEOUT_S, EnginePlan, Plan
from scripts.dev.soak.questions import COMPLETIONS, MAX_ANSWER

LOOK_INTERVAL_S = 0.5
"""The seconds between two looks. Nobody knows what a decoder counts between the last look and its being killed."""
LOOK_TIMEOUT_S = 5.0
SLOW_S = REQUEST_TIMEOUT_S / 2
"""The seconds for the longest answer from which on a decoder is too slow: a request that has waited for its turn, and
for its prefiller, may run out of its time then."""


class Witness:
    """Witness looks at every decoder while the soak runs. A process takes its count with it, so each process counts by
    itself.

    Mutable state: `_waited`, by a decoder's name and the epoch of its process, the highest count that it told;
    `_after_kill`, how much of that came up soon after the proxy had been killed.
    """

    def __init__(self, plan: Plan, outages: Outages) -> None:
        self._outages = outages
        self._after_kill: dict[tuple[str, str], int] = {}
        self._decoders = [engine for engine in plan.engines if engine.role == "decode"]
        self._waited: dict[tuple[str, str], int] = {}

    @property
    def num_waited(self) -> int:
        """Returns the number of attempts that had to wait for pages at a decoder, as far as they were told; those of
        `num_after_kill` do not count."""
        return sum(self._waited.values()) - self.num_after_kill

    @property
    def num_after_kill(self) -> int:
        """Returns the number of attempts that had to wait soon after the proxy had been killed; `num_waited` does not
        count them."""
        return sum(self._after_kill.values())

    @property
    def by_decoder(self) -> dict[str, int]:
        """Returns the attempts that had to wait, soon after a kill or not, by the decoder's name, all of its processes
        together. Decoders at which no attempt waited are left out."""
        names = sorted({name for (name, _), count in self._waited.items() if count})
        return {name: sum(count for (who, _), count in self._waited.items() if who == name) for name in names}

    async def run(self) -> None:
        """Looks again and again, until cancelled."""
        async with httpx.AsyncClient(trust_env=False, timeout=LOOK_TIMEOUT_S) as client, asyncio.TaskGroup() as tasks:
            for decoder in self._decoders:
                tasks.create_task(self._watch(client, decoder))

    def note(self, name: str, buffer: dict[str, Any]) -> None:
        """Notes one look at ``/kv_buffer`` of the decoder `name`."""
        process = name, buffer["epoch"]
        before, count = self._waited.get(process, 0), buffer["num_reservations_waited"]
        if count <= before:
            return
        self._waited[process] = count
        if self._outages.began_within(ENGINE_LEASE_S + 2 * LOOK_INTERVAL_S):
            self._after_kill[process] = self._after_kill.get(process, 0) + count - before

    async def _watch(self, client: httpx.AsyncClient, decoder: EnginePlan) -> None:
        while True:
            try:
                response = await client.get(f"{decoder.url}/kv_buffer")
                self.note(decoder.name, response.raise_for_status().json())
            except httpx.HTTPError:
                pass  # killed, or frozen: it is asked again
            await asyncio.sleep(LOOK_INTERVAL_S)


class Pace:
    """Pace asks every decoder for an answer as long as they get, again and again, past the proxy.

    Where clients ask for more than the machine can do, requests run out of their time, which alone is no fault of the
    proxy.

    Mutable state: `outages`, the times in which a decoder was too slow, one for each decoder.
    """

    def __init__(self, plan: Plan) -> None:
        self._decoders = [engine for engine in plan.engines if engine.role == "decode"]
        self.outages = [Outages() for _ in self._decoders]

    async def run(self) -> None:
        """Asks until cancelled."""
        async with httpx.AsyncClient(trust_env=False, timeout=None) as client, asyncio.TaskGroup() as tasks:
            for decoder, outage in zip(self._decoders, self.outages, strict=True):
                tasks.create_task(self._watch(client, decoder, outage))

    async def _watch(self, client: httpx.AsyncClient, decoder: EnginePlan, outage: Outages) -> None:
        body = {"model": MODEL, "prompt": [10], "max_tokens": MAX_ANSWER, "ignore_eos": True}
        while True:
            try:
                async with asyncio.timeout(SLOW_S):
                    (await client.post(f"{decoder.url}{COMPLETIONS}", json=body)).raise_for_status()
            except TimeoutError:
                if not outage.is_down:
                    outage.begin()
            except httpx.HTTPStatusError:
                pass  # it is busy
            except httpx.HTTPError:
                outage.end()  # killed, which is an outage of its own
            else:
                outage.end()
            await asyncio.sleep(LOOK_INTERVAL_S)
