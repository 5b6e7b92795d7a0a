"""Penalties, cuts and log-probabilities are those of transformers' processors of logits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mtcli.core.inference.token_choice import (
    Sampling,
    choose,
    likeliest,
    penalised,
    probabilities,
    uniform,
)

VOCAB = 40


def case(seed):
    """(logits [V], tokens before)."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(VOCAB, generator=draw, dtype=torch.float64) * 3
    return logits, torch.randint(VOCAB, (9,), generator=draw).tolist()


@given(
    st.integers(0, 2**31), st.sampled_from([0.5, 1.0, 1.3]), st.sampled_from([0, 1, 5]),
    st.sampled_from([0.3, 0.9, 1.0]), st.sampled_from([0.0, 0.05, 0.4, 1.0]),
    st.sampled_from([0.7, 1.0, 1.8]), st.booleans(),
)  # fmt: skip
def test_probabilities_are_those_of_transformers_processors(
    seed, temperature, top_k, top_p, min_p, penalty, has_bias
):
    logits, tokens = case(seed)
    bias = {3: -4.5, tokens[0]: 2.5} if has_bias else {}
    theirs = LogitsProcessorList()
    if bias:
        theirs.append(SequenceBiasLogitsProcessor({(id,): value for id, value in bias.items()}))
    if penalty != 1.0:
        theirs.append(RepetitionPenaltyLogitsProcessor(penalty))
    theirs.append(TemperatureLogitsWarper(temperature))
    theirs += [TopKLogitsWarper(top_k)] if top_k else []
    theirs += [TopPLogitsWarper(top_p)] if top_p < 1.0 else []
    theirs += [MinPLogitsWarper(min_p)] if min_p else []
    expected = theirs(torch.tensor([tokens]), logits[None].clone())[0].softmax(0)
    sampling = Sampling(temperature, top_k, top_p, 0, min_p, penalty, bias)
    found = probabilities(penalised(logits, sampling, tokens), sampling)
    torch.testing.assert_close(found, expected)


def test_greedy_heeds_penalties_and_biases():
    logits, tokens = torch.tensor([1.0, 2.0, 3.0, -1.0]), [2]
    assert choose(logits, Sampling(), tokens, 0.0) == 2
    assert choose(logits, Sampling(repetition_penalty=2.0), tokens, 0.0) == 1
    assert choose(logits, Sampling(logit_bias={3: 9.0}), tokens, 0.0) == 3
    assert logits.tolist() == [1.0, 2.0, 3.0, -1.0], "the model's logits stay"


def test_a_draw_is_where_a_number_divides_the_sum_of_probabilities():
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    draws = {0.0: 0, 0.0999: 0, 0.1001: 1, 0.2999: 1, 0.3001: 2, 0.6001: 3, 1 - 2.0**-48: 3}
    for point, id in draws.items():
        assert choose(logits, Sampling(1.0), (), point) == id
    cut = Sampling(1.0, top_k=2)  # of 3/7 and 4/7
    assert [choose(logits, cut, (), x) for x in (0.0, 0.42, 0.43, 1 - 2.0**-48)] == [2, 2, 3, 3]


def test_numbers_are_uniform_and_depend_on_all_that_they_are_drawn_for():
    grid = [(s, p, k, i) for s in range(3) for p in range(10) for k in range(5) for i in range(40)]
    drawn = torch.tensor([uniform(*key) for key in grid], dtype=torch.float64)
    assert len(drawn.unique()) == len(grid) and drawn.min() >= 0 and drawn.max() < 1
    gap = (drawn.sort().values - (torch.arange(len(grid)) + 0.5) / len(grid)).abs().max()
    assert gap < 1.63 / len(grid) ** 0.5, "Kolmogorov's distance, at 1 %"


def test_log_probabilities_are_torchs_and_the_likeliest_come_first():
    logits, _ = case(1)
    logprob, top = likeliest(logits, 7, 5)
    expected = torch.log_softmax(logits, 0)
    assert logprob == pytest.approx(float(expected[7]))
    values, ids = expected.topk(5)
    assert [id for id, _ in top] == ids.tolist()
    assert [value for _, value in top] == pytest.approx(values.tolist())
    assert likeliest(logits, 7, 0)[1] == []
