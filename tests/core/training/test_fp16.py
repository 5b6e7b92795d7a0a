"""Half precision on one rank: against a plain float16 loop, and what happens at an overflow."""

import math
from pathlib import Path

import pytest
import torch
from indexed_dataset import write_dataset
from ranks import run_ranks
from tiny import GPT, MOE, Samples, documents, metrics, run_config

from mtcli.core.config.errors import MtcliError
from mtcli.core.data.indexed import token_dtype
from mtcli.core.inference.model import open_model
from mtcli.core.inference.scoring import ScoreBatch
from mtcli.core.model.inputs import KVCache
from mtcli.core.optim.loss_scale import LossScale
from mtcli.core.runtime.launch import Runtime
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.loop import train
from mtcli.core.training.state import initialise, load_weights
from mtcli.core.training.step import Trainer

ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))
STEPS = 20


def half(**settings):
    return {"precision": "fp16", "matmul": "strict", "steps": STEPS} | settings


def started(config, checkpoint=None):
    trainer = Trainer(config, ALONE)
    load_weights(trainer, checkpoint) if checkpoint else initialise(trainer)
    return trainer, MicroBatchLoader(Samples(config), config, trainer.groups)


def steps_of(trainer, loader, count=STEPS):
    done = [trainer.train_step(loader) for _ in range(count)]
    loader.close()
    return done


def plain_loop(model, config, scale):
    """[(loss, norm)] as arXiv:1710.03740 has it: float32 masters and a scaled loss."""
    o, weights = config.optimizer, list(model.half().parameters())
    masters = [w.detach().float().requires_grad_() for w in weights]
    decays = {0.0: [m for m in masters if m.dim() == 1], o.weight_decay: []}
    decays[o.weight_decay] += [m for m in masters if m.dim() == 2]
    groups = [{"params": some, "weight_decay": decay} for decay, some in decays.items()]
    adamw = torch.optim.AdamW(groups, lr=o.lr, betas=o.betas, eps=o.eps)
    done = []
    for step in range(STEPS):
        losses = []
        for row in torch.from_numpy(Samples(config).batch(4 * step, 4)):
            logits = model(row[None, :-1]).logits[0].float()
            losses.append(torch.nn.functional.cross_entropy(logits, row[1:]) / 4)
            (losses[-1] * scale).backward()
            for weight, master in zip(weights, masters, strict=True):
                narrow, weight.grad = weight.grad.float() / scale, None
                master.grad = narrow if master.grad is None else master.grad + narrow
        norm = torch.nn.utils.clip_grad_norm_(masters, o.clip)
        adamw.step()
        adamw.zero_grad()
        for weight, master in zip(weights, masters, strict=True):
            weight.data.copy_(master)
        done.append((sum(losses).item(), norm.item()))
    return done


@pytest.mark.parametrize("scale", [2.0**7, 2.0**14])
def test_a_run_is_the_plain_float16_loop_on_transformers_model(gpt2, scale):
    model, checkpoint = gpt2
    fields = checkpoint.model.model_dump(exclude_none=True)
    optimizer = {"clip": 0.5, "warmup_steps": 0, "schedule": "constant"}
    config = run_config(fields, optimizer=optimizer, train=half(loss_scale=scale))
    found = steps_of(*started(config, checkpoint))
    expected = plain_loop(model, config, scale)
    assert expected[-1][0] < expected[0][0] - 0.2, "it learns"
    assert found[0].grad_norm > 0.5, "clipping is at work"
    for step, (loss, norm) in zip(found, expected, strict=True):
        assert (step.outcome, step.loss_scale) == ("updated", scale)
        assert step.loss == pytest.approx(loss, rel=5e-4)  # a unit of float16's last place
        assert step.grad_norm == pytest.approx(norm, rel=3e-3)  # 6 of them


@pytest.mark.parametrize(
    ("model", "rule"),
    [(GPT | {"dropout": 0.1}, "adamw"), (MOE, "adamw"), (GPT, "lamb")],
    ids=["gpt", "moe", "lamb"],
)
def test_a_scale_that_is_a_power_of_two_changes_no_bit_of_a_float32_run(model, rule):
    runs = []
    for scale in (1.0, 2.0**12):
        optimizer = {"name": rule, "clip": 0.5}
        config = run_config(model, optimizer=optimizer, train={"matmul": "strict"})
        trainer, loader = started(config)
        trainer.loss_scale = LossScale(scale)
        done = steps_of(trainer, loader, 5)
        numbers = [(step.loss, step.grad_norm, step.outcome) for step in done]
        runs.append((numbers, dict(trainer.stages[0].named_parameters())))
    (plain, weights), (scaled, others) = runs
    assert plain == scaled
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("clip", [0.0, 0.05, 50.0])
def test_gradients_reach_the_optimizer_clipped_and_without_the_scale(precision, clip):
    settings = half(precision=precision)
    trainer, loader = started(run_config(optimizer={"clip": clip}, train=settings))
    (step,) = steps_of(trainer, loader, 1)
    squares = sum(view.double().square().sum() for view in trainer.strategy.gradients.values())
    assert 0.05 < step.grad_norm < 50.0
    expected = 0.05 if clip == 0.05 else step.grad_norm
    assert math.sqrt(squares) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("rule", ["adamw", "lamb"])
