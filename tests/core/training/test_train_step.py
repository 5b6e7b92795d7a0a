"""A training step against a plain loop of transformers and torch, and on layouts against itself."""

import math
from contextlib import closing, nullcontext
from pathlib import Path

import pytest
import torch
from indexed_dataset import write_dataset
from ranks import run_ranks
from tiny import GPT, LLAMA, Samples, documents, metrics, run_config

import mtcli.core.training.step as step_module
from mtcli.core.config.errors import MtcliError
from mtcli.core.data.indexed import token_dtype
from mtcli.core.mesh.parameters import parameters
from mtcli.core.rehearse.live_memory import LiveMemory
from mtcli.core.runtime.launch import Runtime
from mtcli.core.training.loader import MicroBatchLoader, synthetic_loader
from mtcli.core.training.loop import train
from mtcli.core.training.state import initialise, load_weights
from mtcli.core.training.step import Trainer

ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))
STEPS = 6


def trainer_of(config):
    trainer = Trainer(config, ALONE)
    initialise(trainer)
    return trainer, MicroBatchLoader(Samples(config), config, trainer.groups)


def plain_loop(model, config):
    """[(loss, norm)] of a loop as any tutorial has it: decay on matrices, clip, warm-up, cosine."""
    o, b = config.optimizer, config.batch
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": o.weight_decay}]
    groups.append({"params": vectors, "weight_decay": 0.0})
    adamw = torch.optim.AdamW(groups, lr=o.lr, betas=o.betas, eps=o.eps)
    done = []
    for step in range(STEPS):
        rows = torch.from_numpy(Samples(config).batch(step * b.global_batch_size, 4))
        logits = model(rows[:, :-1]).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, rows[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip)
        past = (step + 1 - o.warmup_steps) / (STEPS - o.warmup_steps)
        share = (1 + math.cos(math.pi * past)) / 2 if past >= 0 else (step + 1) / o.warmup_steps
        for group in adamw.param_groups:
            group["lr"] = o.lr * share
        adamw.step()
        adamw.zero_grad()
        done.append((loss.item(), norm.item(), o.lr * share))
    return done


def test_a_run_is_the_plain_loop_on_transformers_model(gpt2):
    model, checkpoint = gpt2
    fields = checkpoint.model.model_dump(exclude_none=True)
    train = {"steps": STEPS, "matmul": "strict"}
    optimizer = {"clip": 0.5, "weight_decay": 0.2}
    config = run_config(fields, train=train, optimizer=optimizer)
    trainer = Trainer(config, ALONE)
    load_weights(trainer, checkpoint)
    loader = MicroBatchLoader(Samples(config), config, trainer.groups)
    found = [trainer.train_step(loader) for _ in range(STEPS)]
    loader.close()
    expected = plain_loop(model, config)
    assert [norm > 0.5 for _, norm, _ in expected][:3] == [True] * 3, "clipping is at work"
    assert [step.step for step in found] == list(range(1, STEPS + 1))
    for step, (loss, norm, lr) in zip(found, expected, strict=True):
        assert step.loss == pytest.approx(loss, rel=1e-5)
        assert step.grad_norm == pytest.approx(norm, rel=1e-4)
        assert step.lr == pytest.approx(lr)


def test_the_loss_falls_on_text_that_can_be_learnt():
    trainer, loader = trainer_of(run_config(optimizer={"lr": 1e-2}, train={"steps": 40}))
    losses = [trainer.train_step(loader).loss for _ in range(40)]
    loader.close()
    assert losses[0] == pytest.approx(math.log(101), abs=0.1)
    assert losses[-1] < losses[0] - 0.3
    assert trainer.consumed_samples == 160


def evaluated(runtime, config):
    trainer = Trainer(config, runtime)
    initialise(trainer)
    loader = MicroBatchLoader(Samples(config), config, trainer.groups)
    answer = trainer.evaluate(loader), trainer.evaluate(loader)
    loader.close()
    return answer


LAYOUTS = [
    (1, {}, {}),
    (2, {"tp": 2}, {"micro_batch_size": 2}),
    (2, {"pp": 2, "vpp": 2, "schedule": "interleaved"}, {}),
    (2, {}, {}),
    (2, {"cp": 2}, {}),
]


def evaluated_bytes(runtime, config):
    """The most that evaluation takes beside what was there, on this rank."""
    trainer = Trainer(config, runtime)
    initialise(trainer)
    loader = MicroBatchLoader(Samples(config), config, trainer.groups)
    with LiveMemory() as live:
        trainer.evaluate(loader)  # from here on the memory that ranks share is counted
        before = live.bytes
        live.begin()
        trainer.evaluate(loader)
    loader.close()
    return live.peak - before


