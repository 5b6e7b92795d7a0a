"""What the model computes on a GPU, on CPU: its kernels interpreted, beside torch's functions."""

import importlib.util

import pytest
import torch
from marks import slow_cases
from tiny import BIASED, GPT, LLAMA, MOE, run_config
from torch.utils._python_dispatch import TorchDispatchMode

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import parameters
from mtcli.core.model.build import build_stages
from mtcli.core.model.init import initialise
from mtcli.core.model.inputs import make_inputs
from mtcli.core.parallel.groups import make_groups
from mtcli.core.parallel.ownership import unsharded

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
B, S = 2, 5
ROUTED = {"route", "route_backward", "sort_copies", "spread", "sum_rows", "sum_rows_backward"}
ROUTED |= {"grouped_linear", "grouped_outer", "swiglu", "swiglu_backward_with_output"}
SHARED = {"cross_entropy_parts", "cross_entropy_with_gradient_"}
CALLED = {
    "gpt": {"norm", "norm_backward", "add_norm", "gelu", "gelu_backward_with_output", "join_heads"}
    | SHARED,
    "gpt with dropout": {"norm", "norm_backward", "dropout", "gelu", "gelu_backward_with_output"}
    | {"masked_softmax", "masked_softmax_backward"}
    | SHARED,
    "llama": {"norm", "norm_backward", "add_norm", "swiglu", "swiglu_backward_with_output"}
    | {"rotate_packed", "rotate_packed_backward"}
    | SHARED,
    "geglu": {"swiglu", "swiglu_backward_with_output"},
    "clamped": {"swiglu", "swiglu_backward_with_output"},
    "relu2": {"relu2", "relu2_backward_with_output"},
    "capped": {"flash", "flash_backward"} | SHARED,
    "sinks": {"flash", "flash_backward"} | SHARED,
    "mixtral within capacity": ROUTED - {"grouped_linear", "grouped_outer"} | SHARED,
    "mixtral with biases": ROUTED | SHARED,
    "mixtral with biases within capacity": ROUTED - {"grouped_linear", "grouped_outer"} | SHARED,
    "mixtral of groups": ROUTED | SHARED,
}
MODELS = {
    "gpt": GPT,
    "gpt with dropout": GPT | {"dropout": 0.2, "attention_dropout": 0.1},
    "llama": LLAMA,
    "geglu": LLAMA | {"activation": "geglu_tanh"},
    "clamped": LLAMA | {"activation": "swiglu_clamped"},
    "relu2": GPT | {"activation": "relu2"},
    "capped": LLAMA | {"attention_softcap": 0.5, "logit_softcap": 0.3, "init_std": 0.2},
    "sinks": LLAMA | {"attention_sinks": True, "init_std": 0.2},
    "mixtral with biases": MOE | {"expert_bias": True, "router_bias": True},
    "mixtral with biases within capacity": MOE
    | {"expert_bias": True, "capacity_factor": 0.75, "pad_to_capacity": True},
    "mixtral within capacity": MOE | {"capacity_factor": 0.75, "pad_to_capacity": True},
    "mixtral of groups": BIASED,
}


class Called(TorchDispatchMode):
    """Collects the names of our operators as they are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "mtcli":
            self.names.add(function._schema.name.removeprefix("mtcli::"))
        return function(*args, **(kwargs or {}))


@pytest.fixture
def interpreter():
    from triton import knobs

    from mtcli.kernels.triton_launch import interpreted

    if not knobs.runtime.interpret:
        pytest.skip("kernels are compiled here, not interpreted")
    return interpreted


def losses_and_gradients(model):
    config = run_config(model)
    groups = make_groups(ParallelLayout(1), 0, torch.device("cpu"))
    (stage,) = build_stages(config, groups).values()
    shards = unsharded({0: stage}, parameters(config.model))
    initialise(shards, config.model, groups, config.seed, torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in stage.parameters():  # biases and gains that make a difference
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    tokens, labels = torch.randint(config.model.vocab_size, (2, B, S), generator=generator)
    numbers = torch.arange(B * S).view(B, S)
    weights = torch.linspace(0.5, 1.5, B * S).view(B, S)
    given = {"labels": labels, "weights": weights, "numbers": numbers}
    inputs = make_inputs(config.model, torch.float32, tokens, **given)
    x_TD = stage(None, inputs)
    total, scaled = stage.loss(x_TD, inputs, 1.0)
    scaled.backward()
    with torch.no_grad():
        losses = stage.losses(x_TD, inputs)
    torch.testing.assert_close(losses.sum(), total)
    gradients = {name: p.grad for name, p in stage.named_parameters()}
    return losses, {name: x for name, x in gradients.items() if x is not None}


@pytest.mark.parametrize(
    "name",
    [
        "mixtral of groups",
        *slow_cases(
            "kernels of a second each, which tests/kernels hold one by one",
            *(name for name in MODELS if name != "mixtral of groups"),
        ),
    ],
)
def test_a_model_of_kernels_has_the_losses_and_gradients_of_torchs_functions(name, interpreter):
    model = MODELS[name]
    expected, gradients = losses_and_gradients({**model, "num_layers": 1})
    with interpreter(), Called() as called:
        found, ours = losses_and_gradients({**model, "num_layers": 1})
    assert called.names >= CALLED[name], CALLED[name] - called.names
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for parameter, theirs in gradients.items():
        error = (ours[parameter] - theirs).norm() / theirs.norm()
        assert error < 1e-5, f"{parameter}: {error:.1e}"
