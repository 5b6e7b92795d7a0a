"""The arithmetic that plan counts for an exchange is what its functions are given in a run."""

from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
from ranks import run_ranks
from tiny import GPT, Samples, run_config
from torch.utils._python_dispatch import TorchDispatchMode

from mtcli.core.exchange.arithmetic import BYTES
from mtcli.core.parallel.transport import process_group
from mtcli.core.plan.communication import arithmetic_seconds
from mtcli.core.plan.exchange import exchange_of, owned_sizes
from mtcli.core.plan.hardware import GPUS, HERE
from mtcli.core.plan.predict import predict_workload
from mtcli.core.plan.workload import Workload
from mtcli.core.sync import replica_mean, two_phase
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer

WIDE = GPT | {"num_layers": 2, "hidden_size": 64}
STEPS, RANKS = 4, 3
SGD = {"name": "sgd", "lr": 0.1, "min_lr": 0.01, "momentum": 0.9}
ADAMW, LAMB, PLAIN = {"name": "adamw"}, {"name": "lamb"}, SGD | {"momentum": 0.0}
OPTIMIZERS = {"sgd": SGD, "adamw": ADAMW, "lamb": LAMB, "plain sgd": PLAIN}
DILOCO = {"method": "diloco", "period": 2}
ROWS = {
    "signs": ({"method": "onebit", "warmup_steps": 2}, ADAMW),
    "signs, lamb": ({"method": "onebit", "warmup_steps": 2}, LAMB),
    "2 bits": (DILOCO | {"quantise": 2}, ADAMW),
    "4 bits": (DILOCO | {"quantise": 4}, ADAMW),
    "8 bits, fragments": (DILOCO | {"quantise": 8, "fragments": 2}, ADAMW),
    "largest": (DILOCO | {"top_k": 1 / 32, "quantise": 2}, ADAMW),
    "in full": (DILOCO, ADAMW),
    "average": ({"method": "local", "period": 2}, ADAMW),
    "neighbours": ({"method": "dmsgd"}, SGD),
    "neighbours' gradients": ({"method": "decentlam"}, SGD),
    "mixed while computing": ({"method": "awc_dmsgd"}, SGD),
    "momenta too, with all": ({"method": "da_dmsgd", "topology": "full"}, SGD),
    "no momentum": ({"method": "dsgd"}, PLAIN),
    "leaders": ({"method": "lsgd", "period": 2, "global_period": 4}, SGD),
    "centre": ({"method": "easgd", "period": 2}, SGD),
}
# Of torch's operations those that go through all elements of a tensor, or of a list of them.
ELEMENTWISE = {
    "add", "sub", "mul", "div", "copy", "cat", "lerp", "sqrt", "addcdiv", "addcmul", "where",
    "linalg_vector_norm", "sum", "amax", "zeros_like", "fused_adamw",
    "foreach_add", "foreach_sub", "foreach_mul", "foreach_div", "foreach_copy",
}  # fmt: skip


class Passes(TorchDispatchMode):
    """Counts elements of elementwise operations on floating-point tensors."""

    elements, paused = 0, 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function.overloadpacket.__name__.strip("_")
        if name in ELEMENTWISE and not self.paused:
            several = isinstance(arguments[0], list | tuple)
            operands = arguments[0] if several else arguments[:1]
            self.elements += sum(x.numel() for x in operands if x.is_floating_point())
        return function(*arguments, **(keywords or {}))

    @contextmanager
    def pause(self):
        self.paused += 1
        yield
        self.paused -= 1


def handled(runtime):
    """Of each row, and of a run of each optimizer alone, what `_handled` counts."""
    runs = ROWS | {name: ({}, optimizer) for name, optimizer in OPTIMIZERS.items()}
    return {name: _handled(runtime, configured(*run)) for name, run in runs.items()}


