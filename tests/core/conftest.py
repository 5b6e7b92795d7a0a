"""Models of transformers' own: a GPT-2 that tests train, and one of every family in a folder."""

import pytest
import torch
from tiny_hf import auto_model, configs

from mtcli.core.checkpoint.opening import open_checkpoint


@pytest.fixture
def gpt2(tmp_path):
    """(a tiny GPT-2 without dropout, the checkpoint it was saved as)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16, "vocab_size": 101}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **still, initializer_range=0.1))
    model.save_pretrained(tmp_path)
    return model, open_checkpoint(tmp_path)


@pytest.fixture(scope="session")
def hf_models():
    """Models of each family, in eval mode, with biases and norms that are not zeros and ones."""
    models = {}
    for name, config in configs().items():
        torch.manual_seed(len(models))
        model = auto_model(config).from_config(config).eval()
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape)
        models[name] = model
    return models


@pytest.fixture(scope="session")
def hf_folders(hf_models, tmp_path_factory):
    """The folder of each family, as transformers saves it."""
    root = tmp_path_factory.mktemp("hf")
    for name, model in hf_models.items():
        model.save_pretrained(root / name)
    return {name: root / name for name in hf_models}
