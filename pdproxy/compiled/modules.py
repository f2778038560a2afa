"""What is compiled: what every request, every token, or every simulated request goes through. Anything else would gain
nothing and take time.

Not here, though on the way: `clients.connection`, whose class is one of uvicorn's; `telemetry.series`, whose classes
are `prometheus_client`'s; `request.openai`, whose classes are msgspec's. A compiled class can have no base that is not
compiled.
"""

from __future__ import annotations

_EACH_REQUEST = {
    "limits": "its time limits",
    "alarms": "which are set and taken back among these",
    "flag": "what it waits for",
    "ids": "its ids",
    "retries": "its attempts are counted",
    "orchestrator": "its course",
    "attempt": "one attempt",
    "pairing": "its two legs",
    "legs": "one leg",
    "steps": "between them",
    "trip": "what it carries from one to the next",
    "flight": "its phases",
    "routes": "its beginning",
    "request.path": "its way is chosen",
    "request.priority": "a field that is looked for",
    "request.timeout": "another one",
    "request.numbers": "numbers that are none",
    "request.tokens": "its size",
    "request.bounds": "or what it cannot exceed",
    "fleet.token_counts": "which is asked for where pages are few",
    "admission.admission": "it asks for pages",
    "admission.kernel": "and is bound to whoever has them",
    "admission.grant": "and is told of it",
    "admission.account": "which are granted",
    "admission.custody": "on these terms",
    "admission.drain": "and given back",
    "admission.line": "else it waits",
    "admission.orphans": "and what it leaves behind is seen to",
    "fleet.routing": "its prefiller and its decoder are picked",
    "fleet.pool": "out of these",
    "fleet.lineup": "in this order",
    "fleet.turns": "in turn",
    "fleet.policies": "by a policy",
    "fleet.ranking": "by load",
    "fleet.instance": "each of which counts it",
    "fleet.breaker": "and learns what became of it",
    "fleet.paging": "its prompt in pages",
    "engines.http1.client": "a call",
    "engines.http1.request_head": "its head",
    "engines.http1.origin": "its connection",
    "engines.http1.leg": "its answer",
    "engines.http1.head": "the answer's head",
    "reply.opening": "the client's answer begins",
    "clients.exchange": "the client's own exchange",
    "clients.headers": "the request's head",
    "clients.heads": "the answer's head",
    "clients.codings": "whether its body can be read",
    "telemetry.request_id": "its name",
    "telemetry.histogram": "how long each step took",
}
_EACH_TOKEN = {
    "engines.http1.framing": "where the body of an answer ends",
    "engines.http1.chunked": "chunk by chunk",
    "reply.pour": "from one connection to the other",
    "reply.relay": "or by way of a task",
    "reply.sse": "event by event",
    "reply.streamed": "until the last",
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
