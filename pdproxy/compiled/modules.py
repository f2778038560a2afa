"""The compiled modules are listed here: every request, every token, or every simulated request goes through
them.

Anything else would gain nothing and take time. Some modules are on the way, but not in the list: `server.connection`,
whose class is one of uvicorn's; `telemetry.series`, whose classes are `prometheus_client`'s; `openai.request`, whose
classes are msgspec's. A compiled class can have no base that is not compiled.
"""

from __future__ import annotations

_EACH_REQUEST = {
    "aio.deadline": "its time limits",
    "aio.coarse_timer": "which are set and taken back among these",
    "aio.callback_event": "what it waits for",
    "ids": "its ids",
    "admission.retry_budget": "its attempts are counted",
    "orchestrator.orchestrator": "its course",
    "orchestrator.attempt": "one attempt",
    "orchestrator.disaggregated": "its two legs",
    "orchestrator.leg": "one leg",
    "orchestrator.leg_runner": "between them",
    "orchestrator.context": "what it carries from one to the next",
    "telemetry.attempt_record": "its phases",
    "server.routes": "its beginning",
    "orchestrator.path": "its way is chosen",
    "openai.priority": "a field that is looked for",
    "openai.timeout": "another one",
    "openai.numbers": "numbers that are none",
    "tokens.prompt_sizer": "its size",
    "tokens.bounds": "or what it cannot exceed",
    "fleet.token_counts": "which is asked for where pages are few",
    "admission.admission": "it asks for pages",
    "admission.kernel": "and is bound to whoever has them",
    "admission.grant": "and is told of it",
    "admission.account": "which are granted",
    "admission.custody": "on these terms",
    "admission.drain": "and given back",
    "admission.line": "else it waits",
    "admission.orphans": "and what it leaves behind is seen to",
    "fleet.routing.router": "its prefiller and its decoder are picked",
    "fleet.pool": "out of these",
    "fleet.routing.candidates": "in this order",
    "fleet.routing.rotation": "in turn",
    "fleet.routing.policies": "by a policy",
    "fleet.routing.load_index": "by load",
    "fleet.instance": "each of which counts it",
    "fleet.breaker": "and learns what became of it",
    "fleet.page_count": "its prompt in pages",
    "fronts.front_admission": "where another process admits it",
    "fronts.mirror": "to what that one says of the fleet",
    "engines.http.http1.client": "a call",
    "engines.http.http1.request_head": "its head",
    "engines.http.http1.origin": "its connection",
    "engines.http.http1.dial": "which is opened",
    "engines.http.http1.leg": "its answer",
    "engines.http.http1.head": "the answer's head",
    "openai.first_token": "the client's answer begins",
    "server.exchange": "the client's own exchange",
    "server.headers": "the request's head",
    "server.response_head": "the answer's head",
    "server.codings": "whether its body can be read",
    "telemetry.request_id": "its name",
    "telemetry.histogram": "how long each step took",
}
_EACH_TOKEN = {
    "engines.http.http1.framing": "where the body of an answer ends",
    "engines.http.http1.chunked": "chunk by chunk",
    "orchestrator.stream_pump": "from one connection to the other",
    "orchestrator.relay": "or by way of a task",
    "openai.sse": "event by event",
    "openai.token_count": "counted",
    "openai.client_stream": "until the last",
}

_EACH_SIMULATED = {
    "simulate.agenda": "what happens next",
    "simulate.adapter": "a request for simulated engines",
    "simulate.client": "who asks",
    "simulate.engines": "who answers",
    "simulate.prompts": "a prompt is read",
    "simulate.batch": "an answer is written",
    "simulate.legs": "and told of",
    "simulate.figures": "and measured",
}

MODULES = tuple(f"pdproxy.{name}" for name in (*_EACH_REQUEST, *_EACH_TOKEN, *_EACH_SIMULATED))
