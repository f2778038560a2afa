"""ModelMetrics counts requests, tokens and the times between tokens by model.

A client can write any name as its model. So only names that the fleet serves become labels; all others are one.
"""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry

from pdproxy.fleet.pool import Pool
from pdproxy.telemetry.record import RequestRecord
from pdproxy.telemetry.series import Counts, Durations

OTHER: Final = "other"
"""The label of models that no instance serves, and of requests that name none where that does not tell which it is."""


class ModelMetrics:
    """ModelMetrics holds what is counted by model, of requests that are over.

    Mutable state, besides the counts: the names that an instance was found to serve. Those are the fleet's own words,
    so that clients cannot make them more. A name stays where its instance goes, because a counter must not vanish.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._known: set[str] = set()
        self._requests = Counts("pdproxy_model_requests", "Finished requests, by model", ("model", "outcome"))
        self._first_s = Durations("pdproxy_model_first_token_seconds", "Streams, until their first event", "model")
        self._token_s = Durations("pdproxy_time_per_output_token_seconds", "Mean time per token of a stream", "model")
        self._gap_s = Durations("pdproxy_longest_token_gap_seconds", "Longest wait within a stream", "model")
        self._prompt = Counts("pdproxy_model_prompt_tokens", "Tokens of prompts with an answer", ("model", "source"))
        self._output = Counts("pdproxy_output_tokens", "Tokens of answers", ("model", "source"))

    def register(self, registry: CollectorRegistry) -> None:
        """Has the registry's page show all of it."""
        for counted in (self._requests, self._first_s, self._token_s, self._gap_s, self._prompt, self._output):
            registry.register(counted)

    def request_finished(self, record: RequestRecord, first_s: float | None) -> None:
        """Counts one request. `first_s` is the time to its first token in seconds; None where it was no stream."""
        model, tokens = self._label(record), record.tokens
        self._requests.add((model, record.outcome))
        if first_s is not None:
            self._first_s.observe({model: first_s})
        if not record.has_answer:
            return
        self._output.add((model, tokens.source), tokens.num_output)
        self._prompt.add((model, "usage" if tokens.num_prompt is not None else "proxy"), record.num_prompt_tokens or 0)
        mean_gap_s = tokens.mean_gap_s if record.stream else None
        if mean_gap_s is not None:
            self._token_s.observe({model: mean_gap_s})
            self._gap_s.observe({model: tokens.longest_gap_s})

    def _label(self, record: RequestRecord) -> str:
        """Returns the name of the record's model where an instance serves it."""
        model = record.model
        if model in self._known:
            return model
        if model is None:
            return self._only_model(record)
        if any(instance.is_known_for(model) for instance in self._pool.instances):
            self._known.add(model)
            return model
        return OTHER

    def _only_model(self, record: RequestRecord) -> str:
        """Returns the one name of whoever served a request that names no model."""
        attempt = record.attempt
        instance = None if attempt is None else self._pool.find(attempt.decoder or attempt.prefiller or "")
        names = () if instance is None else instance.models
        if len(names) != 1:
            return OTHER
        [name] = names
        self._known.add(name)
        return name
