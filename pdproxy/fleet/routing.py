"""Who serves an attempt. Prefiller and decoder are chosen independently of each other, each by its own policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdproxy.fleet.base import NO_HINTS, RoutingHints
from pdproxy.fleet.instance import Instance
from pdproxy.fleet.lineup import Policy
from pdproxy.fleet.pool import Pool
from pdproxy.request.openai import GenerationRequest

MAX_HINT_BYTES = 64 * 1024
"""Of a prompt's text; prompts that begin alike for so long are alike enough."""


@dataclass(slots=True)
class Route:
    """Who serves an attempt."""

    prefiller: Instance
    decoder: Instance

    @property
    def keeper(self) -> Instance:
        """The one whose memory the slots guard."""
        return self.prefiller if self.prefiller.is_keeper else self.decoder


class Router:
    """Picks a `Route` among those who are ready. All memory is the policies'.

    `session_header` tells which requests belong together.
    """

    def __init__(self, pool: Pool, *, prefill_policy: Policy, decode_policy: Policy, session_header: str) -> None:
        self._pool = pool
        self._session_header = session_header.lower()
        self._prefill_policy = prefill_policy
        self._decode_policy = decode_policy
        self._uses_hints = prefill_policy.uses_hints or decode_policy.uses_hints

    def check(self, model: str | None) -> None:
        """Raises what a pick would: for those who have to wait for something else before they pick."""
        self._pool.lineups(model)

    def pick(self, model: str | None, avoid: frozenset[str], hints: RoutingHints = NO_HINTS) -> Route:
        """`avoid` names instances that have failed this request; one of them is asked again only where nobody else is.

        Raises `NotReady`, `ModelNotFound`; `InvalidRequest` where a model must be named.
        """
        prefillers, decoders = self._pool.lineups(model)
        if avoid:
            prefillers, decoders = prefillers.without(avoid), decoders.without(avoid)
        return Route(self._prefill_policy.pick(prefillers, hints), self._decode_policy.pick(decoders, hints))

    def hints(
        self, request: GenerationRequest, prompt_ids: Sequence[int] | None, headers: Mapping[str, str]
    ) -> RoutingHints:
        """What the policies may go by: `headers` (names in lower case), the prompt's ids, else its start in JSON.

        Nothing, where none of them goes by any of that.
        """
        if not self._uses_hints:
            return NO_HINTS
        session = headers.get(self._session_header)
        if prompt_ids is not None:
            return RoutingHints(session=session, prompt=prompt_ids)
        return RoutingHints(session=session, prompt=memoryview(request.fields[request.prompt_field])[:MAX_HINT_BYTES])

    def has_other(self, name: str, model: str | None, avoid: frozenset[str]) -> bool:
        """Could an instance of the same role that is not in `avoid` take over from `name`?"""
        asked = self._pool.find(name)
        return asked is not None and any(
            instance.is_routable and instance.serves(model) and instance.name not in avoid
            for instance in self._pool.of_role(asked.role)
        )
