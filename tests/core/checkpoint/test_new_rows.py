"""Rows for new tokens of a stored checkpoint: any box of them is that of the whole tables."""

import random

import pytest
import torch
from chats import save_model

from mtcli.core.checkpoint import new_rows
from mtcli.core.checkpoint.new_rows import with_new_rows
from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.mesh.sharding import Box

FIRST, COUNT = 259, 3  # ids of the tokenizer, and of new tokens


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def dtype(request):
    return getattr(torch, request.param)


@pytest.mark.parametrize(("stored", "size"), [(259, 262), (260, 264), (300, 300)])
def test_new_rows_are_the_mean_of_all_tokens_rows_and_others_stay(tmp_path, dtype, stored, size):
    model = save_model(tmp_path, vocab_size=stored).to(dtype)
    model.save_pretrained(tmp_path)
    before = open_checkpoint(tmp_path)
    after = with_new_rows(before, size, range(FIRST, FIRST + COUNT))
    assert (after.model.vocab_size, before.model.vocab_size) == (size, stored)
    weights = model.state_dict()
    for name, theirs in (("embedding.weight", "model.embed_tokens"), ("head.weight", "lm_head")):
        table = weights[f"{theirs}.weight"]
        mean = table[:FIRST].double().mean(0).to(dtype)
        read = after.read(name)
        assert read.dtype == dtype and after.shape(name) == (size, 32) == tuple(read.shape)
        assert torch.equal(read[:FIRST], table[:FIRST])
        new = [row for row in range(size) if FIRST <= row < FIRST + COUNT or row >= stored]
        assert torch.equal(read[new], mean.expand(len(new), -1))
        spare = [row for row in range(FIRST + COUNT, stored)]
        assert torch.equal(read[spare], table[spare])
    assert torch.equal(after.read("final_norm.weight"), weights["model.norm.weight"])


def test_every_box_is_part_of_the_whole_and_its_mean_needs_no_more_memory(tmp_path, monkeypatch):
    save_model(tmp_path, "gpt_neox", vocab_size=261)
    after = with_new_rows(open_checkpoint(tmp_path), 270, range(FIRST, FIRST + COUNT))
    whole = {name: after.read(name) for name in ("embedding.weight", "head.weight")}
    monkeypatch.setattr(new_rows, "BOX_BYTES", 8 * 32 * 7)  # of seven rows
    again = with_new_rows(open_checkpoint(tmp_path), 270, range(FIRST, FIRST + COUNT))
    draw = random.Random(0)
    for name, table in whole.items():
        for _ in range(60):
            ends = [sorted(draw.randrange(n + 1) for _ in "ab") for n in table.shape]
            box = Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))
            assert torch.equal(again.read(name, box), table[box.slices])
