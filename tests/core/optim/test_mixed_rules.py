"""A rule for some parameters beside another for the rest, which no optimizer has yet."""

import pytest
import torch

from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import LoraConfig, OptimizerConfig, TrainConfig
from mtcli.core.mesh import update_rules
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import run_parameters
from mtcli.core.mesh.update_rules import ParameterUpdate
from mtcli.core.optim import optimizer as optimizer_module
from mtcli.core.optim.optimizer import Optimizer
from mtcli.core.parallel.groups import make_groups
from mtcli.core.parallel.ownership import Ownership
from mtcli.core.plan import elements
from mtcli.core.plan.memory import state_bytes
from mtcli.core.plan.workload import Workload
from mtcli.core.sweep.array_memory import ArrayMemory

MODEL = ModelConfig(num_layers=2, hidden_size=16, num_heads=4, vocab_size=128, max_seq_len=8)
TABLE = run_parameters(MODEL, LoraConfig())
SGD = OptimizerConfig(name="sgd", momentum=0.9)
ADAMW = SGD.model_copy(update={"name": "adamw"})
MATRICES = {name for name, parameter in TABLE.items() if parameter.matrices}
OWNERSHIP = Ownership(make_groups(ParallelLayout(1), 0, torch.device("cpu")), TABLE, False, False)
plain = update_rules.update_of


@pytest.fixture
def mixed(monkeypatch):
    """Has SGD with momentum update matrices, and AdamW the rest."""

    def update_of(parameter, optimizer) -> ParameterUpdate:
        return plain(parameter, SGD if parameter.matrices else ADAMW)

    for module in (update_rules, optimizer_module, elements):
        monkeypatch.setattr(module, "update_of", update_of)
    elements._elements.cache_clear()
    yield
    elements._elements.cache_clear()


def seeded(seed):
    generator = torch.Generator().manual_seed(seed)
    layout = ParallelLayout(1)
    shapes = {name: p.stored_shape(layout) for name, p in TABLE.items()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def after_steps(config):
    optimizer = Optimizer(seeded(0), OWNERSHIP, config, torch.float32)
    for step in (1, 2, 3):
        optimizer.step(seeded(step), 1e-2)
    return optimizer


def test_each_parameter_is_updated_as_by_its_rule_alone(request):
    alone = {name: after_steps(config) for name, config in (("sgd", SGD), ("adamw", ADAMW))}
    request.getfixturevalue("mixed")
    both = after_steps(ADAMW)
    expected = {
        key: x for key, x in alone["sgd"].state().items() if key.partition("/")[2] in MATRICES
    }
    others = alone["adamw"].state()
    expected |= {key: x for key, x in others.items() if key.partition("/")[2] not in MATRICES}
    assert both.state().keys() == expected.keys()
    assert all(torch.equal(x, expected[key]) for key, x in both.state().items())
    for name, weight in both.weights.items():
        by = alone["sgd" if name in MATRICES else "adamw"]
        assert torch.equal(weight, by.weights[name]), name


def test_the_plan_counts_the_moments_of_each_parameter(mixed):
    optimizer = Optimizer(seeded(0), OWNERSHIP, ADAMW, torch.float32)
    state = sum(x.nbytes for x in optimizer.state().values())
    assert state < 8 * sum(x.numel() for x in optimizer.weights.values())
    sizes = {"seq_len": 8, "micro_batch_size": 1, "global_batch_size": 8, "precision": "fp32"}
    for zero in (0, 1):
        work = Workload(MODEL, ParallelLayout(1), **sizes, optimizer=ADAMW, zero=zero)
        assert state_bytes(work, 0)[2] == state


def test_an_array_has_the_moments_of_each_parameter(mixed):
    memory = ArrayMemory(TABLE, ParallelLayout(1), 3, ADAMW, torch.empty(0), TrainConfig())
    assert memory.moments["momentum"].tensors.keys() == MATRICES
    for kind in ("exp_avg", "exp_avg_sq"):
        assert memory.moments[kind].tensors.keys() == TABLE.keys() - MATRICES
