"""Who serves an attempt. Prefiller and decoder are chosen independently of each other, each by its own policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdproxy.config import Role
from pdproxy.fleet.base import NO_HINTS, Policy, RoutingHints
from pdproxy.fleet.instance import Instance
from pdproxy.fleet.pool import Pool
from pdproxy.request.openai import GenerationRequest

MAX_HINT_BYTES = 64 * 1024
"""Of a prompt's text; prompts that begin alike for so long are alike enough."""


@dataclass(frozen=True, slots=True)
class Route:
    """Who serves an attempt."""

    prefiller: Instance
    decoder: Instance

    @property
    def keeper(self) -> Instance:
        """The one whose memory the slots guard."""
        return self.prefiller if self.prefiller.is_keeper else self.decoder


class Router:
    """Picks a `Route` among those who are ready. The policies see a snapshot of them; all memory is the policies'.

    `session_header` tells which requests belong together.
    """

    def __init__(self, pool: Pool, *, prefill_policy: Policy, decode_policy: Policy, session_header: str) -> None:
        self._pool = pool
        self._session_header = session_header.lower()
        self._policies: dict[Role, Policy] = {"prefill": prefill_policy, "decode": decode_policy}

    def check(self, model: str | None) -> None:
        """Raises `NotReady`, `ModelNotFound`, `InvalidRequest` where a pick would."""
        self._pool.check_named(model)
        self._pool.ready("prefill", model)
        self._pool.ready("decode", model)

    def pick(self, model: str | None, avoid: frozenset[str], hints: RoutingHints = NO_HINTS) -> Route:
        """`avoid` names instances that have failed this request; one of them is asked again only where nobody else is.

        Raises `NotReady`, `ModelNotFound`; `InvalidRequest` where a model must be named.
        """
        self._pool.check_named(model)
        prefillers = _without(self._pool.ready("prefill", model), avoid)
        decoders = _without(self._pool.ready("decode", model), avoid)
        return Route(self._pick("prefill", prefillers, hints), self._pick("decode", decoders, hints))

    def hints(
        self, request: GenerationRequest, prompt_ids: Sequence[int] | None, headers: Mapping[str, str]
    ) -> RoutingHints:
        """What the policies may go by: `headers` (names in lower case), the prompt's ids, else its start in JSON."""
        session = headers.get(self._session_header)
        if prompt_ids is not None:
            return RoutingHints(session=session, prompt=prompt_ids)
        raw = memoryview(request.fields[request.prompt_field])
        return RoutingHints(session=session, prompt=bytes(raw[:MAX_HINT_BYTES]))

    def has_other(self, name: str, model: str | None, avoid: frozenset[str]) -> bool:
        """Could an instance of the same role that is not in `avoid` take over from `name`?"""
        asked = self._pool.find(name)
        return asked is not None and any(
            instance.is_routable and instance.serves(model) and instance.name not in avoid
            for instance in self._pool.of_role(asked.role)
        )

    def _pick(self, role: Role, instances: Sequence[Instance], hints: RoutingHints) -> Instance:
        picked = self._policies[role].pick([instance.candidate() for instance in instances], hints)
        return next(instance for instance in instances if instance.name == picked.name)


def _without(candidates: list[Instance], avoid: frozenset[str]) -> list[Instance]:
    return [instance for instance in candidates if instance.name not in avoid] or candidates
