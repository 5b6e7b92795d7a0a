"""Training on documents in a row, and full attention: losses and gradients against transformers.

Theirs is told by hand who sees whom: a 4D mask and position ids, read off the tokens.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from indexed_dataset import write_dataset
from test_transformers import CLOSE, FAMILIES, VOCAB, gradients
from tiny import DOCUMENTS

from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.config.loading import config_of
from mtcli.core.data.indexed import token_dtype
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import parameters
from mtcli.core.model.build import build_stages
from mtcli.core.model.init import load_weights
from mtcli.core.parallel.groups import make_groups
from mtcli.core.parallel.ownership import unsharded
from mtcli.core.training.loader import open_loader

B, S, BEGIN = 8, 16, 0  # token 0 begins every document and stands nowhere else


@pytest.fixture
def prefix(tmp_path):
    random = np.random.default_rng(0)
    lengths = [0, 9, 1, 12, 40, 3, 11, 0, 14] * 3
    texts = [[BEGIN, *random.integers(1, VOCAB, n - 1)] if n else [] for n in lengths]
    write_dataset(tmp_path / "data", texts, token_dtype(VOCAB))
    return str(tmp_path / "data")


def opened(family, folder, prefix, causal):
    """(transformers' model, our stage with its weights, a micro-batch of the corpus)."""
    torch.manual_seed(0)
    theirs = FAMILIES[family]().eval()
    theirs.save_pretrained(folder)
    checkpoint = open_checkpoint(folder)
    model = checkpoint.model.model_copy(update={"causal": causal})
    sections = {
        "model": model.model_dump(exclude_none=True),
        "batch": {"seq_len": S, "micro_batch_size": B, "global_batch_size": B},
        "data": {"train": [prefix], "split": "1,0,0", **DOCUMENTS},
        "train": {"precision": "fp64", "steps": 1},
    }
    config = config_of(sections)
    groups = make_groups(ParallelLayout(1), 0, torch.device("cpu"))
    stages = build_stages(config, groups)
    shards = unsharded(stages, parameters(config.model))
    load_weights(shards, replace(checkpoint, model=model), config.model, groups)
    loader = open_loader(config, groups)
    inputs = loader.step(0, 1.0).load(0)
    loader.close()
    return theirs.double(), stages[0], inputs


def told(tokens, causal):
    """(4D mask of 0 and the lowest float, position ids) of rows whose documents begin with 0."""
    mask = torch.full((B, 1, S, S), torch.finfo(torch.float64).min, dtype=torch.float64)
    places = torch.zeros(B, S, dtype=torch.long)
    for b, row in enumerate(tokens.tolist()):
        begins = [i for i in range(S) if i == 0 or row[i] == BEGIN]
        for begin, end in zip(begins, [*begins[1:], S], strict=True):
            for i in range(begin, end):
                mask[b, 0, i, begin : i + 1 if causal else end] = 0.0
                places[b, i] = i - begin
    return mask, places


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_documents_of_a_row_train_as_transformers_does(family, causal, prefix, tmp_path):
    theirs, stage, inputs = opened(family, tmp_path / "theirs", prefix, causal)
    two = (inputs.tokens[:, 1:] == BEGIN).sum(1) == 1
    assert two.any(), "no sample is made of two documents"
    losses = stage.losses(stage(None, inputs), inputs).view(B, S)
    mask, places = told(inputs.tokens, causal)
    logits = theirs(inputs.tokens, attention_mask=mask, position_ids=places).logits
    expected = torch.nn.functional.cross_entropy(logits.mT, inputs.labels, reduction="none")
    torch.testing.assert_close(losses, expected, **CLOSE)
    losses.mean().backward()
    expected.mean().backward()
    ours, known = dict(stage.named_parameters()), dict(theirs.named_parameters())
    for name, found, wanted in gradients(ours, known, stage.model):
        error = (found - wanted).norm() / wanted.norm()
        assert error < 1e-5, (name, error)
