"""An array's models against runs of their own: the same weights, gradients, optimizer state and
losses after every step."""

import shutil
from functools import partial

import pytest
import torch
from marks import slow
from tiny import (
    BERT,
    CHOOSING,
    CLASSIFYING,
    DOCUMENTS,
    DROPPING,
    GPT,
    LLAMA,
    MOE,
    EncoderSamples,
    Samples,
    run_config,
)

from mtcli.core.config.lora import adapts_experts
from mtcli.core.runtime.launch import Runtime
from mtcli.core.sweep import array as array_module
from mtcli.core.sweep.array import ModelArray
from mtcli.core.sweep.batches import ArrayLoader
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer, run_groups

# An array rounds gradients to fp16 that a run alone on a CPU adds in float32.
TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 2e-2, "fp16": 8e-3}
RATES = (
    {"lr": 3e-3, "weight_decay": 0.1},
    {"lr": 1e-2, "weight_decay": 0.0, "betas": [0.8, 0.99], "clip": 0.3, "schedule": "linear"},
    {"lr": 1e-3, "eps": 1e-6, "clip": 0.0, "warmup_steps": 0, "min_lr": 1e-4, "schedule": "wsd"},
)
TWO = {"num_layers": 2}
STEPS = 3
ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))


def configs_of(model, precision="fp64", optimizers=RATES, narrow=False, **sections):
    """Configs of three models that differ in all that is fusible."""
    plain = {"dropout": 0.0, "attention_dropout": 0.0}
    drops = (plain, {}, {"dropout": 0.0}) if "dropout" in model else [{}] * 3
    return [
        run_config(
            model | drop | {"init_std": 0.02 * (1 + index)},
            (f"seed={7 + index}",),
            optimizer=optimizer,
            train={"precision": precision, "gradients": "bf16" if narrow else "fp32"},
            **sections,
        )
        for index, (drop, optimizer) in enumerate(zip(drops, optimizers, strict=True))
    ]


def alone(runtime, config, steps, base):
    """The trainer of a run of its own and its steps."""
    trainer = Trainer(config, runtime)
    begin(trainer, base)
    loader = MicroBatchLoader(samples(config), config, trainer.groups)
    done = [trainer.train_step(loader) for _ in range(steps)]
    loader.close()
    return trainer, done


def begin(run, base):
    """Fills a run's weights from its seed; adapters have the frozen ones of `base`, and Bs that are
    not zero."""
    initialise(run)
    for name, shard in run.strategy.shards.items():
        if run.table[name].frozen:
            shard.tensor.copy_(base.strategy.shards[name].tensor)
        elif ".adapter.b." in name:
            numbers = torch.arange(shard.tensor.numel(), dtype=torch.float64)
            shard.tensor.copy_(0.02 * numbers.sin().view(shard.tensor.shape))
    run.optimizer.reset_masters()


def samples(config):
    """The data of a run, of another order for each seed where it is an encoder's."""
    if config.model.head == "lm":
        return Samples(config)
    rows = EncoderSamples(config)
    own = rows.rows
    rows.rows = lambda start, count: own(start + 4 * (config.seed % 7), count)
    return rows


def as_array(runtime, configs, steps):
    """The array of these models and its steps."""
    array = ModelArray(configs, run_groups(configs[0], runtime))
    for member in array.members:
        begin(member, array.members[0])
    widest = max(configs, key=lambda c: c.model.dropout + c.model.attention_dropout)
    loaders = [MicroBatchLoader(samples(c), widest, array.groups) for c in configs]
    loader = ArrayLoader(loaders)
    done = [array.train_step(loader) for _ in range(steps)]
    loader.close()
    return array, done


