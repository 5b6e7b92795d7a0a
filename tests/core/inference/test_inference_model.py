"""Scores of mixtures of experts, on every layout and for any number of rows: transformers' own."""

import pytest
import torch
from ranks import run_ranks

from mtcli.core.config.errors import MtcliError
from mtcli.core.inference.model import open_model
from mtcli.core.inference.scoring import ScoreBatch
from mtcli.core.runtime.launch import Runtime

ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))
LENGTH, VOCAB = 11, 61
ROWS = (1, 3)  # of a batch


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """(transformers' model, its folder)."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    torch.manual_seed(8)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB}
    widths = {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 20}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": LENGTH}
    config = Qwen2MoeConfig(**sizes, **heads, **widths, **experts, initializer_range=0.4)
    model, folder = Qwen2MoeForCausalLM(config).eval(), tmp_path_factory.mktemp("mixture")
    model.save_pretrained(folder)
    return model, str(folder)


def batch_of(rows):
    tokens = torch.randint(VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(rows))
    positions = torch.arange(LENGTH).repeat(rows, 1)
    last = torch.arange(rows) * LENGTH + LENGTH - 1
    return ScoreBatch(tokens, positions, None, last, torch.arange(rows) % VOCAB)


def scores(runtime, folder, overrides):
    scorer = open_model(folder, overrides, runtime).scorer
    return [[part.tolist() for part in scorer.score(batch_of(rows))] for rows in ROWS]


@pytest.mark.parametrize(
    "layout",
    [
        ["ep=2", "pp=2"],
        ["tp=2", "ep=2", "etp=2"],
        ["tp=4", "ep=2", "etp=2"],
        ["tp=2", "ep=4", "dispatcher=all_gather"],
    ],
    ids=str,
)
def test_mixtures_score_as_transformers_wherever_their_experts_are(mixture, layout):
    model, folder = mixture
    answers = run_ranks(4, scores, folder, [f"parallel.{axis}" for axis in layout])
    for number, rows in enumerate(ROWS):
        batch = batch_of(rows)
        with torch.no_grad():
            logits = model(batch.tokens).logits[:, -1]
        expected = logits.log_softmax(-1)[torch.arange(rows), batch.targets].tolist()
        greedy = (logits.argmax(-1) == batch.targets).tolist()
        for answer in answers:
            assert answer[number] == [pytest.approx(expected, rel=2e-5), greedy]


def test_sequences_are_not_cut_between_ranks(mixture):
    with pytest.raises(MtcliError, match="sequence_parallel=true: evaluation and generation hold"):
        open_model(mixture[1], ["parallel.sequence_parallel=true"], ALONE)
