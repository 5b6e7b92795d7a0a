"""Models in Python: transformers' logits, losses and texts, on any layout; what is refused."""

import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from chats import save_model
from marks import slow
from ranks import run_ranks
from tiny import LLAMA, run_config
from trained import checkpoint_of, train_and_save

import mtcli
from mtcli.core.convert.to_huggingface import to_hf
from mtcli.core.convert.to_mtcli import WriteOptions

IDS = [[3, 14, 15, 92, 65], [35, 89, 79, 32, 38]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(a checkpoint that 4 ranks saved, transformers' model of its export)."""
    from transformers import AutoModelForCausalLM

    home = tmp_path_factory.mktemp("saved")
    config = run_config(LLAMA, parallel={"tp": 2, "pp": 2})
    run_ranks(4, train_and_save, config, home)
    to_hf(checkpoint_of(home, 4), home / "hf", 10**9, WriteOptions())
    return str(home / "step-00000004"), AutoModelForCausalLM.from_pretrained(home / "hf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """(a Hugging Face folder with a tokenizer, its model)."""
    home = tmp_path_factory.mktemp("folder")
    return str(home), save_model(home)


def expected(model, ids):
    """transformers' (logits, losses of all but the first token)."""
    ids = torch.tensor(ids)
    with torch.no_grad():
        logits = model(ids).logits
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none"
    )
    return logits, losses


def test_a_checkpoint_of_four_ranks_has_transformers_logits_and_losses(saved):
    path, model = saved
    logits, losses = expected(model, IDS)
    with mtcli.open(path, device="cpu") as opened:
        torch.testing.assert_close(opened.logits(IDS), logits, rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(opened.losses(IDS), losses, rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(opened.logits(torch.tensor(IDS[1]))[0], opened.logits(IDS)[1])
        assert opened.config.num_layers == LLAMA["num_layers"]


def test_an_opened_model_leaves_no_variable_in_its_process(saved):
    before = dict(os.environ)
    with mtcli.open(saved[0], device="cpu") as opened:
        opened.losses(IDS)
    assert dict(os.environ) == before


def test_a_text_of_a_hugging_face_folder_is_encoded_and_continued_greedily(folder):
    path, model = folder
    with mtcli.open(path, device="cpu") as opened:
        ids = opened.tokenizer.encode("1 plus 1?")
        logits, losses = expected(model, [ids])
        torch.testing.assert_close(opened.losses("1 plus 1?"), losses, rtol=2e-5, atol=2e-6)
        one, two = opened.generate(["1 plus 1?", "It"], max_tokens=6)
        assert [one] == opened.generate("1 plus 1?", max_tokens=6) and two
        theirs = model.generate(
            torch.tensor([ids]), max_new_tokens=6, do_sample=False, pad_token_id=0
        )
        assert one == opened.tokenizer.decode_after(ids, theirs[0, len(ids) :].tolist())
        warm = [
            opened.generate("It", 6, mtcli.Sampling(temperature=2.0, seed=seed))
            for seed in (1, 1, 2)
        ]
        assert warm[0] == warm[1] != warm[2]


@pytest.mark.parametrize(
    "layout", [("tp=2",), ("pp=2",), ("dp",), ("tp=2", "tp_mode=2d", "tp_rows=2")]
)
def test_every_rank_of_a_layout_answers_the_same(saved, layout):
    path, model = saved
    overrides = [f"parallel.{word}" for word in layout if "=" in word]
    logits, losses = expected(model, IDS)
    for answer in run_ranks(2, _answers, path, overrides):
        torch.testing.assert_close(torch.tensor(answer[0]), logits, rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(torch.tensor(answer[1]), losses, rtol=2e-5, atol=2e-6)


def _answers(runtime, path, overrides):
    from mtcli.core.library import models

    models.bring_up = lambda *_: nullcontext(runtime)  # the rank has been brought up
    with mtcli.open(path, overrides) as opened:
        return opened.logits(IDS).tolist(), opened.losses(IDS).tolist()


@slow("a launcher of torch's, 10 s")
def test_ranks_of_torchrun_open_a_model_together(saved, tmp_path):
    path, model = saved
    script = tmp_path / "ask.py"
    script.write_text(
        "import mtcli\n"
        f"with mtcli.open({path!r}, ['parallel.tp=2'], device='cpu') as model:\n"
        f"    line = str(model.losses({IDS!r}).sum().item())\n"
        "    print(line + '\\n', end='', flush=True)\n"  # in one write: torchrun's python is -u
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*command, script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    sums = [float(line) for line in done.stdout.split()]
    assert sums == [pytest.approx(expected(model, IDS)[1].sum().item(), rel=1e-5)] * 2


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([[1, 2], [3]], "no rows of equally many ids"),
        ([], "are no rows"),
        ([[[1]]], "are no rows"),
        ([[1, 150]], "tokens 1 to 150 of a vocabulary of 150"),
        ([-1], "tokens -1 to -1"),
        ([0] * 1000, "rows of 1000 tokens"),
        ("text", "holds no tokenizer"),
    ],
)
def test_what_is_no_batch_of_tokens_is_refused(saved, tokens, words):
    with mtcli.open(saved[0], device="cpu") as opened, pytest.raises(mtcli.MtcliError) as caught:
        opened.logits(tokens)
    assert words in str(caught.value) and caught.value.code == 2


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(mtcli.MtcliError, match="hint: "):
        mtcli.open(tmp_path)
