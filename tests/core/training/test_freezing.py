"""train.freeze against plain torch, in the state of ranks, and in what a checkpoint holds; the
parity table has its layouts."""

from dataclasses import replace

import pytest
import torch
from ranks import run_ranks
from tiny import GPT, LLAMA, MOE, Samples, run_config
from trained import checkpoint_of, train_and_save

from mtcli.core.config.errors import Exit, MtcliError
from mtcli.core.mesh.name_patterns import matches
from mtcli.core.mesh.parameters import parameters, run_parameters, training_flops
from mtcli.core.plan.hardware import GPUS
from mtcli.core.plan.memory import state_bytes
from mtcli.core.plan.predict import predict_workload
from mtcli.core.plan.workload import Workload
from mtcli.core.runtime.launch import Runtime
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.run_config import planned_config
from mtcli.core.training.state import initialise, require_same_run
from mtcli.core.training.step import Trainer

ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))
FREEZE = ["embedding", "blocks.0-1.*", "*_norm"]
EXACT = {"precision": "fp64", "matmul": "strict", "steps": 3}


def test_a_pattern_names_a_parameter_a_module_or_a_range_of_blocks():
    names = parameters(run_config(GPT).model)

    def named(pattern):
        return {name for name in names if matches(name, pattern)}

    assert named("embedding") == {"embedding.weight"}
    assert named("blocks.1-2.*") == {n for n in names if n.startswith(("blocks.1.", "blocks.2."))}
    assert named("blocks.1-2") == named("blocks.1-2.*")
    assert named("*.bias") == {name for name in names if name.endswith(".bias")}
    assert named("blocks.0.attention.qkv.weight") == {"blocks.0.attention.qkv.weight"}
    assert named("blocks.10-12.*") == named("embed") == named("Blocks") == set()


def test_frozen_weights_stay_and_the_others_step_as_with_torch_alone():
    config = run_config(LLAMA, train=EXACT, optimizer={"clip": 0.01, "weight_decay": 0.5})
    plain, ours = Trainer(config, ALONE), _trained(config)
    initialise(plain)
    table = run_parameters(config.model, config.lora, tuple(FREEZE))
    named = dict(plain.stages[0].named_parameters())
    moving = {n: p for n, p in named.items() if not any(matches(n, f) for f in FREEZE)}
    assert 8 < len(moving) < len(named) and moving.keys() == {n for n in table if table[n].trained}
    groups = [
        {"params": [p for n, p in moving.items() if ("norm" in n) == norm],
         "weight_decay": 0.0 if norm else 0.5} for norm in (False, True)
    ]  # fmt: skip
    adamw = torch.optim.AdamW([g for g in groups if g["params"]], betas=(0.9, 0.95))
    loader = MicroBatchLoader(Samples(config), config, plain.groups)
    for step, done in enumerate(ours[1]):
        plain.step = step
        plain.forward_backward(loader)
        for name, parameter in moving.items():
            parameter.grad = plain.strategy.gradients[name].view_as(parameter).clone()
        norm = torch.nn.utils.get_total_norm([p.grad for p in moving.values()])
        assert done.grad_norm == pytest.approx(float(norm), rel=1e-10)
        for parameter in moving.values():  # torch's clipping adds 1e-6 to the norm
            parameter.grad.mul_(0.01 / norm)
        for group in adamw.param_groups:
            group["lr"] = done.lr
        adamw.step()
        for parameter in moving.values():
            parameter.grad = None
    loader.close()
    for name, parameter in ours[0].stages[0].named_parameters():
        torch.testing.assert_close(parameter, named[name], rtol=1e-10, atol=1e-14)
        assert parameter.requires_grad == (name in moving)


def _trained(config):
    train = config.train.model_copy(update={"freeze": tuple(FREEZE)})
    trainer = Trainer(config.model_copy(update={"train": train}), ALONE)
    initialise(trainer)
    loader = MicroBatchLoader(Samples(config), config, trainer.groups)
    done = [trainer.train_step(loader) for _ in range(3)]
    loader.close()
    return trainer, done


MIXED = MOE | {"num_layers": 4, "router_bias_update_rate": 0.01, "router_score": "sigmoid"}
STATES = {  # ranks: model, parallel
    1: [(GPT, {}), (MIXED, {})],
    2: [(GPT, {"zero": 1}), (LLAMA, {"zero": 3}), (MIXED, {"zero": 3, "ep": 2}), (GPT, {"pp": 2}),
        (MIXED, {"pp": 2, "ep": 1})],
}  # fmt: skip


def _state_configs(world, freeze):
    for model, parallel in STATES[world]:
        data = world // parallel.get("pp", 1)
        batch = {"global_batch_size": 2 * data}
        train = {"precision": "bf16", "freeze": freeze}
        yield run_config(model, parallel=parallel, batch=batch, train=train)


