"""Loss weights: the weighted sum by the number of labels, and the bits of none where all are 1.

That every layout has the run of its oracle with random weights is a factor of the parity table.
"""

from contextlib import closing

import numpy as np
import pytest
import torch
from parity_factors import row_of
from parity_runs import train_on
from ranks import run_ranks
from tiny import Samples, Weighted, run_config

from mtcli.core.config.errors import MtcliError
from mtcli.core.parallel.vocab_parallel import VocabCrossEntropy
from mtcli.core.runtime.launch import Runtime
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise, load_weights
from mtcli.core.training.step import Trainer

ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))


class Ones(Samples):
    def loss_weights(self, start, count):
        return np.ones((count, self.rows.shape[1] - 1), np.float32)


class Nothing(Samples):
    """Weights of 1 for the first global batch, and none for the second."""

    def loss_weights(self, start, count):
        ids = np.arange(start, start + count)[:, None]
        return np.repeat((ids < 4).astype(np.float32), self.rows.shape[1] - 1, 1)


def test_one_rank_gives_the_weighted_sum_by_labels_of_transformers_model(gpt2):
    model, checkpoint = gpt2
    config = run_config(checkpoint.model.model_dump(exclude_none=True), train={"matmul": "strict"})
    trainer = Trainer(config, ALONE)
    load_weights(trainer, checkpoint)
    samples = Weighted(config)
    loader = MicroBatchLoader(samples, config, trainer.groups)
    step = trainer.train_step(loader)
    loader.close()
    rows, weights = torch.from_numpy(samples.batch(0, 4)), samples.loss_weights(0, 4)
    assert (weights.sum(1) == 0).any() and (weights > 0).any()
    logits, weights = model(rows[:, :-1]).logits.flatten(0, 1), torch.from_numpy(weights).flatten()
    losses = torch.nn.functional.cross_entropy(logits, rows[:, 1:].flatten(), reduction="none")
    loss = (losses * weights).sum() / weights.count_nonzero()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert step.loss == pytest.approx(loss.item(), rel=1e-5)
    assert step.grad_norm == pytest.approx(norm.item(), rel=1e-4)


class Sixfold(Samples):
    """Sample 0 weighs 6, and the others 0.5."""

    def loss_weights(self, start, count):
        ids = np.arange(start, start + count)[:, None]
        one = np.ones(self.rows.shape[1] - 1, np.float32)
        return np.where(ids == 0, np.float32(6.0), np.float32(0.5)) * one


@pytest.mark.parametrize(("size", "factors"), [(1, [6.0, 0.5]), (2, [None, 0.5])], ids=str)
def test_a_sample_s_weight_scales_its_gradient_in_a_batch_of_any_size(size, factors):
    """CRAIG's update (arXiv:1906.01827, algorithm 1): each member's own weight is its stepsize."""
    batch = {"micro_batch_size": 1, "global_batch_size": size}
    still = run_config(batch=batch, train={"precision": "fp64"}, optimizer={"lr": 0.0})

    def steps(samples):
        trainer = Trainer(still, ALONE)
        initialise(trainer)
        with closing(MicroBatchLoader(samples(still), still, trainer.groups)) as loader:
            found = [trainer.train_step(loader) for _ in factors]
        return [(step.loss, step.grad_norm) for step in found]

    for plain, weighted, factor in zip(steps(Samples), steps(Sixfold), factors, strict=True):
        if factor is not None:
            assert weighted == pytest.approx([factor * x for x in plain], rel=1e-12)


def test_logits_are_made_of_tokens_whose_loss_has_a_weight_alone(monkeypatch):
    config = row_of({"model": "llama", "micro_batch_size": "2"}).config()
    trainer, samples, rows = Trainer(config, ALONE), Weighted(config), []
    initialise(trainer)
    forward = VocabCrossEntropy.forward

    def counted(ctx, logits, *rest):
        rows.append(len(logits))
        return forward(ctx, logits, *rest)

    monkeypatch.setattr(VocabCrossEntropy, "forward", staticmethod(counted))
    with closing(MicroBatchLoader(samples, config, trainer.groups)) as loader:
        trainer.train_step(loader)
    weights = samples.loss_weights(0, 4).reshape(2, -1)
    assert rows == [max(1, count) for count in (weights != 0).sum(1)] and min(rows) < 16


@pytest.mark.parametrize(
    ("precision", "levels"),
    [
        ("fp32", {"model": "llama", "tp": "2", "cp": "ring", "micro_batch_size": "2"}),
        ("fp32", {"dropout": "yes", "zero": "3", "dp": "2", "recompute": "full"}),
        ("bf16", {"model": "moe", "pipeline": "1f1b", "experts": "ep", "dp": "2", "zero": "1"}),
    ],
    ids=str,
)
def test_weights_of_one_give_the_bits_of_no_weights(precision, levels):
    row = row_of(levels)
    config = row.config(precision)
    plain, ones = (run_ranks(row.world, train_on, config, s, 3) for s in (Samples, Ones))
    for mine, same in zip(plain, ones, strict=True):
        assert (mine.losses, mine.norms) == (same.losses, same.norms)
        for name, (gradient, _) in mine.gradients.items():
            assert torch.equal(gradient, same.gradients[name][0])


def evaluated(runtime, config, samples):
    trainer = Trainer(config, runtime)
    initialise(trainer)
    loader = MicroBatchLoader(samples(config), config, trainer.groups)
    loss = trainer.evaluate(loader)
    loader.close()
    return loss


@pytest.mark.parametrize("parallel", [{"cp": 2, "pp": 2}, {"zero": 3}], ids=str)
def test_evaluation_is_the_mean_over_the_labels_of_all_its_batches(parallel):
    train = {"eval_batches": 3, "precision": "fp64"}
    still = run_config(train=train, optimizer={"lr": 0.0})
    trainer = Trainer(still, ALONE)
    initialise(trainer)
    loader = MicroBatchLoader(Weighted(still), still, trainer.groups)
    means = [trainer.train_step(loader).loss for _ in range(3)]
    loader.close()
    counts = np.count_nonzero(Weighted(still).loss_weights(0, 12).reshape(3, -1), axis=1)
    expected = float(np.average(means, weights=counts))
    config = run_config(parallel=parallel, train=train)
    for loss in run_ranks(4, evaluated, config, Weighted):
        assert loss == pytest.approx(expected, rel=1e-12)
    plain, ones = (run_ranks(4, evaluated, config, s) for s in (Samples, Ones))
    assert plain == ones


def refused(runtime, config):
    trainer = Trainer(config, runtime)
    initialise(trainer)
    loader = MicroBatchLoader(Nothing(config), config, trainer.groups)
    trainer.train_step(loader)
    try:
        trainer.train_step(loader)
    except MtcliError as error:
        return error.problems[0].message, int(error.code)
    finally:
        loader.close()


def test_a_step_without_any_weight_is_an_error_on_every_rank():
    message = "of samples 4 to 7, step 2, no label has a weight"
    assert run_ranks(2, refused, run_config()) == [(message, 1)] * 2
