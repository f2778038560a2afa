"""Roster keeps those instances in the fleet that a source wants there: a file, or what is discovered.

What must hold: what the source wants now is in the fleet, and what it has ceased to want gets no new attempts, from the
moment on at which it tells. A violation would be seen as requests that failed at an engine which was said to end, or as
an engine that is ready and gets none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from pdproxy.config.instances import InstanceSettings, in_role
from pdproxy.errors import InvalidRequest
from pdproxy.fleet.membership import Membership
from pdproxy.fleet.pool import Pool

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """Entry is one instance that a source wants. Another `incarnation` is another process, though its name and its
    address may be the same."""

    settings: InstanceSettings
    incarnation: str = ""

    @property
    def name(self) -> str:
        return self.settings.name

    def ranks(self) -> Iterator[Entry]:
        """Yields the instances that this one stands for: one for each data-parallel rank."""
        for settings in self.settings.ranks():
            yield replace(self, settings=settings)


class Roster:
    """Roster puts into the fleet what `origin` wants, and takes out what it does not want any more. Instances which
    others have added, by hand or from another source, are left alone. A role that an instance was given while it runs
    stays until the source wants the instance otherwise than before, or no longer.

    Mutable state: what is wanted and what of it is done, by name; what could not be done so far, and was told.
    """

    def __init__(self, origin: str, membership: Membership, pool: Pool, *, present: Iterable[Entry] = ()) -> None:
        """Takes what messages call the source, and those of its instances that are in the fleet already."""
        self._origin = origin
        self._membership = membership
        self._pool = pool
        self._done = {one.name: one for one in present}
        self._wanted = dict(self._done)
        self._told: set[str] = set()

    @property
    def num_wanted(self) -> int:
        return len(self._wanted)

    @property
    def is_done(self) -> bool:
        """Tells whether all that is wanted is in the fleet, and nothing else of this source."""
        return self._wanted == self._done

    def want(self, entries: Iterable[Entry]) -> None:
        """Takes note of what is wanted from now on, which `converge` makes so."""
        self._wanted = {one.name: one for one in entries}
        self._told &= self._wanted.keys()

    def tell_again(self) -> None:
        """Has the log say again what cannot be done."""
        self._told.clear()

    def converge(self) -> None:
        """Removes the instances that are not wanted any more, or not as they are; then adds the new ones. One that
        cannot be added yet is tried again with the next call."""
        for name in [name for name, one in self._done.items() if self._wanted.get(name) != one]:
            instance, done = self._pool.find(name), self._done[name].settings
            if instance is not None and in_role(instance.settings, done.role) == done:  # its role may have changed
                self._membership.retire(name)
            del self._done[name]
        self._add_all([one for name, one in self._wanted.items() if name not in self._done])

    def _add_all(self, entries: Sequence[Entry]) -> None:
        """Adds those that can be. A check looks at the whole fleet, so one is made for all of them, and for halves
        where something is wrong with one."""
        if not entries:
            return
        try:
            self._membership.check([one.settings for one in entries])
        except InvalidRequest:
            if len(entries) > 1:
                middle = len(entries) // 2
                self._add_all(entries[:middle])
                self._add_all(entries[middle:])
                return
            is_checked = False
        else:
            is_checked = True
        for one in entries:
            self._add(one, is_checked=is_checked)

    def _add(self, one: Entry, *, is_checked: bool) -> None:
        try:
            self._membership.add(one.settings, is_checked=is_checked)
        except InvalidRequest as error:
            if one.name not in self._told:
                log.warning("%s: %r cannot be added yet: %s", self._origin, one.name, error)
                self._told.add(one.name)
        else:
            self._told.discard(one.name)
            self._done[one.name] = one

    def __repr__(self) -> str:
        return f"<Roster of {self._origin}: {len(self._done)} of {len(self._wanted)}>"