def _bytes(runtime, world):
    """Of each config (weights, gradients, optimizer) of this rank, and of all names of state."""
    found = []
    for config in _state_configs(world, FREEZE):
        trainer = Trainer(config, runtime)
        found.append((tuple(trainer.state_bytes_by_kind().values()), [*trainer.optimizer.state()]))
    return found


@pytest.mark.parametrize("world", STATES)
def test_frozen_weights_have_no_gradient_no_moments_and_no_master_as_planned(world):
    ranks, whole = run_ranks(world, _bytes, world), list(_state_configs(world, []))
    for number, config in enumerate(_state_configs(world, FREEZE)):
        work, plain = Workload.of(config, world), Workload.of(whole[number], world)
        for rank, found in enumerate(ranks):
            pp_rank = work.layout.coordinates(rank)["pp"]
            counted, names = found[number]
            if rank == work.layout.attention.rank(pp=pp_rank):
                planned = state_bytes(work, pp_rank)
                assert counted == planned, config.parallel
                before = state_bytes(plain, pp_rank)
                less = [a < 0.9 * b for a, b in zip(planned[1:], before[1:], strict=True)]
                assert all(less) or pp_rank == 1, "whose blocks are trained"
            assert not any(matches(n.partition("/")[2], f) for n in names for f in FREEZE)


def test_a_checkpoint_has_all_weights_and_no_state_of_frozen_ones(tmp_path):
    config = run_config(GPT, train={"precision": "bf16", "freeze": FREEZE})
    train_and_save(ALONE, config, tmp_path, stop=1)
    saved = checkpoint_of(tmp_path, 1)
    assert set(parameters(config.model)) <= set(saved.names())
    state = {name for name in saved.names() if "/" in name}
    kinds = {name.rpartition("/")[2] for name in state}
    assert kinds and not any(matches(name, f) for name in kinds for f in FREEZE)
    other = config.model_copy(update={"train": config.train.model_copy(update={"freeze": ()})})
    with pytest.raises(MtcliError, match="was trained with") as raised:
        require_same_run(other, saved)
    assert [problem.field for problem in raised.value.problems] == ["train.freeze"]


def test_patterns_that_match_nothing_are_named_with_what_is_near():
    words = ["train.freeze=['embeding', 'blocks.7-9.*', 'final_norm']", "model.num_layers=4"]
    with pytest.raises(MtcliError) as raised:
        planned_config("tiny", words, 1)
    first, second = raised.value.problems
    assert raised.value.code == Exit.WRONG_INPUT
    assert first.message == "no parameter of the model matches 'embeding'"
    assert "did you mean 'embedding'?" in first.hint and first.field == "train.freeze"
    assert "blocks.7-9.*" in second.message
    with pytest.raises(MtcliError, match="all parameters are frozen"):
        planned_config("tiny", ["train.freeze=['*']"], 1)


def test_flops_are_those_that_torch_counts_of_a_model_with_frozen_blocks():
    from torch.utils.flop_counter import FlopCounterMode

    sections = {"train": {"precision": "fp32", "matmul": "strict", "freeze": FREEZE}}
    config = run_config(LLAMA, batch={"global_batch_size": 1}, **sections)
    trainer = Trainer(config, ALONE)
    initialise(trainer)
    loader = MicroBatchLoader(Samples(config), config, trainer.groups)
    model, tokens = config.model, config.batch.seq_len
    with FlopCounterMode(display=False) as counter:
        trainer.forward_backward(loader)
    loader.close()
    counted = training_flops(model, tokens, config.lora, freeze=tuple(FREEZE))
    padded = 2 * 3 * (256 - model.vocab_size) * model.hidden_size
    fused = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    unneeded = 2 * model.hidden_size * fused  # gradients of the first trained block's inputs
    scores = 2 * 2 * tokens * model.hidden_size  # of two blocks, computed again in the backward
    total = tokens * (counted + padded + scores - unneeded)
    assert counter.get_total_flops() == total


def test_a_plan_with_frozen_blocks_takes_less_memory_and_time():
    settings = ["batch.seq_len=1024", "train.precision=bf16"]
    words = [*settings, "train.freeze=['embedding', 'blocks.0-15.*']"]
    work = Workload.of(planned_config("llama-3.2-1b", words, 1), 1)
    whole = replace(work, freeze=())
    cheap, plain = (predict_workload(w, GPUS["h100"]) for w in (work, whole))
    assert cheap.step_seconds < 0.9 * plain.step_seconds
    assert state_bytes(work, 0)[2] < 0.01 * state_bytes(whole, 0)[2]
