"""The next token: greedy as transformers does it, drawn by seed and position alone, reported as the model sees it."""

import math
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch

from transfer.engine.sampling import MAX_TOP_LOGPROBS, SamplingError, SamplingParams, fresh_seed, sample
from transfer.errors import TransferError

SEED = 20_240_229
GREEDY = SamplingParams(temperature=0)


def logits_of(*probabilities):
    return torch.tensor(probabilities).log()


def random_logits(size=64, seed=SEED):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3


def drawn(logits, params, num=4000, **also):
    """How often each token comes at positions 0 to num - 1."""
    return Counter(sample(logits, params, position=position, **also).token_id for position in range(num))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -2),
        ("frequency_penalty", 2.5),
        ("presence_penalty", -2.5),
        ("presence_penalty", math.nan),
        ("logit_bias", {5: 101.0}),
        ("logit_bias", {5: math.nan}),
        ("logprobs", -1),
        ("logprobs", MAX_TOP_LOGPROBS + 1),
    ],
)
def test_what_is_out_of_range_is_named(field, value):
    with pytest.raises(SamplingError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert isinstance(caught.value, TransferError)


def test_the_ends_of_the_ranges_are_allowed():
    SamplingParams(temperature=0, top_p=1, top_k=-1, frequency_penalty=-2, presence_penalty=-2, logprobs=0)
    SamplingParams(temperature=2, top_p=1e-9, top_k=1, frequency_penalty=2, presence_penalty=2, logprobs=20)
    SamplingParams(logit_bias={0: -100, 1: 100})


@pytest.mark.parametrize("token_id", [-1, 8])
def test_a_bias_on_a_token_that_is_not_there_is_named(token_id):
    params = SamplingParams(logit_bias={3: 1.0, token_id: 1.0})
    with pytest.raises(SamplingError, match=f"logit_bias must name token ids below 8, not {token_id}"):
        params.check_vocabulary(8)
    SamplingParams(logit_bias={0: 1.0, 7: 1.0}).check_vocabulary(8)


def test_greedy_takes_the_first_of_the_largest():
    assert sample(torch.tensor([1.0, 4.0, 4.0, 2.0]), GREEDY, position=0).token_id == 1
    assert sample(torch.tensor([1.0, 4.0, 4.0, 2.0]).bfloat16(), GREEDY, position=0).token_id == 1


def test_the_logits_are_left_as_they_are():
    logits = random_logits()
    before = logits.clone()
    params = SamplingParams(seed=1, logit_bias={1: 5.0}, frequency_penalty=1.0, top_k=5)
    sample(logits, params, position=0, counts={2: 1}, forbidden=[3])
    assert torch.equal(logits, before)


def test_a_draw_depends_on_seed_and_position_alone():
    logits, params = random_logits(), SamplingParams(seed=SEED)
    alone = [sample(logits, params, position=position).token_id for position in range(50)]
    torch.manual_seed(1)
    drawn(logits, SamplingParams(seed=7), num=20)
    torch.rand(3)
    continued = [sample(logits, params, position=position).token_id for position in reversed(range(50))]
    assert continued[::-1] == alone
    assert len(set(alone)) > 5
    assert [sample(logits, SamplingParams(seed=SEED + 1), position=p).token_id for p in range(50)] != alone


def test_a_draw_is_the_same_on_every_machine():
    """Known answers: a release that draws otherwise would break off answers that move between releases."""
    uniform = logits_of(*[1 / 100] * 100)
    tokens = [sample(uniform, SamplingParams(seed=SEED), position=position).token_id for position in range(8)]
    assert tokens == [49, 18, 70, 20, 97, 57, 44, 9]


def test_noise_in_the_logits_seldom_changes_the_draw():
    params = SamplingParams(seed=SEED, top_p=0.95)
    logits = random_logits(512)
    noisy = logits + 1e-5 * random_logits(512, seed=SEED + 1)
    same = [
        sample(logits, params, position=p).token_id == sample(noisy, params, position=p).token_id for p in range(1000)
    ]
    assert sum(same) >= 998


def test_tokens_come_as_often_as_their_probability_says():
    seen = drawn(logits_of(0.5, 0.3, 0.2), SamplingParams(seed=SEED))
    assert seen[0] / 4000 == pytest.approx(0.5, abs=0.04)
    assert seen[1] / 4000 == pytest.approx(0.3, abs=0.04)


def test_temperature_flattens_and_sharpens():
    logits = logits_of(0.6, 0.4)
    ratio = {t: drawn(logits, SamplingParams(seed=SEED, temperature=t))[0] / 4000 for t in (0.5, 2)}
    assert ratio[0.5] == pytest.approx(0.36 / 0.52, abs=0.04)
    assert ratio[2] == pytest.approx(0.6**0.5 / (0.6**0.5 + 0.4**0.5), abs=0.04)


@pytest.mark.parametrize("temperature", [1e-3, 1e-40, 5e-324])
def test_the_smallest_temperatures_are_greedy(temperature):
    assert set(drawn(random_logits(), SamplingParams(seed=SEED, temperature=temperature), num=50)) == {
        int(random_logits().argmax())
    }


@pytest.mark.parametrize(
    ("wishes", "possible"),
    [
        ({"top_k": 2}, {1, 2}),
        ({"top_k": 1}, {1}),
        ({"top_k": 100}, {0, 1, 2, 3}),
        ({"top_k": -1}, {0, 1, 2, 3}),
        ({"top_p": 0.5}, {1, 2}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 1e-9}, {1}),
        ({"top_p": 0.75}, {1, 2, 0}),
        ({"top_k": 3, "top_p": 0.75}, {1, 2}),
    ],
)
def test_top_k_and_then_top_p_leave_out_the_unlikely(wishes, possible):
    seen = drawn(logits_of(0.2, 0.4, 0.3, 0.1), SamplingParams(seed=SEED, **wishes), num=1000)
    assert set(seen) == possible


