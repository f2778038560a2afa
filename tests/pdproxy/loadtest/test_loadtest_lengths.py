"""How long prompts and answers are, as one names it on a command line."""

from __future__ import annotations

import random
from statistics import fmean, median

import pytest

from pdproxy.loadtest.errors import WorkloadError
from pdproxy.loadtest.lengths import Drawn, Fixed, Independent, Lengths, LogNormal, Mixed, Uniform, parse_lengths


def drawn(lengths: Lengths, num: int = 5000) -> list[int]:
    dice = random.Random(3)
    return [lengths.draw(dice) for _ in range(num)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512", Fixed(512)),
        ("fixed:7", Fixed(7)),
        ("uniform:16,900", Uniform(16, 900)),
        ("mixed:100,100000,0.02", Mixed(100, 100_000, 0.02)),
        ("lognormal:512,0.8", LogNormal(512, 0.8)),
        (" lognormal:512,0.8,4096 ", LogNormal(512, 0.8, 4096)),
    ],
)
def test_names_of_distributions(text: str, expected: Lengths) -> None:
    assert parse_lengths(text) == expected
    assert parse_lengths(str(expected)) == expected


@pytest.mark.parametrize("text", ["", "many", "uniform:1", "uniform:1,2,3", "normal:3,4", "lognormal:", "fixed:1e400"])
def test_what_is_no_distribution(text: str) -> None:
    with pytest.raises(WorkloadError, match="no distribution"):
        parse_lengths(text)


@pytest.mark.parametrize("text", ["0", "uniform:9,3", "uniform:0,3", "lognormal:0,1", "lognormal:90,1,50"])
def test_what_no_length_can_be(text: str) -> None:
    with pytest.raises(WorkloadError):
        parse_lengths(text)


def test_uniform_has_both_its_ends() -> None:
    assert set(drawn(Uniform(3, 6))) == {3, 4, 5, 6}


def test_lognormal_keeps_its_median_and_its_limit() -> None:
    lengths = drawn(LogNormal(400, 0.7, 2000))
    assert median(lengths) == pytest.approx(400, rel=0.05)
    assert fmean(lengths) > 450
    assert 1500 < max(lengths) <= 2000
    assert lengths.count(2000) <= 2


def test_a_short_one_is_one() -> None:
    assert min(drawn(LogNormal(1, 2))) == 1


def test_pairs_stay_together() -> None:
    pairs = [(10, 1), (20, 2)]
    dice = random.Random(1)
    assert {Drawn(pairs).draw(dice) for _ in range(50)} == set(pairs)
    with pytest.raises(WorkloadError):
        Drawn([])


def test_independent_lengths() -> None:
    assert Independent(Fixed(5), Fixed(2)).draw(random.Random()) == (5, 2)
    assert str(Independent(Fixed(5), Uniform(2, 3))) == "fixed:5 → uniform:2,3"
