"""FleetCheck finds out what is wrong with a fleet: it asks every engine what it is, and has pairs serve a small
request.

It is a proxy without a port, made of the proxy's own parts, so that what it finds is what a proxy would meet.

What must always hold: a check ends within its time limit and what it takes to settle, whatever an engine does; and
every page that it was granted is given back, or told of as left. A violation would be seen as a command that does not
return, or as pages that a decoder calls occupied after a check which said nothing of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

import anyio

from pdproxy.assemble import MakeClient, Proxy, assemble
from pdproxy.config.instances import InstanceSettings, ends_in_v1
from pdproxy.config.settings import Settings
from pdproxy.engines.adapter import MalformedReply
from pdproxy.engines.http.base import EngineBroken, EngineRefused, EngineUnreachable, LocalFault
from pdproxy.engines.traits import KvReady
from pdproxy.errors import (
    Backpressure,
    DeadlineExceeded,
    EngineReply,
    HandoffMissing,
    KvFailed,
    KvNotTaken,
    LegFailed,
    LegNotTried,
    LegTimedOut,
    LegUnreachable,
    NeverFits,
    ProxyError,
    ReceiverNotReached,
    StaleTerm,
)
from pdproxy.fleet.instance import Health, Instance, UnlikeConfigured
from pdproxy.fleet.probe import KeyRefused, UnlikeItsKind
from pdproxy.fleet.tokenizer_check import sample_ids
from pdproxy.inspection.findings import InstanceResult, PairResult, Problem, Report
from pdproxy.inspection.noted import warnings_noted
from pdproxy.inspection.pairs import choose_pairs
from transfer.logs import printable
from transfer.trust import NOT_SIGNED

ASKED_AT_ONCE = 32
"""The most instances that are asked at the same time."""
TRIED_AT_ONCE = 4
"""The most pairs that are tried at the same time: a check is no load."""
PHASE_SHARE = 0.8
"""The share of a pair's time that one phase of its request may take, so that the error names the phase."""
SETTLE_S = 5.0
"""Seconds that engines have at the end to give back what is left."""
CLOSE_S = 10.0
"""Seconds that the check's own parts have to close, beyond `SETTLE_S`."""
SLOW_SHARE = 0.5
"""The share of a time limit beyond which an answer is called slow."""
MAX_SAID_BYTES = 300
"""The most bytes that are told of an engine's own words."""
MAX_CAUSES = 20
"""The most errors below one another that are looked at."""
ADVICE = {
    "role": "start the engine in that role, or change `role` of its table; two instances may have been mixed up",
    "model": "start the engine with that model, or change `model` of its table",
    "chunk_size": "give the engine that many tokens per page, or change `chunk_size` of its table",
    "receiver_ports": "change `receiver_ports` of its table, or leave it out: the decoder tells its ports itself",
}
_KV_LOST = (KvFailed, KvNotTaken, ReceiverNotReached)
NOT_TRIED = "raise --time-limit-s, or lower --max-pairs"


def quiet(settings: Settings) -> Settings:
    """Returns the settings of a proxy that only checks: it shares no port with one that runs, and each phase of its
    requests ends before the whole does."""
    limit_s = PHASE_SHARE * settings.canary_timeout_s
    names = ("prefill_timeout_s", "kv_timeout_s", "first_byte_timeout_s", "idle_timeout_s", "whole_timeout_s")
    changed = {name: min(getattr(settings, name), limit_s) for name in names}
    is_lmcache = settings.flag_engine == "lmcache" or any(one.engine == "lmcache" for one in settings.instances)
    port = settings.proxy_port if settings.notify_port is not None or is_lmcache else 0
    return settings.model_copy(update={**changed, "proxy_port": port, "otlp_endpoint": None})


