"""Fine-tuning on conversations: transformers' losses on the same tokens, on every layout."""

import numpy as np
import pytest
import torch
from chats import MARKED, PLAIN, save_model, sums, talks, write_lines
from ranks import run_ranks
from tiny import run_config

from mtcli.core.checkpoint.fine_tuning import source_of, starting_tokenizer
from mtcli.core.config.loading import load_config
from mtcli.core.optim.lr_schedule import learning_rate
from mtcli.core.parallel.collectives import gather_values
from mtcli.core.runtime.launch import Runtime
from mtcli.core.training.loader import open_loader
from mtcli.core.training.state import load_weights, starting_point
from mtcli.core.training.step import Trainer

ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))
LAYOUTS = [
    {"tp": 2, "cp": 2},
    {"cp": 2, "cp_mode": "a2a", "zero": 3},
    {"pp": 2, "tp": 2, "schedule": "zero_bubble", "zero": 1},
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft")
    save_model(folder / "llama")
    write_lines(folder / "talks.jsonl", [*talks(20), *sums(20, seed=1)])
    return folder


def config(home, name="llama", precision="fp64", **parallel):
    settings = [f"data.train={home / 'talks.jsonl'}", "batch.seq_len=128"]
    settings += ["batch.global_batch_size=4", "optimizer.lr=1e-3", "train.device=cpu"]
    settings += [f"train.precision={precision}", "train.steps=4"]
    settings += [f"parallel.{key}={value}" for key, value in parallel.items()]
    return load_config(source_of(str(home / name)), settings)


def losses_of(runtime, run):
    """Losses of the steps of a run from its starting weights."""
    trainer = Trainer(run, runtime)
    start = starting_point(run, trainer.groups.world)
    load_weights(trainer, start.checkpoint)
    loader = open_loader(run, trainer.groups)
    losses = [trainer.train_step(loader).loss for _ in range(run.train.steps)]
    loader.close()
    return gather_values(losses, trainer.groups.world)[0]


def test_other_weights_to_start_from_leave_the_base_of_earlier_ones_out(home):
    path = home / "run.toml"
    path.write_text(f'[train]\ninit = "adapters"\nbase = "{home / "llama"}"\n')
    assert source_of(str(path), str(home / "llama"))["train"] == {"init": str(home / "llama")}


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_first_step_has_the_learning_rate_and_the_last_a_tenth_of_it(home, steps, schedule):
    settings = [f"train.steps={steps}", f"optimizer.schedule={schedule}"]
    run = load_config(source_of(str(home / "llama")), settings)
    rates = [learning_rate(run.optimizer, step, steps) for step in range(1, steps + 1)]
    expected = [2e-5, 2e-6] if steps > 1 else [2e-5, 2e-5]
    assert [rates[0], rates[-1]] == pytest.approx(expected)


def test_a_decay_of_initial_weights_ends_at_a_tenth_of_any_rate_unless_it_is_said(home):
    source = source_of(str(home / "llama"))
    for rate in ("1e-7", "2e-4", "1"):
        found = load_config(source, [f"optimizer.lr={rate}"]).optimizer
        assert found.min_lr == pytest.approx(float(rate) / 10)
    assert load_config(source, ["optimizer.min_lr=0"]).optimizer.min_lr == 0.0
    path = home / "own.toml"
    path.write_text("[model]\npreset = 'tiny'\n[train]\nsteps = 2\n")
    assert load_config(str(path)).optimizer.min_lr == 0.0
    started = load_config(source_of(str(path), str(home / "llama"))).optimizer
    assert started.min_lr == pytest.approx(3e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_the_loss_of_a_packed_batch_is_transformers_of_its_examples_one_by_one(tmp_path, kind):
    model = save_model(tmp_path / "hf", kind, MARKED if kind == "llama" else PLAIN)
    write_lines(tmp_path / "talks.jsonl", [*talks(9), *sums(9)])
    run = config(tmp_path, "hf", "fp32")
    trainer = Trainer(run, ALONE)
    load_weights(trainer, starting_point(run, trainer.groups.world).checkpoint)
    loader = open_loader(run, trainer.groups)
    data, total, weight = loader.batches, 0.0, 0.0
    rows, documents = data.batch(0, 4), data.documents(0, 4)
    weights = data.loss_weights(0, 4)
    for row, of, counts in zip(rows, documents, weights, strict=True):
        for document in range(of.max() + 1):
            at = np.flatnonzero(of == document)
            ids = torch.from_numpy(row[at])[None]
            labels = ids.clone()
            labels[0, 1:][counts[at[1:] - 1] == 0] = -100
            labels[0, 0] = -100
            count = int((labels != -100).sum())
            if count:
                total += model(ids, labels=labels).loss.item() * count
                weight += count
    assert weight == weights.sum() and weight < 4 * 128
    step = trainer.train_step(loader)
    loader.close()
    assert step.loss == pytest.approx(total / weight, rel=1e-5)


@pytest.fixture(scope="module")
def losses_alone(home):
    return run_ranks(1, losses_of, config(home))[0]


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_every_layout_has_the_losses_of_one_rank(home, losses_alone, parallel):
    assert losses_alone[-1] < losses_alone[0]
    for losses in run_ranks(4, losses_of, config(home, **parallel)):
        assert losses == pytest.approx(losses_alone, rel=1e-9)


def test_the_tokenizer_of_the_starting_weights_is_found(home):
    run = config(home)
    assert starting_tokenizer(run) == home / "llama"
    assert starting_tokenizer(run_config()) is None
