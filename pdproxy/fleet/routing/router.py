"""Router chooses the prefiller and the decoder of an attempt independently of each other, each by its own policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from pdproxy.admission.grant import Chooser
from pdproxy.admission.line import Demand
from pdproxy.fleet.instance import Instance
from pdproxy.fleet.routing.candidate import NO_HINTS, RoutingHints
from pdproxy.fleet.routing.candidates import CandidateSet, Policy
from pdproxy.kv_events.index import PromptBlocks
from pdproxy.openai.request import GenerationRequest

MAX_HINT_BYTES: Final = 64 * 1024
"""Length in bytes to which a prompt's text is cut for hints; prompts that begin alike for so long are alike enough."""


class Router(Chooser):
    """Router picks among the instances that the kernel offers. All memory is the policies'.

    `session_header` tells which requests belong together.

    Mutable state: the lineups that last, by their members: models that the same instances serve share one.
    """

    def __init__(self, *, prefill_policy: Policy, decode_policy: Policy, session_header: str) -> None:
        self._session_header = session_header.lower()
        self._prefill_policy = prefill_policy
        self._decode_policy = decode_policy
        self._uses_hints = prefill_policy.uses_hints or decode_policy.uses_hints
        self._lasting: dict[tuple[Instance, ...], CandidateSet[Instance]] = {}

    def line_up(self, places: Sequence[Instance], *, is_lasting: bool) -> CandidateSet[Instance]:
        """Returns `places` as candidates of a pick: at least one, all of one role."""
        if not is_lasting:
            return CandidateSet(places)
        members = tuple(places)
        lineup = self._lasting.get(members)
        if lineup is None:
            lineup = self._lasting[members] = CandidateSet(members, is_lasting=True)
        return lineup

    def pick(self, lineup: CandidateSet[Instance], demand: Demand) -> Instance:
        """Returns one of `lineup`, by the policy of its role."""
        return self._policy(lineup).pick(lineup, demand.hints or NO_HINTS)

    def home(self, lineup: CandidateSet[Instance], demand: Demand) -> Instance | None:
        """Returns the one of `lineup` that has the demand's session; None where no session ties the demand."""
        return self._policy(lineup).home(lineup, demand.hints or NO_HINTS)

    def end(self, lineup: CandidateSet[Instance]) -> None:
        """Forgets `lineup`, because it is out of date."""
        lineup.end()
        self._lasting.pop(tuple(lineup.members), None)

    def _policy(self, lineup: CandidateSet[Instance]) -> Policy:
        return self._prefill_policy if lineup.members[0].role == "prefill" else self._decode_policy

    def is_tied(self, hints: RoutingHints) -> bool:
        """Tells whether a policy would rather have such a request wait for its home than go elsewhere."""
        return hints.session is not None and (self._prefill_policy.ties or self._decode_policy.ties)

    def condensed(self, hints: RoutingHints) -> RoutingHints:
        """Returns hints by which both policies choose as by `hints`, and which are short."""
        if hints.prompt is None:
            return hints
        key = self._prefill_policy.key(hints.prompt) or self._decode_policy.key(hints.prompt)
        return RoutingHints(session=hints.session, key=key)

    def hints(
        self,
        request: GenerationRequest,
        prompt_ids: Sequence[int] | None,
        headers: Mapping[str, str],
        blocks: PromptBlocks | None = None,
    ) -> RoutingHints:
        """Returns what the policies may go by: `headers` (names in lower case), the prompt's ids, or else its start in
        JSON; and the prompt's blocks.

        It returns no hints where no policy goes by any.
        """
        if not self._uses_hints:
            return NO_HINTS
        session = headers.get(self._session_header)
        if prompt_ids is not None:
            return RoutingHints(session=session, prompt=prompt_ids, blocks=blocks)
        start = memoryview(request.fields[request.prompt_field])[:MAX_HINT_BYTES]
        return RoutingHints(session=session, prompt=start, blocks=blocks)
