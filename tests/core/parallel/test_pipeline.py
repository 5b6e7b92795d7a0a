"""The executor of schedules on stages that multiply, so that values and gradients are products."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks
from torch import nn

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.parallel.groups import make_groups
from mtcli.core.parallel.pipeline import ActivationFormat, Pipeline, _Step
from mtcli.core.schedule.generators import forward_only, schedule_for
from mtcli.core.schedule.ops import Op

TOKENS, COLUMNS, MICRO_BATCHES = 3, 2, 4
CASES = [("1f1b", 1, 1), ("gpipe", 2, 1), ("1f1b", 2, 1), ("interleaved", 2, 2), ("1f1b", 3, 1)]


class Times(nn.Module):
    """x * (stage + 2); the first stage takes its x from the micro-batch."""

    def __init__(self, stage):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(stage + 2.0))

    def forward(self, x, inputs):
        return (inputs if x is None else x) * self.weight

    def loss(self, x, inputs, scale):
        return x.detach().sum(), x.sum() * scale


def load(micro_batch):
    return torch.full((TOKENS, COLUMNS), micro_batch + 1.0)


def pipeline(runtime, schedule, vpp):
    groups = make_groups(
        ParallelLayout(runtime.world, pp=runtime.world, vpp=vpp), runtime.rank, "cpu"
    )
    stages = {index: Times(index) for index in groups.layout.stages(groups.pp_rank)}
    format = ActivationFormat(torch.float32, COLUMNS, token_shards=1, same_on_tp=False)
    return stages, Pipeline(stages, schedule, groups, format)


def trained(runtime, name, vpp):
    schedule = schedule_for(name, runtime.world, vpp, MICRO_BATCHES)
    stages, pipe = pipeline(runtime, schedule, vpp)
    armed = []
    loss = pipe.train_step(load, TOKENS, 0.5, armed.append)
    loss += pipe.train_step(
        load, TOKENS, 0.5, armed.append
    )  # nothing of the first step is left over
    grads = {index: stage.weight.grad.item() for index, stage in stages.items()}
    order = [span.op for span in pipe.spans]
    times = [(span.start, span.end) for span in pipe.spans]
    return loss, grads, order == list(pipe.ops), times, armed


@pytest.mark.parametrize(("name", "pp", "vpp"), CASES)
def test_a_schedule_runs_to_the_products_values_and_gradients(name, pp, vpp):
    stages = pp * vpp
    product = float(torch.arange(2, stages + 2).prod())
    inputs = sum(float(load(m).sum()) for m in range(MICRO_BATCHES))
    answers = run_ranks(pp, trained, name, vpp)
    assert [loss for loss, *_ in answers] == [0.0] * (pp - 1) + [2 * inputs * product]
    for rank, (_, grads, in_order, times, armed) in enumerate(answers):
        mine = list(range(rank, stages, pp))
        expected = {stage: 2 * 0.5 * inputs * product / (stage + 2) for stage in mine}
        assert grads == pytest.approx(expected)
        assert in_order and all(start <= end for start, end in times)
        assert armed == 2 * mine[::-1], "each stage is armed once a step, the last one first"


def inferred(runtime, vpp, micro_batches):
    schedule = forward_only(runtime.world, micro_batches, vpp)
    _, pipe = pipeline(runtime, schedule, vpp)
    outputs = []
    pipe.forward(load, TOKENS, lambda y, inputs: outputs.append(y.clone()))
    return outputs


@pytest.mark.parametrize(("pp", "vpp", "micro_batches"), [(1, 1, 2), (2, 1, 3), (2, 2, 5)])
def test_forwards_alone_come_out_in_order_on_the_last_rank(pp, vpp, micro_batches):
    answers = run_ranks(pp, inferred, vpp, micro_batches)
    product = float(torch.arange(2, pp * vpp + 2).prod())
    assert all(outputs == [] for outputs in answers[:-1])
    assert len(answers[-1]) == micro_batches
    for m, y in enumerate(answers[-1]):
        assert torch.equal(y, load(m) * product)


def scattered(runtime):
    """Hops where tp ranks hold the same activations: each sends its part, the receivers gather."""
    groups = make_groups(ParallelLayout(4, tp=2, pp=2), runtime.rank, "cpu")
    stages = {groups.pp_rank: Times(groups.pp_rank)}
    format = ActivationFormat(torch.float32, COLUMNS, token_shards=1, same_on_tp=True)
    pipe = Pipeline(stages, schedule_for("1f1b", 2, 1, 2), groups, format)
    sent = []
    send = torch.distributed.isend
    torch.distributed.isend = lambda x, *a, **k: (sent.append(x.numel()), send(x, *a, **k))[1]

    def odd(micro_batch):  # 3 tokens of 2 columns, all different: order matters
        return torch.arange(TOKENS * COLUMNS, dtype=torch.float32).view(TOKENS, COLUMNS)

    loss = pipe.train_step(odd, TOKENS, 1.0, lambda stage: None)
    return loss, next(iter(stages.values())).weight.grad.item(), sent


def test_a_hop_of_equal_activations_sends_each_element_once():
    answers = run_ranks(4, scattered)
    inputs = 2 * 15.0  # two micro-batches of 0 + 1 + ... + 5
    assert [loss for loss, *_ in answers] == [0.0, 0.0, 6 * inputs, 6 * inputs]
    assert [grad for _, grad, _ in answers] == [3 * inputs, 3 * inputs, 2 * inputs, 2 * inputs]
    assert all(sent == [TOKENS * COLUMNS // 2] * 2 for *_, sent in answers)


def most_kept(runtime, name, vpp):
    """Of 16 micro-batches, how many results that were sent are there at once, on each rank."""
    _, pipe = pipeline(runtime, schedule_for(name, runtime.world, vpp, 16), vpp)
    sent, alive, send = [], [], torch.distributed.isend

    def counted(x, *args, **kwargs):
        sent.append(weakref.ref(x))
        alive.append(sum(one() is not None for one in sent))
        return send(x, *args, **kwargs)

    torch.distributed.isend = counted
    pipe.train_step(load, TOKENS, 1.0, lambda stage: None)
    return len(sent), max(alive)


@pytest.mark.parametrize(
    ("name", "pp", "vpp"), [("1f1b", 2, 1), ("1f1b", 3, 1), ("interleaved", 2, 2)]
)
def test_what_was_sent_goes_when_the_next_stage_has_it_and_not_at_the_end_of_the_step(
    name, pp, vpp
):
    answers = run_ranks(pp, most_kept, name, vpp)
    for sent, kept in answers:
        assert sent >= 16 and kept <= 2 * pp * vpp


def test_a_weights_half_is_let_go_of_before_the_next_is_made():
    class Half:
        def __call__(self):
            there.append(sum(half() is not None for half in halves))

    there, work = [], [Half(), Half(), Half()]
    halves = [weakref.ref(half) for half in work]
    op = Op("W", 0, 0)
    step = SimpleNamespace(weight_work={(0, 0): work}, clock=float, spans=[])
    del work
    _Step.weights(step, op)
    assert there == [3, 2, 1]
