"""What one instance answers as it is: who is asked, who takes over, and what the client is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdproxy.engines.http.base import EngineBroken
from pdproxy.errors import OutOfDescriptors
from tests.fakes.fake_apis import VECTOR, FakeApis
from tests.fakes.fake_engine import FakeEngine, error_reply, json_reply
from tests.fakes.proxy_harness import WAYS, Harness, Way, proxy_in_front_of

BODIES: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "a b c"},
    "/detokenize": {"tokens": [1, 2]},
    "/v1/embeddings": {"input": ["a", "b"]},
    "/rerank": {"query": "q", "documents": ["a", "b"]},
    "/v1/rerank": {"query": "q", "documents": ["a", "b"]},
    "/v2/rerank": {"query": "q", "documents": ["a", "b"]},
    "/score": {"text_1": "a", "text_2": "b"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/pooling": {"input": "a"},
    "/classify": {"input": "a"},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a b"}]},
}


def fleet(num: int = 1, **options: Any) -> dict[str, Any]:
    return {
        "prefillers": [FakeApis("prefill", **options) for _ in range(num)],
        "decoders": [FakeApis("decode", **options) for _ in range(num)],
    }


def asked(house: Harness, path: str) -> list[dict[str, Any]]:
    engines = (*house.prefillers, *house.decoders)
    return [one.body for engine in engines for one in engine.calls if one.path == path]


async def post(house: Harness, path: str, headers: dict[str, str] | None = None, **body: Any) -> Any:
    given = {"model": "tiny"} | BODIES.get(path, {}) | body
    return await house.call_raw(path, json.dumps(given).encode(), headers).answer()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("path", BODIES)
async def test_one_instance_answers(path: str, way: Way) -> None:
    async with proxy_in_front_of(**fleet(), way=way) as house:
        answer = await post(house, path, extra={"kept": "as it is"})
        assert answer.status == 200, answer.body
        assert answer.headers["x-pdproxy-path"] == "passed"
        [body] = asked(house, path)
        assert body == {"model": "tiny", **BODIES[path], "extra": {"kept": "as it is"}}


async def test_the_answer_keeps_its_bytes_and_the_load_is_shared() -> None:
    async with proxy_in_front_of(**fleet(2)) as house:
        for _ in range(8):
            assert (await post(house, "/v1/embeddings")).json()["data"][0]["embedding"] == VECTOR
        nums = [sum(one.path == "/v1/embeddings" for one in e.calls) for e in (*house.prefillers, *house.decoders)]
        assert nums == [2, 2, 2, 2]


@pytest.mark.parametrize("failure", [error_reply(500, "broken"), error_reply(503, "busy"), EngineBroken("reset")])
async def test_another_instance_takes_over(failure: Any) -> None:
    engines = fleet()
    async with proxy_in_front_of(**engines) as house:
        if isinstance(failure, Exception):
            house.prefiller.fail_at["passed"] = failure
        else:
            house.prefiller.fail_at["/tokenize"] = failure
        for _ in range(2):  # each of the two is asked first once
            assert (await post(house, "/tokenize")).status == 200


async def test_an_address_that_refuses_is_left_alone() -> None:
    async with proxy_in_front_of(**fleet()) as house:
        with house.client_of(house.prefiller).refusing():
            for _ in range(2):
                assert (await post(house, "/tokenize")).status == 200


async def test_who_is_asked_last_has_the_last_word() -> None:
    async with proxy_in_front_of(**fleet()) as house:
        for engine in (house.prefiller, house.decoder):
            engine.fail_at["/tokenize"] = error_reply(503, "busy", retry_after="7")
        answer = await post(house, "/tokenize")
        assert (answer.status, answer.headers["retry-after"], answer.error["message"]) == (503, "7", "busy")
        for engine in (house.prefiller, house.decoder):
            engine.fail_at["/tokenize"] = error_reply(500, "broken")
        answer = await post(house, "/tokenize")
        assert (answer.status, answer.error["code"]) == (502, "leg_failed")


async def test_a_refusal_is_passed_on_and_asked_of_nobody_else() -> None:
    async with proxy_in_front_of(**fleet()) as house:
        for engine in (house.prefiller, house.decoder):
            engine.fail_at["/v1/embeddings"] = error_reply(400, "The model does not support Embeddings API")
        answer = await post(house, "/v1/embeddings")
        assert (answer.status, answer.error["message"]) == (400, "The model does not support Embeddings API")
        assert len(asked(house, "/v1/embeddings")) == 1


async def test_faults_open_the_breaker() -> None:
    async with proxy_in_front_of(**fleet(), breaker_faults=3) as house:
        house.prefiller.fail_at["/tokenize"] = error_reply(500, "broken")
        for _ in range(8):
            await post(house, "/tokenize")
        instance = house.proxy.pool.find("prefill-0")
        assert instance is not None
        assert not instance.breaker.allows()
        assert (await post(house, "/tokenize")).status == 200
        house.proxy.pool.of_role("prefill")[0].breaker.reset()


@pytest.mark.parametrize("retries", [0, 1])
async def test_a_body_over_which_engines_stumble_takes_none_of_them_away(retries: int) -> None:
    """A client must not shut others out of a fleet with a body of which its engines' servers did not think."""
    async with proxy_in_front_of(**fleet(), breaker_faults=3, retries=retries) as house:
        for engine in (house.prefiller, house.decoder):
            engine.fail_at["/detokenize"] = error_reply(500, "Internal Server Error")
        for _ in range(10):
            assert (await post(house, "/detokenize")).status == 502
        assert all(one.breaker.allows() for one in house.proxy.pool.instances)
        assert (await house.post()).status == 200


