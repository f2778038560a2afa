"""Prefiller and decoder of different tensor-parallel sizes, every rank a process of its own, over real NIXL.

Whatever ranks send, every byte of every decoder rank's slab is compared with what must be there: the right heads in the
attempt's pages, and everywhere else what was there before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.helpers.zygote import START_LIMIT_S, Child, Zygote

pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")

pytestmark = pytest.mark.engine

MAX_RANKS = 4
WRITER_TIMEOUT_S = 1.5
SLACK_S = 1.0
SEED = 20
"""Of the order in which rank 0 uses its local pages; plus one for the next rank."""

HOLDERS = {
    (1, 1): [[0]],
    (1, 2): [[0], [0]],
    (1, 4): [[0], [0], [0], [0]],
    (2, 1): [[0, 1]],
    (2, 2): [[0], [1]],
    (2, 4): [[0], [0], [1], [1]],
    (4, 1): [[0, 1, 2, 3]],
    (4, 2): [[0, 1], [2, 3]],
    (4, 4): [[0], [1], [2], [3]],
    (8, 1): [[0, 1, 2, 3, 4, 5, 6, 7]],
    (8, 2): [[0, 1, 2, 3], [4, 5, 6, 7]],
    (8, 4): [[0, 1], [2, 3], [4, 5], [6, 7]],
}
"""(KV heads of a layer, ranks) → the heads of each rank: written down, not worked out."""

Layers = Sequence[Sequence[Any]]
"""The arguments of a `LayerKv` each, the number of heads first."""


def heads_of(layers: Layers, size: int, index: int) -> list[list[int]]:
    return [HOLDERS[layer[0], size][index] for layer in layers]


MODELS: dict[str, Layers] = {
    **{f"{heads} KV heads": [[heads, 8, 8]] * 3 for heads in (1, 2, 4, 8)},
    "keys longer than values": [[4, 8, 4]] * 3,
    "latent": [[1, 12, 0, "mla"]] * 3,
    "sliding and full": [[4, 8, 8, "sliding", 6], [4, 8, 8], [4, 8, 8, "sliding", 6], [4, 8, 8, "sliding", 6]],
    "sliding and full, of different heads": [[4, 8, 8, "sliding", 6], [2, 8, 8], [4, 8, 8, "sliding", 6]],
}


class Ranks:
    """Processes, each of which can be a rank of a prefiller or of a decoder."""

    def __init__(self, zygote: Zygote, num_senders: int, num_receivers: int) -> None:
        self.zygote = zygote
        self.senders = [zygote.fork("sending rank") for _ in range(num_senders)]
        self.receivers = [zygote.fork("receiving rank") for _ in range(num_receivers)]
        self.endpoints: list[list[Any]] = []

    def build(self, layers: Layers, num_senders: int, num_receivers: int, command: str = "build") -> Model:
        senders, receivers = self.senders[:num_senders], self.receivers[:num_receivers]
        asked = []
        for ranks, name in ((senders, "build"), (receivers, command)):
            for index, child in enumerate(ranks):
                heads = heads_of(layers, len(ranks), index)
                asked.append((child, child.say(name, layers, len(ranks), index, heads)))
        for child, number in asked:
            child.answer(number, START_LIMIT_S)
        return Model(layers, senders, receivers)


class Model:
    """A prefiller and a decoder of one model."""

    def __init__(self, layers: Layers, senders: list[Child], receivers: list[Child]) -> None:
        self.layers = layers
        self.senders = senders
        self.receivers = receivers
        self.endpoints = receivers[0].ask("start", ask_all(receivers[1:], "start_other"))

    def shuffle(self) -> None:
        """Let every sender use its local pages in an order of its own."""
        for index, sender in enumerate(self.senders):
            print(f"local pages of rank {index}: seed {SEED + index}")
            sender.ask("shuffle", SEED + index)

    def push(self, *attempts: tuple[str, int, int], is_layer_wise: bool) -> list[int]:
        """Attempts of (name, number, tokens), at the same time, and let the decoder check them. The bytes of each
        sender.
        """
        self.shuffle()
        asked = []
        for index, sender in enumerate(self.senders):
            for attempt in attempts:
                asked.append((index, sender.say("push", self.endpoints, *attempt, is_layer_wise)))
        sent = [0] * len(self.senders)
        for index, number in asked:
            sent[index] += self.senders[index].answer(number)
        taken = [(*attempt, self.receivers[0].ask("take", attempt[0])) for attempt in attempts]
        assert ask_all(self.receivers, "count_wrong", taken) == [0] * len(self.receivers)
        for attempt in attempts:
            self.receivers[0].ask("consumed", attempt[0])
        return sent

    def drop(self) -> None:
        ask_all([*self.senders, *self.receivers], "drop")


def ask_all(children: Sequence[Child], *command: Any) -> list[Any]:
    asked = [(child, child.say(*command)) for child in children]
    return [child.answer(number) for child, number in asked]


@pytest.fixture(scope="module")
def ranks(zygote: Zygote) -> Iterator[Ranks]:
    yield Ranks(zygote, MAX_RANKS, MAX_RANKS)
    zygote.reap_all()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("num_senders", "num_receivers"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_every_rank_gets_its_heads_and_nothing_else(
    ranks: Ranks, name: str, num_senders: int, num_receivers: int
) -> None:
    """Two prompts at once, then one in the same pages; layer by layer, then in whole pages."""
    model = ranks.build(MODELS[name], num_senders, num_receivers)
    sent = model.push(("a", 1, 18), ("b", 2, 7), is_layer_wise=True)
    model.push(("c", 3, 13), is_layer_wise=False)
    assert sum(sent) == sum(bytes_at(MODELS[name], num_receivers, num_tokens) for num_tokens in (18, 7))
    model.drop()


def bytes_at(layers: Layers, size: int, num_tokens: int) -> int:
    """What a prompt's KV has, over all ranks of a decoder, in chunks of 4 tokens; of a window only the tail."""
    total = 0
    for heads, key_dim, value_dim, *kind in layers:
        first = max(0, num_tokens - kind[1] + 1) // 4 if kind[:1] == ["sliding"] else 0
        copies = sum(len(held) for held in HOLDERS[heads, size])
        total += copies * (key_dim + value_dim) * 4 * 4 * (-(-num_tokens // 4) - first)
    return total


def test_one_rank_of_the_prefiller_is_killed(zygote: Zygote) -> None:
    """The decoder notices, and fails what lacks its heads, on every rank: an attempt of which all other writers' parts
    are complete, and one whose other writers are told to stop. Neither leaves anything, and the next one works with a
    new process in the dead one's place.
    """
    ranks = Ranks(zygote, 4, 2)
    layers = MODELS["8 KV heads"]
    model = ranks.build(layers, 4, 2, "build_impatient")
    model.shuffle()
    survivors = [model.senders[0], *model.senders[2:]]
    for attempt in ("a", "b"):
        ask_all(model.senders, "open", model.endpoints, attempt, 18)
        ask_all(survivors, "fill", attempt, 1, False)
    lost = [model.receivers[0].say("lost", attempt) for attempt in ("a", "b")]
    ask_all(survivors, "finish", "a")
    model.senders[1].kill()
    killed_at = time.monotonic()

    for number in lost:
        reason, known_at = model.receivers[0].answer(number, WRITER_TIMEOUT_S + SLACK_S)
        assert "the prefiller vanished" in reason
        assert known_at - killed_at < WRITER_TIMEOUT_S + SLACK_S
    assert all("cancelled" in outcome for outcome in ask_all(survivors, "failed", "b"))
    model.receivers[0].ask("all_free")
    ask_all(model.receivers, "begin_anew")

    heir = zygote.fork("sending rank")
    model.senders[1] = heir
    heir.ask("build", layers, 4, 1, heads_of(layers, 4, 1))
    model.push(("c", 2, 18), is_layer_wise=False)
    model.drop()
    for child in (*model.senders, *model.receivers):
        child.close()
