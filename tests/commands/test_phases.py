"""Phases: a run changes batch, length, data and curve after some tokens, as if it had been stopped
and begun anew by other settings with the same state; resumed anywhere it has the same curve."""

import json
import shutil

import numpy as np
import pytest
import torch
from command_line import mtcli
from indexed_dataset import write_dataset
from tiny import LLAMA, documents, metrics, write_run

from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.checkpoint.run_progress import progress_of
from mtcli.core.config.loading import load_config
from mtcli.core.data.loader import Batches
from mtcli.core.optim.lr_schedule import learning_rate

# Steps of 32 tokens to 128, of 64 to 320, and of 128 to 960: 4, 3 and 5 of them.
STEPS, BOUNDARIES, SEED = 12, (4, 7), 7
GROWN = {"from_tokens": 128, "batch": {"global_batch_size": 8, "micro_batch_size": 2}}
LONG = {
    "from_tokens": 320,
    "batch": {"seq_len": 16},
    "model": {"rope_theta": 5000.0},
    "optimizer": {"lr": 1e-3, "schedule": "linear"},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with two datasets and run.toml of a run of three phases, the last one of both."""
    folder = tmp_path_factory.mktemp("phases")
    write_dataset(folder / "other", documents(seed=3), np.uint16)
    blend = {"train": ["1", str(folder / "data"), "2", str(folder / "other")]}
    config(folder, GROWN, LONG | {"data": blend})
    return folder


def config(folder, *phases, **train):
    path = write_run(
        folder,
        LLAMA,
        data={"split": "80,20,0"},
        optimizer={"warmup_steps": 2, "lr": 3e-3, "min_lr": 1e-4},
        train={"precision": "fp64", "save_every": 1, "keep": 0} | train,
    )
    path.write_text(path.read_text().replace("\nsteps = 20\ntokens = 0\n", "\ntokens = 900\n"))
    with path.open("a") as file:
        for phase in phases:
            file.write(f"[[phase]]\nfrom_tokens = {phase['from_tokens']}\n")
            for section in phase.keys() - {"from_tokens"}:
                for name, value in phase[section].items():
                    file.write(f"{section}.{name} = {json.dumps(value)}\n")


def train(home, *settings, flags=()):
    sets = [word for setting in settings for word in ("--set", setting)]
    done = mtcli("train", str(home / "run.toml"), *sets, *flags)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def whole(home):
    """The folder of the run from its first step to its last."""
    train(home)
    return home / "run"


def losses(folder):
    return [row["loss"] for row in metrics(folder)]


def stopped(whole, folder, step):
    """A copy of a run as it was when it had saved a step."""
    shutil.copytree(whole, folder)
    for path in (folder / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    return f'train.output="{folder}"'


def test_steps_have_the_batch_of_their_phase_and_records_name_it(whole):
    rows = metrics(whole)
    assert [row["phase"] for row in rows] == [0] * 4 + [1] * 3 + [2] * 5
    assert [row["tokens"] for row in rows] == [32] * 4 + [64] * 3 + [128] * 5
    assert [row["consumed_samples"] for row in rows] == [
        *(4, 8, 12, 16), *(24, 32, 40), *(48, 56, 64, 72, 80)
    ]  # fmt: skip
    done = progress_of(open_checkpoint(whole)).samples
    assert (
        done.tokens == 960
        and load_config(str(whole)).phase == load_config(str(whole.parent / "run.toml")).phase
    )


def test_a_curve_spans_the_phases_until_one_begins_another(whole):
    run = load_config(str(whole)).optimizer
    ends = run.model_copy(update={"warmup_steps": 0, "lr": 1e-3, "schedule": "linear"})
    curve = [learning_rate(run, step, 7) for step in range(1, 8)]
    curve += [learning_rate(ends, step, 5) for step in range(1, 6)]
    assert [row["lr"] for row in metrics(whole)] == curve
    assert curve[6] == curve[-1] == 1e-4 and curve[7] == pytest.approx(8.2e-4)


@pytest.mark.parametrize("step", [1, 3, 4, 5, 6, 7, 8, 11])
def test_a_run_stopped_before_at_or_after_a_boundary_goes_on_bit_for_bit(
    home, whole, tmp_path, step
):
    output = stopped(whole, tmp_path / "run", step)
    train(home, output, flags=["--resume"])
    assert losses(tmp_path / "run") == losses(whole)
    ends = open_checkpoint(whole), open_checkpoint(tmp_path / "run")
    assert ends[0].extra == ends[1].extra
    for name in ends[0].names():
        assert torch.equal(ends[0].read(name), ends[1].read(name)), name


@pytest.mark.parametrize(
    ("step", "world", "settings"),
    [
        (0, 4, ["parallel.tp=2", "parallel.zero=1"]),
        (3, 2, ["parallel.pp=2", "parallel.schedule=1f1b"]),
        (4, 2, ["parallel.zero=3"]),
        (7, 2, ["parallel.cp=2"]),
    ],
)
def test_other_layouts_have_the_same_curve_through_the_phases(
    home, whole, tmp_path, step, world, settings
):
    output = stopped(whole, tmp_path / "run", step)
    flags = ["--nproc", str(world), *["--resume", "--start-over"][not step :][:1]]
    train(home, output, *settings, flags=flags)
    assert losses(tmp_path / "run") == pytest.approx(losses(whole), rel=1e-10)


def test_phases_that_change_nothing_leave_a_run_as_it_is(tmp_path):
    plain, phased = tmp_path / "plain", tmp_path / "phased"
    for folder in (plain, phased):
        folder.mkdir()
    write_dataset(phased / "other", documents(seed=3), np.uint16)
    config(plain)
    same = {"from_tokens": 400, "batch": {"global_batch_size": 4, "seq_len": 8}}
    config(phased, {"from_tokens": 128}, same)
    train(plain)
    train(phased)
    assert losses(plain / "run") == losses(phased / "run") and len(losses(plain / "run")) == 29


def test_a_plain_loop_of_another_library_has_the_losses_of_the_phases(tmp_path):
    """transformers' model with torch's AdamW, which change batch, length and rate at the same
    tokens; one source, read in its order from where the phase before left it."""
    transformers = pytest.importorskip("transformers")
    config(tmp_path, GROWN, LONG)
    train(tmp_path)
    run = load_config(str(tmp_path / "run"))
    start = tmp_path / "start"
    train(tmp_path, f'train.output="{start}"', "train.steps=1", "optimizer.lr=0.0",
          "optimizer.min_lr=0.0", "optimizer.weight_decay=0.0")  # fmt: skip
    done = mtcli("shard", str(start), str(tmp_path / "hf"), "--to", "hf")
    assert done.returncode == 0, done.stderr
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float64, attn_implementation="eager"
    )
    decayed = [p for p in model.parameters() if p.dim() > 1]
    flat = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    short, long = (
        Batches([str(tmp_path / "data")], "80,20,0", "train", 150, size, SEED) for size in (8, 16)
    )
    sizes = [(short, 4)] * 4 + [(short, 8)] * 3 + [(long, 8)] * 5
    at, expected, rates = 0, [], [row["lr"] for row in metrics(tmp_path / "run")]
    for step, (data, count) in enumerate(sizes):
        if step == BOUNDARIES[1]:
            at = 320 // 16  # the source's tokens, in sequences of this length
            model = with_base(model, 5000.0)
        rows = torch.from_numpy(data.batch(at, count))
        at += count
        for group in adamw.param_groups:
            group["lr"] = rates[step]
        adamw.zero_grad()
        logits = model(rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.optimizer.clip)
        adamw.step()
        expected.append(loss.item())
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-8)


def with_base(model, theta):
    """The model with rotary positions of another base; its parameters stay the same objects."""
    head = model.config.hidden_size // model.config.num_attention_heads
    rotary = model.model.rotary_emb
    rotary.inv_freq = theta ** (-torch.arange(0, head, 2, dtype=torch.float64) / head)
    return model


def test_each_source_goes_on_where_it_was_read(home, whole):
    """Samples of the last phase, counted by hand: the first source was read for 320 tokens."""
    record = progress_of(open_checkpoint(whole)).samples
    first, second = record.sources
    assert first.samples + second.samples == 40 and second.samples in (26, 27)
    assert record.first == 40 and [*record.read.values()] == [320]
    assert [*record.read] == [first.sampled]
    data = Batches([str(home / "data")], "80,20,0", "train", 150, 16, SEED)
    blend = Batches(
        load_config(str(whole)).phase[1].data.train,
        "80,20,0", "train", 40, 16, SEED, None, 40, [20, 0],
    )  # fmt: skip
    rows = blend.batch(40, 40).tolist()
    expected = data.batch(20, first.samples).tolist()
    assert [row for row in rows if row in expected] == expected
    assert blend.drawn(40, 80) == [first.samples, second.samples]


def test_a_changed_batch_is_refused_without_a_phase_and_past_phases_stay(home, whole, tmp_path):
    output = stopped(whole, tmp_path / "run", 6)
    words = ["train", str(home / "run.toml"), "--set", output, "--resume", "--set"]
    done = mtcli(*words, "phase.0.batch.global_batch_size=16")
    assert done.returncode == 2
    assert "it is 16, and the run was trained with 8" in done.stderr
    assert "a [[phase]] with from_tokens = 256 or more changes it" in done.stderr
    done = mtcli(*words, "phase.0.from_tokens=96")
    assert done.returncode == 2
    message = "the phases give 36 sequences in its first 6 steps, and the run was trained with 32"
    assert message in done.stderr
    train(home, output, "phase.1.from_tokens=500", flags=["--resume"])
    assert [row["tokens"] for row in metrics(tmp_path / "run")[6:]] == [64] * 4 + [128] * 4


def test_a_checkpoint_is_the_model_of_its_phase(whole):
    thetas = [
        open_checkpoint(whole / "checkpoints" / f"step-{step:08d}").model.rope_theta
        for step in (7, 8)
    ]
    assert thetas == [10000.0, 5000.0]