class FleetCheck:
    """FleetCheck checks the fleet once and writes what it finds into `report`.

    `fleet` replaces the one that the settings name. `is_beside_proxy`: a proxy runs in front of this fleet, so that
    pairs whose KV signals only that proxy hears are not tried. Raises `ConfigError` where the settings cannot work.

    Mutable state: the report, which instances have answered, the scope of the work, and whether it was stopped.
    """

    def __init__(
        self,
        settings: Settings,
        report: Report,
        *,
        fleet: Sequence[InstanceSettings] | None = None,
        is_beside_proxy: bool = False,
        max_pairs: int = 64,
        limit_s: float = 120.0,
        make_client: MakeClient | None = None,
    ) -> None:
        self._settings = quiet(settings)
        self._report = report
        self._is_beside_proxy = is_beside_proxy
        self._max_pairs = max_pairs
        self._limit_s = limit_s
        with _warnings_noted(report):
            self.proxy: Proxy = assemble(self._settings, make_client=make_client, fleet=fleet, looks=False)
        self._results: dict[Instance, InstanceResult] = {}
        self._working: anyio.CancelScope | None = None
        self._is_stopped = False
        for one in self.proxy.pool.instances:
            self._results[one] = InstanceResult(one.name, one.role, one.url, one.adapter.name)
        report.instances = list(self._results.values())

    async def run(self) -> None:
        """Checks the fleet. Raises `ConfigError` where the port for KV signals cannot be had."""
        app = self.proxy.app
        with anyio.move_on_after(self._limit_s + SETTLE_S + CLOSE_S):
            async with app.router.lifespan_context(app):
                with anyio.move_on_after(self._limit_s) as self._working:
                    await self._ask_all()
                    await self._compare_tokenizers()
                    await self._try_pairs()
                if self._is_stopped:
                    self._report.add("not_tried", (), "the check was stopped", "run it again")
                elif self._working.cancelled_caught:
                    why = f"the check took longer than {self._limit_s:g} s; the rest was not tried"
                    self._report.add("not_tried", (), why, NOT_TRIED)
                await self._settle()
                self.proxy.hurry()  # engines have had their time already

    def stop(self) -> None:
        """Ends the check early. What its requests hold is still given back. Idempotent."""
        self._is_stopped = True
        if self._working is not None:
            self._working.cancel()

    # ── each instance by itself ─────────────────────────────────────────────────────────────────────────────────────

    async def _ask_all(self) -> None:
        turns = anyio.CapacityLimiter(ASKED_AT_ONCE)

        async def ask(instance: Instance) -> None:
            async with turns:
                await self._ask(instance)

        async with anyio.create_task_group() as tasks:
            for instance in self._results:
                tasks.start_soon(ask, instance)

    async def _ask(self, instance: Instance) -> None:
        """Asks one instance, and notes what it says or why it does not."""
        started, result = time.monotonic(), self._results[instance]
        limit_s = self._settings.probe_timeout_s * (2 * len(instance.adapter.looks) + 1)
        try:
            with anyio.fail_after(limit_s):
                await self.proxy.probe.ask(instance)
        except (EngineUnreachable, EngineBroken, MalformedReply, UnlikeItsKind, TimeoutError) as error:
            await self._not_answered(instance, error)
            return
        result.answers, result.look_s = True, round(time.monotonic() - started, 4)
        facts = instance.known_facts
        result.models = tuple(sorted(facts.models))
        result.num_pages = facts.num_pages if instance.is_owner else None
        result.chunk_size = facts.chunk_size
        if result.look_s > SLOW_SHARE * self._settings.probe_timeout_s:
            why = f"its answers took {result.look_s:.1f} s; one look may take {self._settings.probe_timeout_s:g} s"
            advice = "see why it is slow, or raise --probe-timeout-s: an instance that is too slow counts as down"
            self._report.add("slow", (instance.name,), why, advice, is_warning=True)

    async def _not_answered(self, instance: Instance, error: Exception) -> None:
        name, url = instance.name, instance.url
        said = printable(str(error), MAX_SAID_BYTES)
        add = self._report.add
        if isinstance(error, LocalFault):
            add(
                "local", (name,), f"this machine cannot open a connection to it: {said}", "see the limits of this shell"
            )
        elif _is_of_tls(error):
            advice = "a certificate must be for this host, in date by this machine's clock, and signed by one that "
            advice += "--engine-cafile has (default: a public one); for an engine without HTTPS give http://"
            add("tls", (name,), f"no TLS with {url}: {said}", advice)
        elif isinstance(error, EngineRefused):
            advice = "start the engine, or correct `url`; it must listen on an address that this machine reaches"
            add("unreachable", (name,), f"nobody listens at {url}: {said}", advice)
        elif isinstance(error, KeyRefused):
            advice = "give its key with --engine-api-key (or PDPROXY_ENGINE_API_KEY), the same for all engines"
            add("key", (name,), said, advice)
        elif isinstance(error, UnlikeConfigured):
            add(_of_field(error.field), (name,), said, ADVICE[error.field])
        elif await self._speaks_tls(instance):
            add("tls", (name,), f"it speaks HTTPS, and its url is {url}", "give https:// in `url`")
        elif isinstance(error, (UnlikeItsKind, MalformedReply)):
            await self._strange(instance, said)
        elif isinstance(error, EngineUnreachable):
            advice = "see whether the host is up, and whether its name and a firewall let this machine through"
            add("unreachable", (name,), f"no connection to {url}: {said}", advice)
        else:
            advice = (
                "see whether its process stands still or is overloaded; if it is only slow, raise --probe-timeout-s"
            )
            add("silent", (name,), f"it takes connections and does not answer: {said or 'it took too long'}", advice)

    async def _strange(self, instance: Instance, said: str) -> None:
        """Notes an answer that is not what the instance's kind gives, and of what kind it may be instead."""
        kind: str | None = None
        with contextlib.suppress(TimeoutError):
            with anyio.fail_after(2 * self._settings.probe_timeout_s):
                kind = await self.proxy.probe.other_kind(instance)
        advice = "correct `engine` of its table (or --engine)" if kind else "see its own log; it may be still starting"
        if ends_in_v1(instance.url):
            advice = "leave out /v1 at the end of `url`: the proxy adds it itself, and /health is not below it"
        why = f"{said}: {printable(kind, MAX_SAID_BYTES)}" if kind else said
        self._report.add("unlike_its_kind", (instance.name,), why, advice)

    async def _speaks_tls(self, instance: Instance) -> bool:
        """Tells whether an engine whose url says HTTP takes a TLS handshake."""
        place = urlsplit(instance.url)
        if place.scheme != "http":
            return False
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        try:
            async with asyncio.timeout(self._settings.connect_timeout_s):
                _, writer = await asyncio.open_connection(place.hostname, place.port or 80, ssl=context)
        except (OSError, TimeoutError):
            return False
        writer.transport.abort()
        return True

    # ── tokenizers ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _compare_tokenizers(self) -> None:
        """Compares the engines' tokenizers with one another, and with the proxy's where it has one."""
        turns = anyio.CapacityLimiter(ASKED_AT_ONCE)
        samples: dict[Instance, list[int]] = {}

        async def compare(instance: Instance) -> None:
            async with turns:
                await self._compare_with_ours(instance)
                with contextlib.suppress(
                    EngineReply, EngineUnreachable, EngineBroken, MalformedReply, TimeoutError
                ):  # not all of them tell
                    with anyio.fail_after(self._settings.probe_timeout_s):
                        samples[instance] = await sample_ids(instance)

        async with anyio.create_task_group() as tasks:
            for instance in self._answering():
                tasks.start_soon(compare, instance)
        firsts: dict[str, Instance] = {}
        for instance in [one for one in self._answering() if one in samples]:
            for model in sorted(instance.models):
                first = firsts.setdefault(model, instance)
                if samples[first] != samples[instance]:
                    why = f"their tokenizers make different tokens of a sample text, and both serve {model}"
                    advice = "start both from the same model folder, with the same release and tokenizer options"
                    self._report.add("tokenizer", (first.name, instance.name), why, advice)

    async def _compare_with_ours(self, instance: Instance) -> None:
        if self._settings.model is None and not self._settings.models:
            return
        await self.proxy.tokenizers.look(instance)
        report = self.proxy.counts.report_of(instance)
        if report is not None and report.agrees is False:
            advice = "prompts are counted by asking engines; for counts without that, name its own folder with --model"
            self._report.add("tokenizer", (instance.name,), report.why, advice, is_warning=True)

    # ── pairs ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _answering(self) -> list[Instance]:
        return [one for one, result in self._results.items() if result.answers]

    async def _try_pairs(self) -> None:
        answering = self._answering()
        prefillers = [one for one in answering if one.role == "prefill"]
        decoders = [one for one in answering if one.role == "decode"]
        self._note_misfits(prefillers, decoders)
        turns = anyio.CapacityLimiter(TRIED_AT_ONCE)
        pairs = choose_pairs(prefillers, decoders, _is_pair, self._max_pairs)
        if self._is_beside_proxy:
            pairs = self._without_signals(pairs)

        async def attempt(prefiller: Instance, decoder: Instance) -> None:
            async with turns:
                await self._try(prefiller, decoder)

        async with anyio.create_task_group() as tasks:
            for pair in pairs:
                tasks.start_soon(attempt, *pair)

    def _note_misfits(self, prefillers: Sequence[Instance], decoders: Sequence[Instance]) -> None:
        """Notes the instances that fit no counterpart of theirs: one finding for each, with the first reason."""
        for instance, others in [
            *((one, decoders) for one in prefillers),
            *((one, prefillers) for one in decoders),
        ]:
            of_model = [other for other in others if _share_model(instance, other)]
            misfits = [why for other in of_model if (why := instance.misfit(other)) is not None]
            if not of_model:
                other_role = "decoder" if instance.role == "prefill" else "prefiller"
                models = ", ".join(sorted(instance.models)) or "of its model"
                why = f"there is no {other_role} for {models} that answers"
                advice = f"see what is wrong with the {other_role}s; both sides must name their model alike"
                self._report.add("model", (instance.name,), why, advice)
            elif misfits:
                fits_some = len(misfits) < len(of_model)
                advice = "give both the same model, KV dtype, and tokens per page or block"
                if fits_some:
                    advice = f"nothing, while the fleet is upgraded: it serves with those that it fits; else {advice}"
                self._report.add("misfit", (instance.name,), misfits[0], advice, is_warning=fits_some)

    def _without_signals(self, pairs: list[tuple[Instance, Instance]]) -> list[tuple[Instance, Instance]]:
        """Returns the pairs that can be tried beside a running proxy. LMCache tells the address in its own
        configuration, which is that proxy's, that KV is there."""
        left = [pair for pair in pairs if pair[0].adapter.name != "lmcache"]
        if len(left) < len(pairs):
            why = "pairs with LMCache were not tried: they tell the running proxy that KV is there, and nobody else"
            advice = "what the proxy says of them counts: its own small request went through each that is ready"
            self._report.add("not_tried", (), why, advice, is_warning=True)
        return left

    async def _try(self, prefiller: Instance, decoder: Instance) -> None:
        """Sends one small request through the pair, and notes what became of it."""
        names: tuple[str, ...] = (prefiller.name, decoder.name)
        if Health.DOWN in (prefiller.health, decoder.health):
            gone = prefiller if prefiller.health is Health.DOWN else decoder
            why = f"it went down while it was checked: {gone.why}"
            self._report.add("unreachable", (gone.name,), why, "see its own log")
            return
        started, limit_s = time.monotonic(), self._settings.canary_timeout_s
        error: Exception | None = None
        try:
            with anyio.fail_after(limit_s):
                await self.proxy.orchestrator.prove(prefiller, decoder)
        except (ProxyError, EngineReply, TimeoutError) as failure:
            error = failure
        seconds = time.monotonic() - started
        self._report.pairs.append(PairResult(prefiller.name, decoder.name, error is None, round(seconds, 4)))
        for one in (prefiller, decoder):
            self._results[one].num_pairs += 1
            self._results[one].num_good_pairs += error is None
        if error is not None:
            problem, why, advice = self._explain(prefiller, decoder, error)
            if problem == "key" and not isinstance(error, EngineReply):  # the decoder's, whoever its prefiller is
                names = (decoder.name,)
            self._report.add(problem, names, printable(why, 2 * MAX_SAID_BYTES), advice)
        elif seconds > SLOW_SHARE * limit_s:
            why = f"a request for two tokens took {seconds:.1f} s"
            self._report.add("slow", names, why, "see what else these engines do", is_warning=True)

    def _explain(self, prefiller: Instance, decoder: Instance, error: Exception) -> tuple[Problem, str, str]:
        """Returns the name of what went wrong with a pair, why, and what to do."""
        says = f" ({error.engine_says})" if isinstance(error, LegFailed) and error.engine_says else ""
        why = f"{error}{says}"
        if isinstance(error, LegNotTried):
            return "local", why, "see the limits of this shell (ulimit -n)"
        if isinstance(error, StaleTerm):
            return "not_tried", why, "replicas admit for this fleet: check it by --url, at one of them"
        if isinstance(error, HandoffMissing):
            advice = f"start {prefiller.name} as a producer of KV (its KV connector's role), with its connector on"
            return "no_handoff", why, advice
        if isinstance(error, LegUnreachable):
            return "unreachable", why, "see the engine's own log"
        if isinstance(error, Backpressure):
            return "busy", why, "check again when there is less load"
        if isinstance(error, LegTimedOut):
            return "silent", why, f"see the log of {error.instance}: it answers looks and serves no requests"
        if NOT_SIGNED in why:
            why = f"{decoder.name} takes only attempts that are signed with the fleet's attempt key"
            if (self._settings.attempt_key or self._settings.attempt_key_file) is None:
                why += ", and this check has none"
            else:
                why += ", and this check has another one"
            return (
                "key",
                why,
                "give the fleet's key with --attempt-key-file (or PDPROXY_ATTEMPT_KEY), as the proxy has it",
            )
        if isinstance(error, (*_KV_LOST, DeadlineExceeded)):
            return "kv_lost", why, self._kv_advice(prefiller, decoder)
        if isinstance(error, EngineReply):
            if error.status in (401, 403):
                return "key", f"it answered HTTP {error.status}", "give the engines' key with --engine-api-key"
            words = error.content[:MAX_SAID_BYTES].decode(errors="replace")
            return "engine_refused", f"it answered HTTP {error.status}: {words}", "see the engine's own log"
        if isinstance(error, NeverFits):
            return "chunk_size", why, "give the decoder a larger PD buffer"
        if isinstance(error, TimeoutError):
            limit_s = self._settings.canary_timeout_s
            facts = decoder.known_facts
            if decoder.is_owner and facts.num_occupied and facts.num_occupied >= facts.num_pages:
                return "busy", f"no page of {decoder.name} came free in {limit_s:g} s", "check again with less load"
            return "silent", f"a small request took longer than {limit_s:g} s", "see the logs of both engines"
        return "failed", why, "see the logs of both engines"

    def _kv_advice(self, prefiller: Instance, decoder: Instance) -> str:
        """Returns what to look at where KV did not arrive."""
        adapter = decoder.adapter
        ports = sorted({f"{one.host}:{one.port}" for one in decoder.known_facts.receivers})
        advice = f"see whether {prefiller.name} reaches {decoder.name} for KV"
        advice += f" at {', '.join(ports)}" if ports else " (its side channel or bootstrap port, and the KV's network)"
        if adapter.traits.ready is KvReady.SIGNALS:
            advice += (
                f", and {decoder.name} this machine at {self.proxy.signal_address()} (--notify-host, --proxy-host)"
            )
        return advice

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _settle(self) -> None:
        """Waits until the engines have given everything back. Tells of pages of which that is not known."""
        with anyio.move_on_after(SETTLE_S):
            await self.proxy.reaper.idle()
        for instance in self._results:
            if instance.held:
                lease_s = instance.adapter.traits.lease_s
                why = f"it has not said that {instance.held} pages of the check's own requests are free"
                advice = f"nothing is to be done: it drops them by itself, after {lease_s:g} s at the latest"
                self._report.add("pages_left", (instance.name,), why, advice, is_warning=True)


def _is_pair(prefiller: Instance, decoder: Instance) -> bool:
    return _share_model(prefiller, decoder) and prefiller.misfit(decoder) is None


def _share_model(one: Instance, other: Instance) -> bool:
    return not one.models or not other.models or bool(one.models & other.models)


def _of_field(field: str) -> Problem:
    names: dict[str, Problem] = {
        "role": "role",
        "model": "model",
        "chunk_size": "chunk_size",
        "receiver_ports": "receiver_ports",
    }
    return names[field]


def _is_of_tls(error: BaseException | None) -> bool:
    """Tells whether an error lies in TLS, below what the client makes of it. Errors may be each other's context, so
    only so many are looked at."""
    for _ in range(MAX_CAUSES):
        if isinstance(error, ssl.SSLError):
            return True
        if error is not None:
            error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def _warnings_noted(report: Report) -> Iterator[None]:
    """Adds to the report what is logged as a warning meanwhile: mistakes in the configuration that a proxy survives."""
    with warnings_noted() as noted:
        yield
    for said in noted:
        report.add("configuration", (), said, "correct the option that it names", is_warning=True)
