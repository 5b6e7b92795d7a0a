"""Scorers of tiny random models, and the real test data."""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from transformers_scorer import TransformersScorer, gpt2, llama


@pytest.fixture(scope="session", params=["gpt2", "llama"])
def scorer(request):
    """A scorer with 97 words and 24 positions, of each family."""
    return TransformersScorer({"gpt2": gpt2, "llama": llama}[request.param](), 24)


@pytest.fixture(scope="session")
def real_scorer():
    """A scorer with GPT-2's vocabulary and 128 positions."""
    return TransformersScorer(gpt2(vocab_size=50257, n_positions=128, width=16), 128)


@pytest.fixture(scope="session")
def byte_scorer():
    """A scorer with the byte tokenizer's vocabulary and 48 positions."""
    return TransformersScorer(gpt2(vocab_size=257, n_positions=48), 48)


@pytest.fixture(scope="session")
def data():
    """The folder of real test data."""
    folder = os.environ.get("MTCLI_TEST_DATA")
    if not folder:
        pytest.skip("MTCLI_TEST_DATA names no folder with wikitext-103, lambada, race, gpt2-bpe")
    return Path(folder)


@pytest.fixture(scope="session")
def bpe(data):
    """The real GPT-2 tokenizer, of the tokenizers library."""
    from tokenizers import ByteLevelBPETokenizer

    folder = data / "gpt2-bpe"
    return ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))


@pytest.fixture
def quiet_lm_eval(monkeypatch):
    """lm-eval without the report of the machine, for which it asks pip, git and compilers: 0.6 s"""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


@pytest.fixture(scope="session")
def alone():
    """The oracle: one sequence at a time, plain causal, full log_softmax; no mask, no packing."""

    @torch.no_grad()
    def score(model, ids, num_targets):
        logits = model(torch.tensor([ids[:-1]])).logits[0, -num_targets:].double()
        targets = torch.tensor(ids[-num_targets:])
        logprob = logits.log_softmax(-1)[torch.arange(num_targets), targets].sum().item()
        return logprob, bool((logits.argmax(-1) == targets).all())

    return score
