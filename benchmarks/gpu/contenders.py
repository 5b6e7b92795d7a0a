"""Who trains in bench_step.py and ../bench_train.py: each a model of one start and its step.

The weights are those that mtcli draws from the config's seed, rounded as its model holds them, and
go to the others by the maps that read and write their checkpoints. All train with AdamW, decay of
matrices alone and clipping; rivals as their users run them on one GPU: torch.compile of model and
loss, float32 weights under autocast to bfloat16, torch's fused AdamW, and no
question to the device within a step.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtcli.core.checkpoint.huggingface import config_json
from mtcli.core.checkpoint.huggingface.family import Family
from mtcli.core.config.schema import RunConfig
from mtcli.core.mesh.parameters import parameters
from mtcli.core.mesh.sharding import Box
from mtcli.core.model.build import activation_format
from mtcli.core.model.init import initial_values
from mtcli.core.model.inputs import Inputs, make_inputs
from mtcli.core.parallel.pipeline import Pipeline
from mtcli.core.profile.clock import clock_for
from mtcli.core.runtime.launch import Runtime, let_segments_grow, set_gpu_matmul
from mtcli.core.schedule.generators import forward_only
from mtcli.core.training.loader import StepBatch
from mtcli.core.training.run_log import describe_attention
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Phases, Trainer
from mtcli.kernels.gemm import DTYPES

COMPARED = 256  # tokens whose losses are compared before training


@dataclass
class Contender:
    """`losses(rows)` [COMPARED] of the first sequence; `train(rows)` makes a step: its loss.

    rows are [b, s + 1] tokens on the device. What `train` returns may still be on its way.
    """

    losses: Callable[[Tensor], Tensor]
    train: Callable[[Tensor], Any]
    facts: dict[str, Any] = field(default_factory=dict)
    phases: Callable[[Tensor], dict[str, float]] | None = None
    without_compile: Callable[[], None] | None = None  # goes back to eager where compiling failed
    trained: int = 0  # steps made


def ours(config: RunConfig, device: torch.device) -> Contender:
    """The training step of `mtcli train`, fed with rows that are on the device already."""
    set_gpu_matmul(config.train.matmul)
    if device.type == "cuda" and not config.train.cuda_graphs:
        let_segments_grow()
    trainer = Trainer(config, Runtime(0, 1, 0, 1, device))
    initialise(trainer)
    loader = _Fixed(trainer)

    def train(rows: Tensor) -> float:
        loader.rows = rows
        return trainer.train_step(loader).loss

    def losses(rows: Tensor) -> Tensor:
        loader.rows = rows[:1]
        inputs = loader.step(0, 0.0).load(0)
        pipeline = Pipeline(
            trainer.stages, forward_only(1, 1), trainer.groups, activation_format(trainer.config)
        )
        found: list[Tensor] = []

        def take(x_TD: Tensor, inputs: Inputs) -> None:
            found.append(trainer.stages[0].losses(x_TD, inputs)[:COMPARED])

        pipeline.forward(lambda _: inputs, rows.shape[1] - 1, take)
        return found[0]

    def phases(rows: Tensor) -> dict[str, float]:
        """Seconds of each phase of a step, by the device's clock."""
        kept, clock = trainer.pipeline.clock, clock_for(device)
        trainer.pipeline.clock = clock
        clock.begin()
        train(rows)
        clock.end()
        trainer.pipeline.clock = kept
        assert trainer.phases is not None, "a step leaves its phases"
        ends = [clock.seconds(stamp) for stamp in trainer.phases]
        return {name: b - a for name, a, b in zip(Phases._fields[1:], ends, ends[1:], strict=False)}

    facts = {"precision": config.train.precision} | describe_attention(config, device)
    return Contender(losses, train, facts, phases)


class _Fixed:
    """A loader that gives the rows it was told last."""

    def __init__(self, trainer: Trainer) -> None:
        self.model, self.batch = trainer.config.model, trainer.config.batch
        self.rows = torch.empty(0)
        self.dtype = trainer.dtype

    def step(self, step: int, loss_scale: float) -> StepBatch:
        labels = float(self.rows[:, 1:].numel())
        parts = self.rows.split(self.batch.micro_batch_size)

        def load(m: int) -> Inputs:
            inputs, following = parts[m][:, :-1].contiguous(), parts[m][:, 1:].contiguous()
            scale = loss_scale / labels
            return make_inputs(self.model, self.dtype, inputs, labels=following, aux_scale=scale)

        return StepBatch(load, labels, labels, labels)


def hugging_face(config: RunConfig, device: torch.device) -> Contender:
    """Hugging Face transformers: SDPA, and its own choice for experts.

    Its grouped products do not know autocast and would run in float32, so a mixture of experts has
    16-bit weights beside float32 ones.
    """
    if config.model.num_experts:
        dtype = DTYPES[config.train.precision]
        return _hugging_face(config, device, dtype, masters=dtype != torch.float32)
    return _hugging_face(config, device, torch.float32)


def hugging_face_bf16(config: RunConfig, device: torch.device) -> Contender:
    """The same with weights, gradients and moments in 16 bits: no float32 copy of anything."""
    return _hugging_face(config, device, DTYPES[config.train.precision])


def hugging_face_liger(config: RunConfig, device: torch.device) -> Contender:
    """The same with Liger's kernels: norms, rotations, MLPs, and the head's GEMM with its loss."""
    import liger_kernel.transformers as liger

    kind = config_json.config_to_hf(config.model, config_json.family_of(config.model))["model_type"]
    getattr(liger, f"apply_liger_kernel_to_{kind}")()
    return _hugging_face(config, device, torch.float32, loss_of=_loss_by_model)