def test_penalties_count_what_was_generated():
    logits = torch.tensor([3.0, 2.5, 2.0, 0.0])
    presence = SamplingParams(temperature=0, presence_penalty=0.6)
    frequency = SamplingParams(temperature=0, frequency_penalty=0.3)
    assert sample(logits, presence, position=1, counts={0: 1}).token_id == 1
    assert sample(logits, presence, position=9, counts={0: 9, 1: 1}).token_id == 0
    assert sample(logits, frequency, position=1, counts={0: 1}).token_id == 0
    assert sample(logits, frequency, position=2, counts={0: 2}).token_id == 1
    assert sample(logits, SamplingParams(temperature=0, presence_penalty=-2), position=1, counts={2: 1}).token_id == 2


def test_bias_forces_and_bans():
    logits = random_logits()
    assert sample(logits, SamplingParams(temperature=0, logit_bias={9: 100}), position=0).token_id == 9
    seen = drawn(logits_of(0.5, 0.5), SamplingParams(seed=SEED, logit_bias={0: -100}), num=200)
    assert set(seen) == {1}


def test_what_is_forbidden_is_never_chosen_whatever_its_bias():
    logits = logits_of(0.8, 0.1, 0.1)
    for params in (SamplingParams(temperature=0, logit_bias={0: 100}), SamplingParams(seed=SEED, logit_bias={0: 100})):
        assert 0 not in drawn(logits, params, num=200, forbidden={0})


def test_logprobs_are_those_of_the_model():
    logits = logits_of(0.5, 0.25, 0.15, 0.1)
    params = SamplingParams(temperature=0, logprobs=2, logit_bias={3: 100}, presence_penalty=2.0)
    token = sample(logits, params, position=0, counts={0: 4}, forbidden=[1])
    assert token.token_id == 3
    assert token.logprob == pytest.approx(math.log(0.1))
    assert [token_id for token_id, _ in token.top_logprobs] == [0, 1]
    assert [math.exp(logprob) for _, logprob in token.top_logprobs] == pytest.approx([0.5, 0.25])


def test_logprobs_only_where_asked_for_and_no_more_than_there_are():
    logits = logits_of(0.5, 0.5)
    assert sample(logits, GREEDY, position=0).logprob is None
    assert sample(logits, GREEDY, position=0).top_logprobs == []
    none = sample(logits, SamplingParams(temperature=0, logprobs=0), position=0)
    assert (none.logprob, none.top_logprobs) == (pytest.approx(math.log(0.5)), [])
    assert len(sample(logits, SamplingParams(temperature=0, logprobs=20), position=0).top_logprobs) == 2


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=SEED)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_an_error(params, bad):
    with pytest.raises(ArithmeticError):
        sample(torch.tensor([0.0, bad, 1.0]), params, position=0)


def test_nothing_left_to_choose_is_an_error():
    with pytest.raises(ArithmeticError):
        sample(torch.zeros(2), GREEDY, position=0, forbidden=[0, 1])


def test_drawing_without_a_seed_is_an_error():
    with pytest.raises(ValueError, match="seed"):
        sample(torch.zeros(2), SamplingParams(), position=0)


def test_fresh_seeds_differ_and_fit_into_64_signed_bits():
    seeds = {fresh_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_params_can_be_had_without_torch():
    code = "import sys; sys.modules['torch'] = None; from transfer.engine.sampling import SamplingParams as S; S()"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
