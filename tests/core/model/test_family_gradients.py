"""The loss and every gradient of each Hugging Face family, against transformers' with the same
weights. transformers writes its gradients as it does weights, so that the folder's names are read.
"""

from dataclasses import replace

import pytest
import torch
from tiny_hf import FAMILIES, auto_model, configs

from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.config.loading import config_of
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import parameters
from mtcli.core.model.build import build_stages
from mtcli.core.model.init import load_weights
from mtcli.core.model.inputs import make_inputs
from mtcli.core.parallel.groups import make_groups
from mtcli.core.parallel.ownership import unsharded

ROWS, LENGTH = 2, 13  # longer than the windows of the tiny configs


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_every_gradient_of_a_family_are_transformers(name, tmp_path):
    theirs = transformers_model(configs()[name])
    theirs.save_pretrained(tmp_path / "weights")
    stage, model = our_stage(tmp_path / "weights")
    # without ids of padding, whose embedding has no gradient in transformers
    ids = torch.randint(3, model.vocab_size, (ROWS, LENGTH + 1))
    theirs.double()
    logits = theirs(ids[:, :-1]).logits.flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
    expected.backward()
    inputs = make_inputs(model, torch.float64, ids[:, :-1], labels=ids[:, 1:])
    loss = stage.losses(stage(None, inputs), inputs).mean()
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0.0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad)
    theirs.save_pretrained(tmp_path / "gradients")
    gradients = open_checkpoint(tmp_path / "gradients")
    for key, parameter in parameters(model).items():
        if parameter.trained:
            expected = gradients.read(key)
            found = stage.get_parameter(key).grad.flatten()[: expected.numel()]  # without padding
            error = (found - expected.flatten()).norm()
            assert error < 1e-4 * expected.norm(), (key, float(error), float(expected.norm()))


def transformers_model(config):
    """A random model, none of whose parameters is zeros or ones."""
    torch.manual_seed(0)
    eager = {"attn_implementation": "eager"}
    if hasattr(config, "num_experts_per_tok"):
        eager["experts_implementation"] = "eager"
    theirs = auto_model(config).from_config(config, dtype=torch.float32, **eager).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return theirs


def our_stage(folder):
    """The model of a folder in float64, and its config."""
    checkpoint = open_checkpoint(folder)
    table = checkpoint.model.model_dump(exclude_none=True)
    config = config_of({"model": table, "train": {"precision": "fp64", "steps": 1}})
    groups = make_groups(ParallelLayout(1), 0, torch.device("cpu"))
    stages = build_stages(config, groups)
    shards = unsharded(stages, parameters(config.model))
    load_weights(shards, replace(checkpoint, model=config.model), config.model, groups)
    return stages[0], config.model