def difference(runtime, configs, steps, of_array=None):
    """The largest relative differences of losses and norms, and of each kind of tensor."""
    array, done = as_array(runtime, of_array or configs, steps)
    worst = dict.fromkeys(("step", "weights", "gradients", "state"), 0.0)
    for index, (member, config) in enumerate(zip(array.members, configs, strict=True)):
        trainer, expected = alone(runtime, config, steps, array.members[0])
        for made, wanted in zip(done, expected, strict=True):
            mine = made[index]
            assert (mine.step, mine.lr, mine.outcome) == (wanted.step, wanted.lr, wanted.outcome)
            assert mine.loss_scale == wanted.loss_scale
            pairs = ((mine.loss, wanted.loss), (mine.grad_norm, wanted.grad_norm))
            worst["step"] = max(worst["step"], *(abs(a - b) / abs(b) for a, b in pairs))
        kinds = {
            "weights": [trained_weights(x) for x in (member, trainer)],
            "gradients": [x.strategy.gradients for x in (member, trainer)],
            "state": [x.optimizer.state() for x in (member, trainer)],
        }
        for kind, (mine, wanted) in kinds.items():
            assert mine.keys() == wanted.keys()
            worst[kind] = max(worst[kind], distance(mine, wanted))
    return worst


def trained_weights(run):
    """The weights of a run that it trains, by name."""
    shards = run.strategy.shards.items()
    return {name: shard.tensor for name, shard in shards if run.table[name].trained}


def distance(mine, wanted):
    """Relative, of all tensors together: keys' biases have gradients of rounding alone, which
    AdamW makes as large as any. What an array has beyond a run's own tensor are zeros."""
    pairs = []
    for name, theirs in wanted.items():
        inside = tuple(map(slice, theirs.shape))
        pairs.append((mine[name][inside], theirs))
        assert mine[name].count_nonzero() == mine[name][inside].count_nonzero(), name
    a, b = (torch.cat([x.double().flatten() for x in each]) for each in zip(*pairs, strict=True))
    return float((a - b).norm() / b.norm())