@pytest.mark.parametrize(
    ("world", "parallel"),
    [(1, {}), (2, {"pp": 2}), (2, {"pp": 2, "vpp": 2, "schedule": "interleaved"})],
)
def test_evaluation_takes_no_more_for_more_micro_batches(world, parallel):
    few, many = (
        run_ranks(
            world,
            evaluated_bytes,
            run_config(
                parallel=parallel,
                batch={"micro_batch_size": 2, "global_batch_size": 2 * count},
                train={"eval_batches": 1},
            ),
        )
        for count in (4, 24)
    )
    assert many == few and min(few) > 0


@pytest.mark.parametrize(("world", "parallel", "batch"), LAYOUTS, ids=str)
def test_evaluation_is_the_mean_loss_without_dropout_on_any_layout(world, parallel, batch):
    train = {"eval_batches": 2, "precision": "fp64"}
    config = run_config(GPT | {"dropout": 0.5}, parallel=parallel, batch=batch, train=train)
    answers = run_ranks(world, evaluated, config)
    assert len(set(sum(answers, ()))) == 1, "every rank and every time the same"
    still = run_config(GPT, optimizer={"lr": 0.0}, train=train)
    trainer, loader = trainer_of(still)
    losses = [trainer.train_step(loader).loss for _ in range(2)]
    loader.close()
    assert answers[0][0] == pytest.approx(sum(losses) / 2, rel=1e-12)


def test_steps_and_evaluations_plan_attention_as_their_shapes_repeat(monkeypatch):
    asked = []

    def note(device, repeats):
        asked.append(repeats)
        return nullcontext()

    monkeypatch.setattr(step_module, "sdpa_backends", note)
    trainer = Trainer(run_config(), Runtime(0, 1, 0, 1, torch.device("cpu")))
    initialise(trainer)
    with closing(synthetic_loader(trainer.config, trainer.groups)) as loader:
        trainer.train_step(loader)
        assert asked == [True]
        trainer.evaluate(loader)
    assert asked == [True] * 2


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_a_step_that_is_not_finite_says_so_and_changes_nothing(broken):
    trainer, loader = trainer_of(run_config())
    weight = dict(trainer.stages[0].named_parameters())["final_norm.weight"]
    with torch.no_grad():
        weight.fill_(float("nan") if broken == "loss" else 1e38)
    before = [p.detach().clone() for p in trainer.stages[0].parameters()]
    step = trainer.train_step(loader)
    loader.close()
    assert (step.step, step.outcome) == (1, "fault")
    assert not math.isfinite(step.loss + step.grad_norm)
    assert trainer.step == 0
    for parameter, value in zip(trainer.stages[0].parameters(), before, strict=True):
        assert torch.equal(parameter.nan_to_num(), value.nan_to_num())
    assert not any(tensor.any() for tensor in trainer.optimizer.state().values())


def diverging(runtime, config):
    """What a run whose weights overflow in its first step comes to: (finished or error, rows)."""
    try:
        answer = train(config, runtime, resume=False)
    except MtcliError as error:
        answer = error.problems, int(error.code)
    return answer, metrics(Path(config.train.output))


@pytest.mark.parametrize("choice", ["stop", "skip"])
def test_a_loop_stops_at_or_skips_steps_that_are_not_finite(tmp_path, choice):
    write_dataset(tmp_path / "data", documents(), token_dtype(101))
    settings = {"steps": 3, "output": str(tmp_path / "run"), "on_nonfinite": choice}
    optimizer = {"lr": 1e38, "warmup_steps": 0, "schedule": "constant"}
    data = {"train": [str(tmp_path / "data")]}
    config = run_config(data=data, optimizer=optimizer, train=settings)
    ((answer, rows),) = run_ranks(1, diverging, config)
    assert rows[0]["loss"] == pytest.approx(math.log(101), abs=0.2)
    ((problem,), code) = answer
    if choice == "skip":  # and what the first step has ruined is not saved
        assert [row["step"] for row in rows] == [1, 2, 3] and code == 1
        assert rows[1]["loss"] is None, "JSON has no NaN"
        assert problem.message.startswith("step 3: the checkpoint was not saved (rank 0: ")
        assert problem.message.endswith(" holds a value that is not finite)")
        assert problem.hint.startswith(
            "there is no good checkpoint; lower optimizer.lr, and --start"
        )
        return
    assert problem.message.startswith("step 2: loss nan, gradient norm nan; first ")
    assert problem.hint.startswith("no checkpoint is saved yet; lower optimizer.lr, look at")
    assert problem.hint.endswith("'skip'")
    assert code == 1 and len(rows) == 1


@pytest.mark.parametrize(
    ("precision", "state"), [("fp32", 4 + 4 + 8), ("bf16", 2 + 4 + 12), ("fp16", 2 + 4 + 12)]
)
def test_state_bytes_are_weights_gradients_masters_and_moments(precision, state):
    config = run_config(LLAMA, train={"precision": precision})
    trainer = Trainer(config, ALONE)
    padding = 2 * (256 - 150) * 16  # rows of the embedding and the head
    elements = sum(p.numel for p in parameters(config.model).values()) + padding
    assert trainer.state_bytes() == state * elements
