"""Experts' capacity in evaluation: what fills rows or ranks up takes none of it."""

import numpy as np
import pytest
import torch
from ranks import run_ranks
from tiny import MOE, run_config

from mtcli.core.config.rules import forward_config
from mtcli.core.data.bert.row_format import Segments, lay_out
from mtcli.core.data.bert.special_tokens import SpecialTokens
from mtcli.core.evaluate.loglikelihood import request
from mtcli.core.evaluate.packing import plan, run
from mtcli.core.inference.bert_heads import head_outputs
from mtcli.core.inference.model import InferenceModel
from mtcli.core.inference.scoring import ScoreBatch
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import parameters
from mtcli.core.model.build import build_stages
from mtcli.core.model.init import initialise
from mtcli.core.parallel.groups import make_groups
from mtcli.core.parallel.ownership import unsharded
from mtcli.core.runtime.launch import Runtime
from mtcli.core.select.proxies import sequence_proxies

ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))
S, VOCAB = 16, MOE["vocab_size"]


def model_of(runtime, changes, *overrides):
    """A mixture with room for fewer tokens than its experts are sent, in float64."""
    sizes = {"max_seq_len": S, "init_std": 0.5, "capacity_factor": 0.6, "drop_policy": "position"}
    model = run_config(MOE | sizes | changes).model
    config = forward_config(model, ["train.precision=fp64", *overrides], runtime.world)
    layout = ParallelLayout.of(config.parallel, runtime.world)
    groups = make_groups(layout, runtime.rank, runtime.device)
    stages = build_stages(config, groups)
    initialise(unsharded(stages, parameters(model)), model, groups, 0, torch.float64)
    return InferenceModel(config, groups, stages)


def ids(size, seed):
    return np.random.default_rng(seed).integers(0, VOCAB, size).tolist()


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_items_have_the_scores_of_their_own_however_many_are_in_a_batch(policy):
    model = model_of(ALONE, {"drop_policy": policy})
    pairs = [(ids(size, size), ids(2, 99 - size)) for size in (12, 3, 7, 9, 2, 11)]
    requests = [request(*pair) for pair in pairs]
    alone, together = (plan(model, requests, tokens) for tokens in (1, 200))
    assert together.num_passes == 1 and together.num_tokens > together.num_unshared_tokens
    assert alone.num_tokens == alone.num_unshared_tokens
    found, expected = ([score.logprob for score in run(model, p)] for p in (together, alone))
    assert found == pytest.approx(expected, rel=1e-6)  # scores are float32
    without = model_of(ALONE, {"capacity_factor": 0.0, "drop_policy": policy})
    assert [s.logprob for s in run(without, alone)] != pytest.approx(expected, rel=1e-3)


def test_an_encoder_s_rows_have_the_same_logits_at_any_width():
    classifier = {"causal": False, "head": "classification", "num_labels": 3}
    model = model_of(ALONE, classifier, "model.tie_embeddings=false")
    special = SpecialTokens(0, 1, 2, 3, np.ones(VOCAB, bool), np.ones(VOCAB, bool))
    texts = [[Segments(np.array(ids(size, size)))] for size in (4, 2, 5)]
    rows = [
        lay_out(texts, width, special)._replace(
            classes=np.zeros(3, np.int64), class_weights=np.ones(3, np.float32)
        )
        for width in (7, S)
    ]
    narrow, wide = (output.logits_MC for output in head_outputs(model, rows))
    torch.testing.assert_close(wide, narrow, rtol=1e-12, atol=1e-12)


class Candidates:
    """Rows of tokens [n, s + 1] to choose from."""

    def __init__(self, tokens):
        self.tokens, self.seq_len = tokens.numpy(), tokens.shape[1] - 1

    def __len__(self):
        return len(self.tokens)

    def rows(self, numbers):
        return self.tokens[numbers]


def scores_and_proxies(runtime, spans):
    """Of rows of 16 tokens, in batches: a rank's tokens share an expert's capacity."""
    model = model_of(runtime, {"drop_scope": "sub_sequence"})
    rows = torch.tensor([ids(S + 1, seed) for seed in (1, 2, 3)])
    scores, proxies = [], []
    for span in spans:
        tokens, targets = rows[slice(*span), :-1], rows[slice(*span), 1:].flatten()
        positions, every = torch.arange(S).expand(tokens.shape), torch.arange(len(targets))
        scores += model.score(ScoreBatch(tokens, positions, None, every, targets))[0].tolist()
        made = sequence_proxies(model, Candidates(rows[slice(*span)]), "gradient", lambda count: 0)
        proxies += made.flatten().tolist()
    return scores, proxies


def test_a_row_that_fills_up_a_rank_s_share_takes_no_capacity():
    expected = scores_and_proxies(ALONE, [(0, 2), (2, 3)])  # as two ranks have them
    for found in run_ranks(2, scores_and_proxies, [(0, 3)]):
        for values, of_shares in zip(found, expected, strict=True):
            assert values == pytest.approx(of_shares, rel=1e-6)
