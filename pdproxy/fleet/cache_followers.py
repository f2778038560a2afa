"""CacheFollowers has the KV events of every instance followed for as long as it belongs to the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdproxy.config.instances import InstanceSettings
from pdproxy.fleet.instance import Instance
from pdproxy.fleet.pool import Pool
from pdproxy.kv_events.index import BlockBudget, KvIndex
from pdproxy.kv_events.subscriber import Context, Subscriber

LOOK_S = 1.0
"""Seconds between two looks at which instances there are. An instance that has just joined has nothing cached, or needs
longer than that to prove itself."""

Addresses = Callable[[InstanceSettings], tuple[str, str | None] | None]
"""A function that returns where an engine publishes its KV events and where it repeats them; None where it does not."""


class CacheFollowers:
    """CacheFollowers gives each instance of `pool` that publishes KV events a subscriber. All indexes have one budget.

    Mutable state: the task that follows each instance.
    """

    def __init__(self, pool: Pool, addresses: Addresses, budget: BlockBudget | None = None) -> None:
        self._pool = pool
        self._addresses = addresses
        self._budget = budget or BlockBudget()
        self._tasks: dict[Instance, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Follows the instances that there are, until cancelled."""
        context = Context()
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    self._look(group, context)
                    await asyncio.sleep(LOOK_S)
        finally:
            self._tasks.clear()
            context.destroy(linger=0)

    def _look(self, group: asyncio.TaskGroup, context: Context) -> None:
        """Begins to follow those that came, and stops following those that went."""
        present = set(self._pool.instances)
        for gone in self._tasks.keys() - present:
            self._tasks.pop(gone).cancel()
            if gone.kv_events is not None:
                gone.kv_events.index.drop("it left the fleet")
                gone.kv_events = None
        for instance in self._pool.instances:
            if instance in self._tasks or (addresses := self._addresses(instance.settings)) is None:
                continue
            instance.kv_events = Subscriber(KvIndex(self._budget), context, *addresses, name=instance.name)
            self._tasks[instance] = group.create_task(instance.kv_events.run())
        self._pool.knows_caches = bool(self._tasks)
