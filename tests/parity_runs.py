"""What a row of the parity table is, and how it is measured: on its layout and by one rank."""

from functools import cache
from typing import NamedTuple

import torch
from ranks import run_ranks
from tiny import (
    BATCH,
    BERT,
    BIASED,
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

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import run_parameters
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer

STEPS = 20  # of the curve
TWO_LAYERS = {"num_layers": 2}
LAMB = {"name": "lamb", "lr": 0.1}  # of which a trust ratio near 0.04 is left

MODELS = {
    "gpt": GPT | TWO_LAYERS,
    "gpt dropout": GPT | DROPPING | TWO_LAYERS,
    "gpt deep": GPT | DROPPING | {"num_layers": 8},
    "llama": LLAMA | TWO_LAYERS,
    "llama dropout": LLAMA | DROPPING | TWO_LAYERS,
    "llama deep": LLAMA,
    "one key head": LLAMA | TWO_LAYERS | {"num_kv_heads": 1, "qkv_bias": True},
    "one key head dropout": GPT | DROPPING | TWO_LAYERS | {"num_kv_heads": 1},
    "gpt of sixes dropout": GPT | DROPPING | TWO_LAYERS | {"hidden_size": 24, "num_heads": 6},
    "llama of sixes": LLAMA
    | TWO_LAYERS
    | {"hidden_size": 24, "num_heads": 12, "num_kv_heads": 6, "ffn_hidden_size": 36},
    "gpt full": GPT | {"causal": False} | TWO_LAYERS,
    "llama documents": LLAMA | TWO_LAYERS,
    "gpt dropout documents": GPT | DROPPING | TWO_LAYERS,
    "llama full documents": LLAMA | {"causal": False} | TWO_LAYERS,
    "moe early documents": MOE | {"capacity_factor": 0.5, "drop_policy": "position"},
    "moe": MOE,
    "moe capped": MOE | {"capacity_factor": 1.0},
    "moe early": MOE | {"capacity_factor": 0.5, "drop_policy": "position", "pad_to_capacity": True},
    "moe wide": MOE
    | {"num_kv_heads": 4, "num_experts": 8, "router_groups": 4, "router_top_groups": 2}
    | {"router_score": "sigmoid", "shared_expert_ffn_hidden_size": 8, "shared_expert_gate": True},
    "moe biased": BIASED,
    "gpt lamb": GPT | DROPPING | TWO_LAYERS,
    "llama lamb": LLAMA | TWO_LAYERS,
    "moe lamb": MOE,
    "bert": BERT,
    "bert dropout": BERT | DROPPING,
    "bert post": BERT | DROPPING | {"norm_order": "post"},
    "bert masked": BERT | {"sentence_order": False},
    "bert classes": BERT | DROPPING | CLASSIFYING,
    # With weights of 0.02 the pooler is linear, and the gradients of softmax sum to 0 over the
    # choices: the gradient of the last norm's bias would be what is left of terms that cancel.
    "bert choices": BERT | CHOOSING | {"norm_order": "post", "init_std": 0.2},
    "gpt lora": GPT | DROPPING | TWO_LAYERS,
    "llama lora": LLAMA | TWO_LAYERS,
    "llama deep lora": LLAMA,
    "llama few lora": LLAMA | TWO_LAYERS,
    "one key head lora": LLAMA | TWO_LAYERS | {"num_kv_heads": 1, "qkv_bias": True},
    "moe lora": MOE | {"shared_expert_ffn_hidden_size": 8, "shared_expert_gate": True},
}
LORA = {"rank": 3, "alpha": 6.0, "dropout": 0.2}
FEW = {"rank": 2, "targets": ["k_proj", "up_proj", "down_proj"]}


class Row(NamedTuple):
    """A layout on `world` ranks of a model: `parallel` and `batch` sections over the defaults."""

    model: str
    world: int
    parallel: dict
    batch: dict = {}

    def __str__(self):
        sizes = {"world": self.world} | self.parallel | self.batch
        return f"{self.model}: " + " ".join(f"{k}={v}" for k, v in sizes.items())

    def config(self, precision="fp64", steps=STEPS):
        train = {"precision": precision, "steps": steps, "matmul": "strict"}
        sections = {"parallel": self.parallel, "batch": self.batch, "train": train}
        sections["data"] = DOCUMENTS if self.model.endswith("documents") else {}
        sections["optimizer"] = LAMB if self.model.endswith("lamb") else {}
        if self.model.endswith("lora"):
            sections["lora"] = FEW if "few" in self.model else LORA
        return run_config(MODELS[self.model], **sections)


class Measured(NamedTuple):
    """What a rank saw: its weights, and the rows it keeps of the first gradients, by name."""

    weights: dict
    gradients: dict
    rows: dict
    losses: list
    norms: list
    untrained: dict  # what no gradient trains, after the last step


def train_on(runtime, config, steps, samples=None):
    """Trains `steps` steps on a rank and returns its Measured."""
    samples = samples or (Samples if config.model.head == "lm" else EncoderSamples)
    trainer = Trainer(config, runtime)
    initialise(trainer)
    _move_adapters(trainer)
    weights = {n: (held.tensor.clone(), held.rows) for n, held in trainer.strategy.shards.items()}
    loader = MicroBatchLoader(samples(config), config, trainer.groups)
    done = [trainer.train_step(loader)]
    gradients = {name: view.clone() for name, view in trainer.strategy.gradients.items()}
    rows = {name: trainer.strategy.ownership.rows(name) for name in gradients}
    done += [trainer.train_step(loader) for _ in range(steps - 1)]
    loader.close()
    held = trainer.strategy.shards
    frozen = {name for name in held if trainer.table[name].frozen}
    assert all(torch.equal(held[name].tensor, weights[name][0]) for name in frozen)
    untrained = {n: held[n].tensor.clone() for n in held if n not in gradients and n not in frozen}
    return Measured(weights, gradients, rows, *([s[i] for s in done] for i in (1, 3)), untrained)


def _move_adapters(trainer):
    """Fills the Bs of adapters, which begin at 0, where no A has a gradient."""
    for name, shard in trainer.strategy.shards.items():
        if ".adapter.b." in name:
            described = trainer.table[name]
            values = 0.1 * torch.sin(torch.arange(1.0, described.numel + 1)).view(described.shape)
            for box, view in shard.blocks(trainer.groups):
                view.copy_(values[box.slices])
    trainer.optimizer.reset_masters()


def measure(runtime, row):
    """(a curve in float64, the same in float32) of a row on a rank."""
    return tuple(train_on(runtime, row.config(p), STEPS) for p in ("fp64", "fp32"))


@cache
def one_rank(model, global_batch_size=BATCH["global_batch_size"]):
    """The oracle: the same model and samples in one process, one sequence at a time."""
    row = Row(model, 1, {}, {"global_batch_size": global_batch_size})
    return run_ranks(1, measure, row)[0]


class Differences(NamedTuple):
    """The largest differences of a row from one rank, relative: the first step's gradients by
    parameter norm, and loss and gradient norm of every step."""

    gradient_64: float
    curve_64: float
    gradient_32: float
    curve_32: float


def compare(row):
    """The Differences of a row. Raises AssertionError where an initial weight differs in any bit,
    or a last value of what no gradient trains."""
    ranks = run_ranks(row.world, measure, row)
    exact, close = one_rank(row.model, row.config().batch.global_batch_size)
    found = [
        Differences(
            slices(row, rank, mine, exact),
            worst(exact, mine),
            slices(row, rank, rounded, close),
            worst(close, rounded),
        )
        for rank, (mine, rounded) in enumerate(ranks)
    ]
    for pair in ranks:
        for mine, whole in zip(pair, (exact, close), strict=True):
            for name, value in mine.untrained.items():
                assert torch.equal(value, whole.untrained[name]), f"{name} ends otherwise"
                assert value.any(), f"{name} has moved"
    held = [set(mine.weights) for mine, _ in ranks]
    assert set.union(*held) == set(exact.weights), "together the ranks hold every parameter"
    kept = sum(gradient.numel() for mine, _ in ranks for gradient in mine.gradients.values())
    assert kept >= sum(gradient.numel() for gradient in exact.gradients.values())
    return Differences(*torch.tensor(found, dtype=torch.float64).amax(0).tolist())


def slices(row, rank, mine, whole):
    """The largest relative difference of a rank's gradients from its slices of the whole ones,
    zeros where it holds padding."""
    layout = ParallelLayout.of(row.config().parallel, row.world)
    every = max(gradient.norm() for gradient in whole.gradients.values())
    table, found = run_parameters(row.config().model, row.config().lora), []
    for name, gradient in mine.gradients.items():
        box = table[name].box(layout, rank)
        shape, stored = table[name].local_shape(layout), table[name].stored_shape(layout)
        weight, expected = (torch.zeros(shape, dtype=gradient.dtype) for _ in range(2))
        everything = table[name].local_shape(ParallelLayout(1))
        weight[box.inside] = whole.weights[name][0].view(everything)[box.slices]
        kept, at = mine.weights[name]
        assert torch.equal(kept, weight.view(stored)[at]), f"{name} starts otherwise"
        expected[box.inside] = whole.gradients[name].view(everything)[box.slices]
        error = gradient - expected.view(stored)[mine.rows[name]]
        norm = whole.gradients[name].norm()
        # A bias of all choices moves no softmax, so that rounding is all that its gradient is. Any
        # other gradient is held to its own norm: of these models all are above 7e-5 of the largest.
        vanishes = name == "head.classifier.bias" and row.config().model.head == "multiple_choice"
        assert vanishes == bool(norm < 1e-6 * every), f"{name} has a gradient of norm {norm}"
        found.append(float(error.norm() / (every if vanishes else norm)))
    return float(torch.tensor([0.0, *found]).max())  # Python's max would pass over a NaN


def worst(whole, mine):
    """The largest relative difference of losses and gradient norms, in the steps that both did."""
    a, b = (torch.tensor([m.losses, m.norms], dtype=torch.float64) for m in (whole, mine))
    steps = min(a.shape[1], b.shape[1])
    return float(((a - b)[:, :steps].abs() / a[:, :steps].abs()).max())