async def test_too_few_descriptors() -> None:
    class Spent:
        def check(self, num_requests: int) -> None:
            raise OutOfDescriptors("no descriptors", retry_after_s=1.0)

    async with proxy_in_front_of(**fleet()) as house:
        house.proxy.orchestrator._descriptors = Spent()  # type: ignore[assignment]
        assert (await post(house, "/tokenize")).error["code"] == "out_of_descriptors"
        assert not asked(house, "/tokenize")


@pytest.mark.parametrize("said", [{"detail": "Not Found"}, {"error": {"message": "Not Found", "code": 404}}])
async def test_a_path_that_the_engine_does_not_have(said: dict[str, Any]) -> None:
    async with proxy_in_front_of(**fleet()) as house:
        for engine in (house.prefiller, house.decoder):
            engine.fail_at["/rerank"] = json_reply(said, 404)
        answer = await post(house, "/rerank")
        assert (answer.status, answer.error["code"]) == (404, "not_found")
        assert "vllm_nixl" in answer.error["message"]
        assert "/rerank" in answer.error["message"]


async def test_a_404_that_speaks_of_something_else_is_the_engines() -> None:
    async with proxy_in_front_of(**fleet()) as house:
        for engine in (house.prefiller, house.decoder):
            engine.fail_at["/rerank"] = error_reply(404, "The adapter `x` does not exist.")
        assert (await post(house, "/rerank")).error["message"] == "The adapter `x` does not exist."


async def test_unknown_model_and_bad_bodies() -> None:
    async with proxy_in_front_of(**fleet(), max_body_bytes="100B") as house:
        assert (await post(house, "/tokenize", model="other")).error["code"] == "model_not_found"
        assert (await house.call_raw("/tokenize", b"{").answer()).status == 400
        assert (await house.call_raw("/tokenize", b"[]").answer()).status == 400
        assert (await post(house, "/tokenize", prompt="x" * 200)).status == 413
        assert not asked(house, "/tokenize")


async def test_what_clients_may_not_set_is_left_out() -> None:
    async with proxy_in_front_of(**fleet()) as house:
        await post(house, "/pooling", kv_transfer_params={"do_remote_prefill": True}, bootstrap_room=1)
        assert asked(house, "/pooling") == [{"model": "tiny", "input": "a"}]


async def test_a_model_that_no_canary_can_go_through_is_asked_all_the_same() -> None:
    """An engine for embeddings writes no text, so that it is never proven."""
    embedder = FakeApis("prefill", model="bge")
    embedder.fail_at["prefill"] = error_reply(400, "The model does not support Completions API")
    engines = fleet()
    async with proxy_in_front_of([*engines["prefillers"], embedder], engines["decoders"], wait=False) as house:
        from tests.fakes.proxy_harness import until

        await until(lambda: house.proxy.pool.is_ready and bool(house.proxy.pool.instances[1].models))
        answer = await post(house, "/v1/embeddings", model="bge")
        assert (answer.status, answer.headers["x-pdproxy-prefiller"]) == (200, "prefill-1")