def test_an_overflow_halves_the_scale_passes_the_batch_over_and_updates_nothing(rule):
    settings = half(initial_loss_scale=2.0**36, loss_scale_window=3)
    config = run_config(optimizer={"name": rule}, train=settings)
    trainer, loader = started(config)
    before = {key: tensor.clone() for key, tensor in trainer.optimizer.state().items()}
    first = trainer.train_step(loader)
    assert (first.step, first.outcome, first.loss_scale) == (1, "overflow", 2.0**36)
    assert math.isfinite(first.loss) and not math.isfinite(first.grad_norm)
    assert all(torch.equal(t, before[key]) for key, t in trainer.optimizer.state().items())
    assert (trainer.step, trainer.consumed_samples, trainer.optimizer.updates) == (1, 4, 0)
    done = [first, *steps_of(trainer, loader, 28)]
    assert [step.step for step in done] == list(range(1, 30))
    skipped = [step for step in done if step.outcome == "overflow"]
    assert trainer.optimizer.updates == 29 - len(skipped) and 10 < len(skipped) < 25
    expected = LossScale(2.0**36, window=3, hysteresis=2)
    for step in done:
        assert step.loss_scale == expected.scale
        expected.update(step.outcome == "overflow")


def test_an_overflow_moves_no_router_bias():
    model = MOE | {"router_bias_update_rate": 0.01}
    trainer, loader = started(run_config(model, train=half(initial_loss_scale=2.0**36)))
    (step,) = steps_of(trainer, loader, 1)
    assert (step.outcome, step.expert_load) == ("overflow", None)
    assert not any(router.bias.any() for router in trainer.balance.routers)


@pytest.mark.parametrize("broken", ["loss", "fixed"])
def test_a_loss_that_is_not_finite_or_an_overflow_of_a_fixed_scale_is_a_fault(broken):
    trainer, loader = started(run_config(train=half(loss_scale=2.0**40 * (broken == "fixed"))))
    if broken == "loss":
        with torch.no_grad():
            dict(trainer.stages[0].named_parameters())["final_norm.weight"].fill_(float("nan"))
    scale = trainer.loss_scale.scale
    (step,) = steps_of(trainer, loader, 1)
    assert (step.step, step.outcome) == (1, "fault")
    assert math.isfinite(step.loss) == (broken == "fixed")
    assert (trainer.step, trainer.loss_scale.scale, trainer.optimizer.updates) == (0, scale, 0)


def test_an_overflow_at_the_lowest_scale_is_a_fault():
    trainer, loader = started(run_config(train=half(initial_loss_scale=2.0**36)))
    trainer.loss_scale.lowest = 2.0**35
    (first, second, third) = steps_of(trainer, loader, 3)
    assert [s.outcome for s in (first, second, third)] == ["overflow", "overflow", "fault"]
    assert (third.step, third.loss_scale, trainer.step) == (3, 2.0**35, 2)


def trained(runtime, config):
    """(finished or the error, the rows of metrics.jsonl) of a run from the command's function."""
    try:
        answer = train(config, runtime, resume=False)
    except MtcliError as error:
        answer = error.problems[0].message
    return answer, metrics(Path(config.train.output))


@pytest.fixture
def run_on_disk(tmp_path):
    """A function from a model and train settings to what a run of them comes to."""
    write_dataset(tmp_path / "data", documents(), token_dtype(101))
    data, output = {"train": [str(tmp_path / "data")]}, str(tmp_path / "run")

    def run(model, **settings):
        config = run_config(model, data=data, train=half(output=output, **settings))
        return run_ranks(1, trained, config)[0]

    return run


def test_a_run_goes_on_after_overflows_and_says_so_in_its_metrics(run_on_disk):
    settings = {"steps": 6, "initial_loss_scale": 2.0**36, "loss_scale_hysteresis": 1}
    answer, rows = run_on_disk(GPT, **settings, on_nonfinite="stop")
    assert answer is True
    assert [row["loss_scale"] for row in rows] == [2.0 ** (36 - i) for i in range(6)]
    assert all(row["skipped"] and row["grad_norm"] is None and row["loss"] > 4.0 for row in rows)


def test_an_overflow_in_the_forward_pass_is_diagnosed_whatever_the_loss_scale(run_on_disk):
    """Weights of 200 carry attention past 65,504, where a smaller loss scale cannot help."""
    message, rows = run_on_disk(GPT | {"init_std": 200.0}, on_nonfinite="stop")
    assert message.startswith("step 1: loss nan, gradient norm nan at loss scale 65,536; first ")
    assert "the output of blocks.0.attention.out on rank 0, micro-batch 0" in message
    assert "sequence" in message and rows == []


def test_evaluation_and_generation_in_float16_are_float64_to_rounding(gpt2):
    model, checkpoint = gpt2
    scorer = open_model(str(checkpoint.folder), ["train.precision=fp16"], ALONE).scorer
    tokens = torch.from_numpy(Samples(run_config()).batch(0, 3))
    positions = torch.arange(9).expand(3, -1)
    with torch.no_grad():
        exact = model.double()(tokens).logits
    batch = ScoreBatch(tokens, positions, None, torch.arange(26), tokens.flatten()[1:])
    logprobs, _ = scorer.score(batch)
    expected = exact.log_softmax(-1).flatten(0, 1)[:-1].gather(1, tokens.flatten()[1:, None])[:, 0]
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected, rtol=2.0**-10, atol=0.0)
    logits = scorer.next_logits(tokens, positions, KVCache()).double()
    error = (logits - exact[:, -1]).norm() / exact[:, -1].norm()
    assert error < 4 * 2.0**-11