SGD = (
    {"name": "sgd", "lr": 0.1, "momentum": 0.9},
    {"name": "sgd", "lr": 0.05, "momentum": 0.5, "weight_decay": 0.01},
    {"name": "sgd", "lr": 0.2, "momentum": 0.9, "clip": 0.0},
)
LAMB = (
    {"name": "lamb", "lr": 0.01},
    {"name": "lamb", "lr": 0.02, "trust_bounds": [0.1, 1.0], "betas": [0.8, 0.9]},
    {"name": "lamb", "lr": 0.005, "weight_decay": 0.0},
)
MUON = (
    {"name": "muon", "lr": 0.01},
    {"name": "muon", "lr": 0.02, "momentum": 0.8, "nesterov": False},
    {"name": "muon", "lr": 0.005, "weight_decay": 0.0},
)
CAPPED = MOE | {"capacity_factor": 1.0, "aux_loss_coeff": 0.02, "drop_scope": "sub_sequence"}
SHARED = MOE | {"shared_expert_ffn_hidden_size": 8, "shared_expert_gate": True}
ROTATION = {"rotary_fraction": 0.5, "rope_local_theta": 30.0, "window": 3, "window_pattern": "GL"}
ROTATION |= {"rope_interleaved": True, "parallel_residual": True, "head_bias": True}
MODERN = {"position": "rope", "window": 1, "window_pattern": "GL", "embedding_norm": True}
MODERN |= {"first_attention_norm": False, "transform_bias": False, "sentence_order": False}
MODERN |= {"norm_bias": False, "activation": "geglu", "ffn_hidden_size": 24}
CASES = {
    "gpt fp64": (GPT, {}),
    "llama fp32": (LLAMA, {"precision": "fp32"}),
    "gpt bf16": (GPT, {"precision": "bf16"}),
    "llama fp16": (LLAMA, {"precision": "fp16"}),
    "sgd and post norm": (GPT | {"norm_order": "post"}, {"optimizers": SGD}),
    "norms of each head": (LLAMA | {"norm": "layernorm", "qk_norm": "each_head"}, {}),
    "norms of heads around": (LLAMA | {"norm_order": "sandwich", "qk_norm": "head"}, {}),
    "norms of outputs": (
        LLAMA | {"norm": "layernorm", "norm_order": "after", "qk_norm": "projection"},
        {"precision": "fp32"},
    ),
    "lamb": (LLAMA, {"optimizers": LAMB}),
    "muon": (SHARED, {"optimizers": MUON}),
    "muon fp32": (LLAMA, {"optimizers": MUON, "precision": "fp32"}),
    "gated by GELU": (SHARED | {"activation": "geglu"}, {}),
    "gated and clamped": (
        SHARED | {"activation": "swiglu_clamped", "activation_limit": 0.05, "init_std": 0.2},
        {},
    ),
    "capped": (LLAMA | {"attention_softcap": 0.3, "logit_softcap": 0.2}, {}),
    "sinks": (LLAMA | {"attention_sinks": True, "attention_dropout": 0.1}, {}),
    "norms with an offset": (GPT | {"norm_offset": 1.0}, {}),
    "parallel blocks of one norm": (LLAMA | ROTATION | {"parallel_norms": 1}, {"data": DOCUMENTS}),
    "norms without biases": (GPT | {"norm_bias": False}, {}),
    "dropout": (GPT | DROPPING, {}),
    "documents": (LLAMA, {"data": DOCUMENTS}),
    "several sequences, recomputed": (
        GPT,
        {"batch": {"micro_batch_size": 2}, "parallel": {"recompute": "full"}},
    ),
    "mixture with a capacity": (CAPPED, {}),
    "masked tokens fp32": (BERT | {"sentence_order": False}, {"precision": "fp32"}),
    "masked tokens and order": (BERT | DROPPING, {"batch": {"micro_batch_size": 2}}),
    "masked tokens in windows": (BERT | MODERN, {}),
    "positions behind an offset": (
        BERT | {"position_offset": 2, "norm_order": "post", "token_types": 1},
        {},
    ),
    "classes": (BERT | DROPPING | CLASSIFYING, {}),
    "choices": (BERT | CHOOSING | {"norm_order": "post"}, {"batch": {"micro_batch_size": 2}}),
    "narrow sums": (LLAMA, {"precision": "bf16", "narrow": True}),
    "mixture with biases": (MOE | {"expert_bias": True, "router_bias": True}, {}),
    "mixture with a shared expert": (SHARED | {"drop_policy": "position"}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_models_of_an_array_are_runs_of_their_own(case):
    model, options = CASES[case]
    worst = difference(ALONE, configs_of(model | TWO, **options), STEPS)
    assert max(worst.values()) < TOLERANCE[options.get("precision", "fp64")], worst


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_an_array_of_one_is_a_run_of_its_own(model):
    assert max(difference(ALONE, configs_of(model)[1:2], 3).values()) < TOLERANCE["fp64"]


SHALLOW = {"num_layers": 1}
TRACED = slow("a trace of 4 s")


def compiled_by(monkeypatch, backend):
    """Has arrays that are compiled traced as always, and run by a backend; returns dynamo's
    counters."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    for name in ("compile_stage", "CompiledAdamW"):
        monkeypatch.setattr(
            array_module, name, partial(getattr(array_module, name), backend=backend)
        )
    return counters


def compiled(config):
    """The config with train.compile."""
    train = config.train.model_copy(update={"compile": True})
    return config.model_copy(update={"train": train})


# Graphs: of the losses, the norms and the update; None: of blocks, where something breaks one.
@pytest.mark.parametrize(
    ("model", "options", "graphs"),
    [
        pytest.param(GPT, {}, 3, id="gpt fp64"),
        pytest.param(GPT, {"optimizers": SGD}, 1, id="sgd"),
        pytest.param(LLAMA, {"precision": "bf16"}, 3, id="llama bf16", marks=TRACED),
        pytest.param(
            LLAMA | DROPPING, {"data": DOCUMENTS}, None, id="dropout of documents", marks=TRACED
        ),
    ],
)
def test_compiled_models_of_an_array_are_runs_of_their_own(model, options, graphs, monkeypatch):
    precision = options.get("precision", "fp64")
    counters = compiled_by(monkeypatch, "aot_eager")
    worst = compiled_difference(configs_of(model | SHALLOW, **options))
    assert max(worst.values()) < TOLERANCE[precision], worst
    assert graphs in (None, counters["stats"]["unique_graphs"])


@slow("g++ compiles for 38 s")
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_generated_code_trains_the_models_of_an_array_as_runs_of_their_own(monkeypatch):
    compiled_by(monkeypatch, "inductor")
    worst = compiled_difference(configs_of(GPT | SHALLOW, "fp32"))
    assert max(worst.values()) < TOLERANCE["fp32"], worst


def compiled_difference(configs):
    """As `difference`, of a compiled array and runs as written; its gradients are not clipped in
    memory."""
    made = difference(ALONE, configs, STEPS, [compiled(config) for config in configs])
    return {kind: found for kind, found in made.items() if kind != "gradients"}


@TRACED
def test_a_compiled_model_that_is_not_finite_stays_as_it_was(monkeypatch):
    compiled_by(monkeypatch, "aot_eager")
    configs = [compiled(config) for config in configs_of(GPT | SHALLOW)]
    array = ModelArray(configs, run_groups(configs[0], ALONE))
    for member in array.members:
        initialise(member)
    loader = ArrayLoader([MicroBatchLoader(Samples(c), c, array.groups) for c in configs])
    array.train_step(loader)
    poisoned = array.members[1]
    poisoned.strategy.shards["blocks.0.mlp.up.weight"].tensor[3, 5] = float("nan")
    kinds = (trained_weights(poisoned), poisoned.optimizer.state())
    before = [{name: x.clone() for name, x in kind.items()} for kind in kinds]
    outcomes = [step.outcome for step in array.train_step(loader)]
    loader.close()
    assert outcomes == ["updated", "fault", "updated"]
    assert [member.optimizer.updates for member in array.members] == [2, 1, 2]
    for kind, old in zip(kinds, before, strict=True):
        for name, x in kind.items():
            torch.testing.assert_close(x, old[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("precision", ["fp64", "fp16"])
def test_a_model_that_is_not_finite_stays_as_it_was_and_the_others_do_not_notice(precision):
    configs = configs_of(GPT, precision)
    sound, expected = as_array(ALONE, configs, 3)
    array = ModelArray(configs, run_groups(configs[0], ALONE))
    for member in array.members:
        initialise(member)
    loaders = [MicroBatchLoader(Samples(c), c, array.groups) for c in configs]
    loader = ArrayLoader(loaders)
    done = [array.train_step(loader)]
    poisoned = array.members[1].strategy.shards
    poisoned["blocks.2.mlp.up.weight"].tensor[3, 5] = float("nan")
    before = {name: shard.tensor.clone() for name, shard in poisoned.items()}
    done += [array.train_step(loader) for _ in range(2)]
    loader.close()
    assert [step[1].outcome for step in done] == ["updated", "fault", "fault"]
    for name, shard in poisoned.items():
        assert torch.equal(shard.tensor.nan_to_num(7.0), before[name].nan_to_num(7.0))
    for index in (0, 2):
        for mine, wanted in zip(done, expected, strict=True):
            assert mine[index]._replace(seconds=0.0) == wanted[index]._replace(seconds=0.0)
        ours, theirs = (x.members[index].strategy.shards for x in (array, sound))
        assert all(torch.equal(ours[name].tensor, theirs[name].tensor) for name in theirs)


def test_a_compacted_array_goes_on_as_before_with_the_models_that_are_left():
    configs = configs_of(LLAMA, "fp64")
    whole, expected = as_array(ALONE, configs, 4)
    array = ModelArray(configs, run_groups(configs[0], ALONE))
    for member in array.members:
        initialise(member)
    loader = ArrayLoader([MicroBatchLoader(Samples(c), c, array.groups) for c in configs])
    for _ in range(2):
        array.train_step(loader)
    bytes_before = array.memory.bytes
    array.compact([2, 0])
    loader.compact([2, 0])
    assert abs(array.memory.bytes / bytes_before - 2 / 3) < 0.01
    for wanted in expected[2:]:
        made = array.train_step(loader)
        assert made[0].loss == pytest.approx(wanted[2].loss, rel=1e-12)
        assert made[1].loss == pytest.approx(wanted[0].loss, rel=1e-12)
    loader.close()
    for member, index in zip(array.members, (2, 0), strict=True):
        theirs = whole.members[index]
        for kind in ("weights", "state"):
            ours, wanted = (
                {n: s.tensor for n, s in x.strategy.shards.items()}
                if kind == "weights"
                else x.optimizer.state()
                for x in (member, theirs)
            )
            assert distance(ours, wanted) < 1e-12


LORA = (
    {"rank": 3, "alpha": 6.0, "dropout": 0.2},
    {"rank": 1, "alpha": 8.0},
    {"rank": 5, "alpha": 2.0, "dropout": 0.1},
)
FEW = ["k_proj", "up_proj", "down_proj"]
LATENT = {"mla": {"q_rank": 5, "kv_rank": 6, "nope_dim": 3, "rope_dim": 2, "value_dim": 7}}
LATENT |= {"num_kv_heads": 4, "head_dim": 5}
LORA_CASES = {
    "gpt fp64": (GPT | DROPPING, {}),
    "llama fp32": (LLAMA | {"qkv_bias": True}, {"precision": "fp32"}),
    "gpt bf16": (GPT, {"precision": "bf16"}),
    "few targets": (LLAMA, {"lora": {"targets": FEW}, "optimizers": SGD}),
    "mixture": (CAPPED | SHARED, {"data": DOCUMENTS}),
    "experts": (MOE | SHARED, {"data": DOCUMENTS, "lora": {"targets": ["all-linear"]}}),
    "experts, padded": (
        MOE | {"capacity_factor": 0.5, "pad_to_capacity": True, "expert_bias": True},
        {"lora": {"targets": ["v_proj", "experts.up_proj", "experts.down_proj"]}},
    ),
    "latents": (LLAMA | LATENT, {"data": DOCUMENTS}),
    "experts bf16": (MOE, {"precision": "bf16", "lora": {"targets": ["experts.gate_proj"]}}),
    "muon": (LLAMA, {"optimizers": MUON}),
    "lamb, recomputed": (
        LLAMA,
        {
            "optimizers": LAMB,
            "parallel": {"recompute": "full"},
            "batch": {"micro_batch_size": 2},
        },
    ),
}


def lora_configs(model, **options):
    """Those configs with adapters of their own rank, alpha, dropout and seed."""
    configs = configs_of(model, **options)
    loras = LORA
    if adapts_experts(configs[0].lora.targets):  # whose array has one rank, and drops nothing
        loras = [{"rank": 3, "alpha": lora["alpha"]} for lora in LORA]
    pairs = zip(configs, loras, strict=True)
    return [c.model_copy(update={"lora": c.lora.model_copy(update=own)}) for c, own in pairs]


@pytest.mark.parametrize("case", LORA_CASES)
def test_adapters_of_an_array_are_runs_of_their_own_on_one_base(case):
    model, options = LORA_CASES[case]
    configs = lora_configs(model | TWO, **options)
    worst = difference(ALONE, configs, STEPS)
    assert max(worst.values()) < TOLERANCE[options.get("precision", "fp64")], worst


@pytest.mark.parametrize("model", [GPT, BERT, BERT | CHOOSING], ids=["gpt", "masked", "choices"])
def test_each_model_of_an_array_is_evaluated_as_alone(model):
    configs = configs_of(model)
    array = ModelArray(configs, run_groups(configs[0], ALONE))
    expected = []
    for member, config in zip(array.members, configs, strict=True):
        initialise(member)
        trainer = Trainer(config, ALONE)
        begin(trainer, member)
        loader = MicroBatchLoader(samples(config), config, trainer.groups)
        expected.append(trainer.evaluate(loader))
        loader.close()
    loaders = [MicroBatchLoader(samples(c), c, array.groups) for c in configs]
    loader = ArrayLoader(loaders)
    assert array.evaluate(loader) == pytest.approx(expected, rel=1e-12)
    loader.close()
