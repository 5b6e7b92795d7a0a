"""A model of transformers' own that several tests train."""

import pytest
import torch

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
