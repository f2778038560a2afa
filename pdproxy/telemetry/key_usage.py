"""KeyUsage settles what requests of API keys are charged, counts it by the keys' names, and logs it where that is
wanted.

Names come from the operator's file alone, so that clients cannot make them more. Keys themselves are never here.
"""

from __future__ import annotations

import json
import logging

from prometheus_client import CollectorRegistry

from pdproxy.telemetry.log import Facts
from pdproxy.telemetry.record import RequestRecord
from pdproxy.telemetry.series import Counts

log = logging.getLogger("pdproxy.usage")


class KeyUsage:
    """KeyUsage takes each request that is over. Implements `RequestObserver`.

    `logs`: a line tells of each request of a client's, with or without a key.
    """

    def __init__(self, *, logs: bool = False) -> None:
        self._logs = logs
        self._requests = Counts("pdproxy_key_requests", "Finished requests, by key name", ("key_name", "outcome"))
        self._prompt = Counts("pdproxy_key_prompt_tokens", "Tokens of prompts with an answer", ("key_name",))
        self._output = Counts("pdproxy_key_output_tokens", "Tokens of answers", ("key_name",))
        self._limited = Counts("pdproxy_key_limited", "Requests beyond the limits of their key", ("key_name",))

    def register(self, registry: CollectorRegistry) -> None:
        """Has the registry's page show all of it."""
        for counted in (self._requests, self._prompt, self._output, self._limited):
            registry.register(counted)

    def request_finished(self, record: RequestRecord) -> None:
        charge = record.charge
        num_prompt, num_output = 0, 0
        if record.has_answer and record.is_counted:  # of several prompts, each has counted its own
            num_prompt, num_output = record.num_prompt_tokens or 0, record.num_output_tokens
        if charge is not None:
            charge.note(num_prompt, num_output)
        if record.prompt is not None:
            return  # the body that it is of comes last, and has the sum
        if charge is not None:
            charge.settle(has_answer=record.has_answer)
            num_prompt, num_output = charge.num_prompt_tokens, charge.num_output_tokens
        if record.key_name is not None:
            self._requests.add((record.key_name, record.outcome))
            self._prompt.add((record.key_name,), num_prompt)
            self._output.add((record.key_name,), num_output)
            if record.error == "rate_limit_exceeded":
                self._limited.add((record.key_name,))
        if self._logs and log.isEnabledFor(logging.INFO):
            log.info(UsageFacts(record, num_prompt, num_output))


class UsageFacts(Facts):
    """UsageFacts is the line of one request for accounting: JSON, in either format of the log."""

    title = "usage"

    def __init__(self, record: RequestRecord, num_prompt_tokens: int, num_output_tokens: int) -> None:
        super().__init__(
            {
                "key_name": record.key_name,
                "model": record.model,
                "num_prompt_tokens": num_prompt_tokens,
                "num_output_tokens": num_output_tokens,
                "outcome": record.outcome.value,
                "status": record.status,
                "endpoint": record.endpoint,
                "request_id": record.request_id,
                "started_at": round(record.started_at, 3),
                "total_s": record.total_s,
            }
        )

    def __str__(self) -> str:
        return json.dumps(self.members)
