"""Tiny models of every Hugging Face family, and their folders as transformers saves them."""

import pytest
import torch
from tiny_hf import configs


@pytest.fixture(scope="session")
def hf_models():
    """Models of each family, in eval mode, with biases and norms that are not zeros and ones."""
    from transformers import AutoModelForCausalLM

    models = {}
    for name, config in configs().items():
        torch.manual_seed(len(models))
        model = AutoModelForCausalLM.from_config(config).eval()
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
