"""Both halves of the connector for vLLM with NIXL. Blocks and buffer are on the device that ``PDPROXY_TEST_DEVICE``
names.

`scripts/check_gpu` runs this on a GPU, where layers are sent behind CUDA events and loads are copied on a stream of
their own.
"""

from __future__ import annotations

import os
import random
import uuid

import pytest

from tests.helpers.on_device import DEVICE, ucx_tls
from tests.transfer.connectors.mini_vllm import HYBRID, PLAIN, MiniVllm, Request, until
from tests.transfer.connectors.test_vllm_connector import World
from transfer.plan.layout import KvLayout

SEED = int(os.environ.get("PDPROXY_TEST_SEED", "11"))

pytestmark = pytest.mark.engine


class DeviceWorld(World):
    """A prefiller and a decoder with NIXL, on the device."""

    def __init__(self, kv: KvLayout) -> None:
        from transfer.agents.nixl import NixlAgent

        def engine(name: str, *, sends: bool) -> MiniVllm:
            epoch = f"{name} {uuid.uuid4().hex}"
            return MiniVllm(
                name,
                lambda rank: NixlAgent(epoch, receives=not sends, device=DEVICE),
                sends=sends,
                num_blocks=60,
                kv=kv,
                device=DEVICE,
            )

        self.prefiller, self.decoder = engine("prefiller", sends=True), engine("decoder", sends=False)

    def close(self) -> None:
        self.prefiller.close()
        self.decoder.close()


@pytest.mark.parametrize("kv", [PLAIN, HYBRID], ids=["plain", "hybrid"])
def test_every_byte_of_many_prompts_arrives_while_blocks_are_given_to_others(
    kv: KvLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.setenv("UCX_TLS", ucx_tls("tcp,sm,self"))
    print(f"seed {SEED}")
    dice = random.Random(SEED)
    random.seed(SEED)
    world = DeviceWorld(kv)
    try:
        waiting: list[Request] = []
        answers: list[Request] = []
        left = 30
        while left or waiting or not all(one.state == "over" for one in answers):
            if left and len(waiting) < 4:
                waiting.append(world.prefill(world.prompt(dice.randint(1, 30))))
                left -= 1
            if waiting[:1] and (dice.random() < 0.5 or not left or len(waiting) == 4):
                first = waiting.pop(0)
                world.until_ready(first)
                answers.append(world.decode(first))
            world.step(dice.choice((1, 3, 7, 16)))
        assert [(one.request_id, one.wrong) for one in answers if one.wrong or one.failed_load] == []
        world.check_all_free()
        sent = world.prefiller.scheduler.take_statistics()
        assert sent is not None
        assert sent.num_pushes == len(answers) == 30
    finally:
        world.close()


def test_kv_that_was_not_copied_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above must be able to fail on this device."""
    pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.setenv("UCX_TLS", ucx_tls("tcp,sm,self"))
    world = DeviceWorld(PLAIN)
    try:
        prefilled = world.prefill(world.prompt(30))
        world.until_ready(prefilled)
        world.decoder.ranks[0].buffer.pages.zero_()
        answer = world.decode(prefilled)
        until(lambda: answer.state == "over", world.step, "no answer")
        assert answer.wrong or answer.failed_load
    finally:
        world.close()