def _handled(runtime, config):
    """Elements that each kind of function handled in the exchanges of a run of STEPS."""
    # Copies into shared memory are a collective's.
    with patch.object(process_group, "connect", lambda *_: None):
        trainer, found, mode = Trainer(config, runtime), Counter(), Passes()
    initialise(trainer)
    loader = MicroBatchLoader(Samples(config), config, trainer.groups)

    def shim(where, name, kind=None, size=None):
        real = getattr(where, name)

        def counting(*arguments):
            if kind:
                found[kind] += size(*arguments)
            with mode.pause():
                return real(*arguments)

        return patch.object(where, name, counting)

    def watched(name):
        real = getattr(trainer.exchange, name)

        def watching(*arguments):
            with mode:
                return real(*arguments)

        return patch.object(trainer.exchange, name, watching)

    bits = config.sync.quantise
    there, back = f"compress_{bits}", f"decompress_{bits}"
    if config.sync.top_k:
        there, back = "select", "scatter"
    patches = [
        shim(two_phase, "pack_", "sign", lambda x, _: len(x)),
        shim(two_phase, "unpack", "unsign", lambda bits, scale, size: size),
        shim(replica_mean, "compress", there, lambda x, _: len(x)),
        shim(replica_mean, "decompress", back, lambda bits, form, size: size),
        watched("before_step"),
        watched("update"),
        watched("after_backward"),
    ]
    if config.sync.method == "onebit":
        patches.append(shim(trainer.exchange, "_freeze"))  # once in a run
        # Which elements have no variance is known of no data before: no mask is planned.
        patches.append(patch.object(trainer.exchange, "_find_live", lambda: None))
    with ExitStack() as stack:
        for one in patches:
            stack.enter_context(one)
        for _ in range(STEPS):
            trainer.train_step(loader)
    loader.close()
    return dict(found) | {"pass": mode.elements}


def configured(sync, optimizer):
    fields = {"train": {"steps": STEPS}, "batch": {"global_batch_size": RANKS}}
    return run_config(WIDE, sync=sync, optimizer=optimizer, **fields)


def test_an_exchange_handles_as_many_elements_of_each_kind_as_are_planned(subtests):
    ranks = run_ranks(RANKS, handled)

    def in_a_run(name):
        """Mean elements of each kind per step, of the rank with most."""
        return {kind: max(rank[name][kind] for rank in ranks) / STEPS for kind in ranks[0][name]}

    for row, (_, optimizer) in ROWS.items():
        planned = Counter()
        work = Workload.of(configured(*ROWS[row]), RANKS)
        for kind, elements, _ in exchange_of(work, 0).arithmetic():
            planned[kind] += elements
        rule = next(name for name, fields in OPTIMIZERS.items() if fields == optimizer)
        found, alone = in_a_run(row), in_a_run(rule)
        # The optimizer's own passes, and clipping, are not the exchange's.
        passes = found["pass"] - alone["pass"]
        # No scalar of a parameter is planned, nor the bytes that signs are padded to, nor that
        # biases and norms do not decay.
        within = 0.008 if "signs" in row else 0.004
        with subtests.test(row):
            assert found | {"pass": passes} == pytest.approx(dict(planned), rel=within)


@pytest.mark.parametrize("row", ["signs", "2 bits", "4 bits", "8 bits, fragments", "largest"])
def test_a_step_takes_longer_by_its_arithmetic(row):
    work = Workload.of(configured(*ROWS[row]), RANKS)
    planned = list(exchange_of(work, 0).arithmetic())
    device = replace(
        HERE, memory_bandwidth=1e9, physics=replace(HERE.physics, memory=1.0, call=0.0)
    )
    called = replace(device, physics=replace(device.physics, call=1e-3))
    moved = sum(BYTES[each.kind] * each.elements for each in planned) / 1e9
    calls = 1e-3 * sum(each.calls for each in planned)
    assert arithmetic_seconds(planned, device) == pytest.approx(moved)
    assert arithmetic_seconds(planned, called) == pytest.approx(moved + calls)


def test_a_gpu_moves_the_bytes_of_an_exchange_s_arithmetic():
    """EASGD copies weights and centre, divides the sum and pulls both: 5 passes of 12 bytes."""
    work = Workload.of(configured({"method": "easgd", "period": 2}, SGD), RANKS)
    elements = sum(owned_sizes(work, 0).values())
    slow = replace(GPUS["h100"], memory_bandwidth=1e6)
    idle = replace(work, sync=work.sync.model_copy(update={"pull": 0.0}))
    latency, more = (
        predict_workload(work, device).costs.gradients
        - predict_workload(idle, device).costs.gradients
        for device in (replace(slow, memory_bandwidth=1e30), slow)
    )
    assert more - latency == pytest.approx(5 / 2 * 12 * elements / (0.9 * 1e6))