async def test_a_client_that_leaves_ends_the_call() -> None:
    async with proxy_in_front_of(**fleet()) as house:
        for engine in (house.prefiller, house.decoder):
            engine.hang_at.add("passed")
        call = house.call_raw("/pooling", json.dumps({"model": "tiny", "input": "a"}).encode())
        from tests.fakes.proxy_harness import until

        await until(lambda: bool(asked(house, "/pooling")))
        call.leave()
        await call.ended()
        assert [*house.prefiller.closed, *house.decoder.closed] == ["/pooling"]


async def test_a_deadline_of_the_clients_own() -> None:
    async with proxy_in_front_of(**fleet()) as house:
        for engine in (house.prefiller, house.decoder):
            engine.hang_at.add("passed")
        answer = await post(house, "/pooling", timeout=0.05)
        assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")


async def test_a_silent_instance_is_not_waited_for_until_the_end() -> None:
    async with proxy_in_front_of(**fleet()) as house:
        passing = house.proxy.orchestrator.passing
        from dataclasses import replace

        passing.limits = replace(passing.limits, answer_s=0.05)
        house.prefiller.hang_at.add("passed")
        for _ in range(2):
            assert (await post(house, "/pooling")).status == 200


async def test_what_is_counted() -> None:
    async with proxy_in_front_of(**fleet(), by_front=False) as house:
        await post(house, "/rerank")
        await post(house, "/v2/rerank")
        page = (await house.get("/metrics")).body.decode()
        assert 'pdproxy_requests_total{outcome="done",path="passed",reason="rerank"} 2.0' in page
        assert 'leg="pass"' in page
        [last, _] = house.proxy.recent.facts()
        assert (last["path"], last["endpoint"], last["status"]) == ("passed", "/v2/rerank", 200)


async def test_nobody_is_asked_while_the_proxy_ends() -> None:
    async with proxy_in_front_of(**fleet()) as house:
        house.proxy.orchestrator.stop_accepting()
        assert (await post(house, "/tokenize")).error["code"] == "shutting_down"


async def test_version_and_ping() -> None:
    async with proxy_in_front_of(**fleet()) as house:
        assert (await house.get("/version")).json() == {"version": "0.32.0"}
        for method in ("GET", "POST"):
            answer = await house.call_raw("/ping", b"", method=method).answer()
            assert (answer.status, answer.body) == (200, b"")
        house.proxy.orchestrator.stop_accepting()
        assert (await house.get("/ping")).status == 503
    async with proxy_in_front_of([FakeEngine("prefill")], [FakeEngine("decode")]) as house:
        assert (await house.get("/version")).error["code"] == "not_found"


async def test_adapters_are_models_of_the_instances_that_list_them() -> None:
    plain, with_lora = fleet(), fleet(adapters=("poet", "clerk"))
    prefillers = [*plain["prefillers"], *with_lora["prefillers"]]
    async with proxy_in_front_of(prefillers, [*plain["decoders"], *with_lora["decoders"]]) as house:
        models = (await house.get("/v1/models")).json()["data"]
        assert [(one["id"], one.get("parent")) for one in models] == [
            ("clerk", "tiny"),
            ("poet", "tiny"),
            ("tiny", None),
        ]
        assert (await house.get("/v1/models/poet")).json()["parent"] == "tiny"
        for path, body in (
            ("/v1/completions", {"prompt": "a b"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "a"}]}),
            ("/tokenize", {"prompt": "a b"}),
        ):
            for _ in range(3):
                answer = await post(house, path, model="poet", max_tokens=4, **body)
                assert answer.status == 200, answer.body
                served = {answer.headers.get("x-pdproxy-prefiller"), answer.headers.get("x-pdproxy-decoder")} - {None}
                assert served <= {"prefill-1", "decode-1"}, path
        assert (await post(house, "/v1/completions", model="nobody", prompt="a")).status == 404
