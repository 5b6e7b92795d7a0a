"""Our engine's logits of a folder. The oracle is transformers, on the same weights and tokens."""

from types import SimpleNamespace

import pytest
import torch
from tiny_hf import FAMILIES, last_logits

from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.config.errors import MtcliError
from mtcli.core.convert import verify
from mtcli.core.convert.layout import parse_layout
from mtcli.core.convert.to_mtcli import WriteOptions, to_mtcli
from mtcli.core.convert.verify import logit_difference, logits_of, tolerance


@pytest.mark.parametrize("name", FAMILIES)
def test_our_logits_are_transformers(hf_folders, hf_models, name):
    ours = logits_of(open_checkpoint(hf_folders[name]))
    count = min(32, open_checkpoint(hf_folders[name]).model.max_seq_len)
    tokens = torch.randint(51, (2, count), generator=torch.Generator().manual_seed(0))
    theirs = last_logits(hf_models[name], tokens, (1, count // 2 + 1, count))
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) < 1e-4 * float(theirs.abs().max())


def test_the_difference_of_a_conversion_is_zero_and_of_a_rounding_is_small(hf_folders, tmp_path):
    source = open_checkpoint(hf_folders["llama"])
    for name, dtype in (("same", None), ("half", torch.bfloat16)):
        to_mtcli(source, tmp_path / name, *parse_layout("tp=2"), WriteOptions(dtype))
    assert (
        logit_difference(open_checkpoint(source.folder), open_checkpoint(tmp_path / "same"))[0]
        == 0.0
    )
    apart, largest = logit_difference(
        open_checkpoint(source.folder), open_checkpoint(tmp_path / "half")
    )
    assert 0.0 < apart < tolerance(largest, torch.bfloat16) < largest
    assert tolerance(largest, None) == 0.0


def test_a_sum_in_another_order_may_round_once_for_each_layer_in_float32():
    one = tolerance(2.0, None, resummed=1)
    assert one == 16 * 2.0**-23 * 2.0
    assert tolerance(2.0, None, resummed=24) == 24 * one
    assert tolerance(2.0, torch.bfloat16, resummed=24) == tolerance(2.0, torch.bfloat16)


def test_the_logits_of_every_replica_are_compared(monkeypatch):
    monkeypatch.setattr(verify, "logit_difference", lambda a, b: ([0.0, 5.0][a], 1.0))
    two = SimpleNamespace(replicas=2, replica=lambda number: number, folder="run")
    with pytest.raises(MtcliError, match="are 5 apart"):
        verify.require_same_logits(two, two, None)