def _loss_by_model(model: nn.Module, rows: Tensor) -> Tensor:
    """The mean loss as the model itself computes it, without logits where it can."""
    loss: Tensor = model(rows[:, :-1], shift_labels=rows[:, 1:]).loss
    return loss


def plain(config: RunConfig, device: torch.device) -> Contender:
    """benchmarks/plain_gpt.py: a GPT in the plain torch that most people write."""
    sys.path.append(str(Path(__file__).parent.parent))
    from plain_gpt import PlainGPT

    m = config.model
    with torch.device(device):
        model = PlainGPT(m.num_layers, m.hidden_size, m.num_heads, m.vocab_size, m.max_seq_len)
    state = hf_state(config, device)
    state = {name.removeprefix("transformer."): value for name, value in state.items()}
    linear = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
    model.load_state_dict({n: v.T if n.endswith(linear) else v for n, v in state.items()})
    return stepper(model, model, config, device)


def _hugging_face(
    config: RunConfig,
    device: torch.device,
    dtype: torch.dtype,
    masters: bool = False,
    loss_of: Callable[[nn.Module, Tensor], Tensor] | None = None,
) -> Contender:
    import transformers

    family = config_json.family_of(config.model)
    table = config_json.config_to_hf(config.model, family)
    table |= {"bos_token_id": None, "eos_token_id": None, "use_cache": False}
    described = transformers.AutoConfig.for_model(table.pop("model_type"), **table)
    model = getattr(transformers, family.architecture).from_pretrained(
        None,
        config=described,
        state_dict=hf_state(config, torch.device("cpu"), family, device),
        dtype=dtype,
        attn_implementation="sdpa",
    )
    model = model.to(device).train()
    by_model = loss_of and partial(loss_of, model)
    found = stepper(model, lambda x: model(x).logits, config, device, masters, loss_of=by_model)
    experts = getattr(model.config, "_experts_implementation", None)
    found.facts |= {"experts": experts} if config.model.num_experts else {}
    return found


def hf_state(
    config: RunConfig,
    device: torch.device,
    family: Family | None = None,
    made_on: torch.device | None = None,
) -> dict[str, Tensor]:
    """The initial weights by Hugging Face's names, float32, rounded to the model's dtype."""
    model, dtype = config.model, DTYPES[config.train.precision]
    family, state = family or config_json.family_of(model), {}
    for name, described in parameters(model).items():
        weight = initial_weight(config, name, made_on or device).to(dtype).float()
        for stored in family.boxes(described, model):
            value = weight[stored.box.slices].permute(stored.order).reshape(stored.shape)
            state[stored.key] = value.to(device).contiguous()
    return state


def initial_weight(config: RunConfig, name: str, device: torch.device) -> Tensor:
    """A parameter as mtcli draws it on a kind of device, whole, float32."""
    described = parameters(config.model)[name]
    box = Box((0,) * len(described.shape), described.shape)
    return initial_values(described, config.model, box, config.seed, device)


def stepper(
    model: nn.Module,
    logits_of: Callable[[Tensor], Tensor],
    config: RunConfig,
    device: torch.device,
    masters: bool = False,
    loss_of: Callable[[Tensor], Tensor] | None = None,
) -> Contender:
    """A rival's step: `masters` keeps float32 weights beside those of 16 bits, as Megatron does.

    A GPU gets model and loss from torch.compile.
    """
    dtype, wide = DTYPES[config.train.precision], next(model.parameters()).dtype
    narrows = wide == torch.float32 and dtype != torch.float32
    held = list(model.parameters())
    updated = [p.detach().float().requires_grad_() for p in held] if masters else held
    optimizer = _adamw(updated, config, device)
    compiles = device.type == "cuda"

    def cast() -> torch.autocast:
        return torch.autocast(device.type, dtype if narrows else torch.bfloat16, enabled=narrows)

    def of_logits(rows: Tensor) -> Tensor:
        logits = logits_of(rows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())

    eager = loss_of or of_logits
    now = {"loss": torch.compile(eager, dynamic=False) if compiles else eager}

    def train(rows: Tensor) -> Tensor:
        parts = rows.split(config.batch.micro_batch_size)
        total = rows.new_zeros((), dtype=torch.float32)
        for part in parts:
            with cast():
                loss = now["loss"](part) / len(parts)
            loss.backward()
            total += loss.detach()
        if masters:
            _hand_over(held, updated)
        torch.nn.utils.clip_grad_norm_(updated, config.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if masters:
            with torch.no_grad():
                torch._foreach_copy_(held, updated)
        return total

    @torch.no_grad()
    def losses(rows: Tensor) -> Tensor:
        with cast():
            logits = logits_of(rows[:1, :-1])
        return F.cross_entropy(logits[0].float(), rows[0, 1:], reduction="none")[:COMPARED]

    def without_compile() -> None:
        now["loss"] = eager
        for parameter in held:
            parameter.grad = None  # of a backward pass that did not end

    facts = {"compiled": compiles, "weights": str(wide), "autocast": narrows, "masters": masters}
    return Contender(losses, train, facts, without_compile=without_compile)


def _adamw(
    held: Sequence[Tensor], config: RunConfig, device: torch.device
) -> torch.optim.Optimizer:
    c = config.optimizer
    decays, others = [p for p in held if p.dim() > 1], [p for p in held if p.dim() == 1]
    groups = [
        {"params": decays, "weight_decay": c.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=c.lr, betas=c.betas, eps=c.eps, fused=True)


def _hand_over(held: Sequence[Tensor], updated: Sequence[Tensor]) -> None:
    """Moves 16-bit gradients to the float32 weights."""
    for narrow, master in zip(held, updated, strict=True):
        if narrow.grad is not None:
            master.grad, narrow.grad = narrow.grad.float(), None
