"""What the keys of a name may have per minute, and what a request is charged."""

from __future__ import annotations

import random

import pytest

from pdproxy.admission.key_limits import KeyOwner, Rates, _duration
from pdproxy.errors import RateLimited


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def owner(rpm: int | None = None, tpm: int | None = None, num_parts: int = 1) -> tuple[KeyOwner, Clock]:
    clock = Clock()
    return KeyOwner("shop", Rates(rpm, tpm), num_parts=num_parts, clock=clock), clock


def headers(of: KeyOwner) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in of.headers()}


def test_without_limits_nothing_is_refused_or_told() -> None:
    shop, _ = owner()
    for _ in range(1000):
        shop.begin().reserve(10**9, is_exact=True)
    assert shop.headers() == []


def test_requests_per_minute() -> None:
    shop, clock = owner(rpm=6)
    for _ in range(6):
        shop.begin()
    with pytest.raises(RateLimited) as caught:
        shop.begin()
    assert (caught.value.status, caught.value.retry_after_s) == (429, pytest.approx(10.0))
    told = headers(shop)
    assert told["x-ratelimit-limit-requests"] == "6"
    assert told["x-ratelimit-remaining-requests"] == "0"
    assert told["x-ratelimit-reset-requests"] == "1m0s"
    clock.now += 9.9
    with pytest.raises(RateLimited):
        shop.begin()
    clock.now += 0.1 + 1e-6
    shop.begin()
    clock.now += 3600
    assert headers(shop)["x-ratelimit-remaining-requests"] == "6"
    assert headers(shop)["x-ratelimit-reset-requests"] == "0ms"


def test_tokens_are_reserved_then_what_was_used_counts() -> None:
    shop, clock = owner(tpm=600)
    charge = shop.begin()
    charge.reserve(400, is_exact=True)
    assert headers(shop)["x-ratelimit-remaining-tokens"] == "200"
    with pytest.raises(RateLimited) as caught:
        shop.begin().reserve(300, is_exact=True)
    assert caught.value.retry_after_s == pytest.approx(10.0)
    charge.note(390, 510)
    charge.settle(has_answer=True)
    assert headers(shop)["x-ratelimit-remaining-tokens"] == "0"
    with pytest.raises(RateLimited) as caught:
        shop.begin()
    assert caught.value.retry_after_s == pytest.approx(30.1)  # 300 tokens of debt, and one
    clock.now += 30.1 + 1e-6
    shop.begin()


def test_a_request_without_an_answer_pays_no_tokens() -> None:
    shop, _ = owner(rpm=10, tpm=600)
    charge = shop.begin()
    charge.reserve(400, is_exact=True)
    charge.note(400, 5)  # one of several prompts, before another failed
    charge.settle(has_answer=False)
    charge.settle(has_answer=False)
    assert (charge.num_prompt_tokens, charge.num_output_tokens) == (0, 0)
    assert headers(shop)["x-ratelimit-remaining-tokens"] == "600"
    assert headers(shop)["x-ratelimit-remaining-requests"] == "9"


def test_what_is_never_possible_has_no_time_to_come_again() -> None:
    shop, _ = owner(tpm=100)
    with pytest.raises(RateLimited) as caught:
        shop.begin().reserve(101, is_exact=True)
    assert caught.value.retry_after_s is None


def test_an_upper_bound_refuses_nobody() -> None:
    shop, _ = owner(tpm=100)
    charge = shop.begin()
    charge.reserve(10_000, is_exact=False)
    assert headers(shop)["x-ratelimit-remaining-tokens"] == "0"
    charge.note(30, 10)
    charge.settle(has_answer=True)
    assert headers(shop)["x-ratelimit-remaining-tokens"] == "60"


def test_a_part_of_the_limits() -> None:
    shop, clock = owner(rpm=2, tpm=1000, num_parts=4)
    shop.begin().reserve(600, is_exact=True)  # more than a part, and less than the whole
    with pytest.raises(RateLimited) as caught:
        shop.begin()
    assert caught.value.retry_after_s == pytest.approx(120.0)  # half a request per minute
    clock.now += 120.0
    shop.begin()


def test_parts_together_keep_to_the_limit() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed={seed}")
    dice = random.Random(seed)
    parts = [owner(rpm=60, tpm=6000, num_parts=3) for _ in range(3)]
    num_requests = num_tokens = 0
    seconds = 600
    for _ in range(seconds * 4):
        for shop, clock in parts:
            clock.now += 0.25
            try:
                charge = shop.begin()
            except RateLimited:
                continue
            num_requests += 1
            try:
                charge.reserve(dice.randrange(1, 400), is_exact=dice.random() < 0.7)
            except RateLimited:
                charge.settle(has_answer=False)
                continue
            used = dice.randrange(1, 500), dice.randrange(0, 100)
            charge.note(*used)
            charge.settle(has_answer=True)
            num_tokens += sum(used)
    assert num_requests <= 60 * (seconds / 60 + 1)
    assert num_tokens <= 6000 * (seconds / 60 + 1) + 3 * 600  # each part may be in debt once
    assert num_tokens >= 0.8 * 100 * seconds


def test_limits_that_change_keep_what_is_left_of_the_others() -> None:
    shop, _ = owner(rpm=10, tpm=100)
    shop.begin().reserve(50, is_exact=True)
    shop.limit(Rates(10, 200))
    assert headers(shop)["x-ratelimit-remaining-requests"] == "9"
    assert headers(shop)["x-ratelimit-remaining-tokens"] == "200"
    shop.limit(Rates(None, 200))
    assert "x-ratelimit-limit-requests" not in headers(shop)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, b"0ms"), (0.0201, b"21ms"), (1, b"1s"), (1.52, b"1.6s"), (59.99, b"60s"), (360, b"6m0s")]
)
def test_durations_as_openai_writes_them(seconds: float, text: bytes) -> None:
    assert _duration(seconds) == text


@pytest.mark.parametrize("num_parts", [1, 4])
def test_prompts_of_one_body_count_as_one_prompt(num_parts: int) -> None:
    """A body within the limit is served at last, in how many parts the limit and the body may be."""
    shop, clock = owner(tpm=80, num_parts=num_parts)
    for _ in range(3):
        charge = shop.begin()
        for _ in range(4):
            charge.reserve(20, is_exact=True)  # the second one of four parts alone would be refused for ever
        charge.note(80, 0)
        charge.settle(has_answer=True)
        with pytest.raises(RateLimited):
            shop.begin()
        clock.now += 60.0 * num_parts


def test_a_body_that_was_refused_is_served_after_the_wait_that_it_was_told() -> None:
    shop, clock = owner(tpm=60)
    shop.use(20)
    charge = shop.begin()
    charge.reserve(30, is_exact=True)
    with pytest.raises(RateLimited) as caught:
        charge.reserve(20, is_exact=True)
    charge.settle(has_answer=False)
    assert caught.value.retry_after_s == pytest.approx(10.0)
    clock.now += 10.0
    charge = shop.begin()
    charge.reserve(30, is_exact=True)
    charge.reserve(20, is_exact=True)
