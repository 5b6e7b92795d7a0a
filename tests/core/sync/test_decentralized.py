"""Decentralized methods: each layout trains as the reference on one process, step by step."""

import numpy as np
import pytest
import torch
from marks import slow, slow_cases
from ranks import run_ranks
from replicas_alone import ALONE, Alone
from tiny import BIASED, GPT, LLAMA, MOE, Samples, run_config
from trained import checkpoint_of, train_and_save

from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer

SGD = {"name": "sgd", "momentum": 0.8, "lr": 0.05, "weight_decay": 0.1, "clip": 0.7}
SGD |= {"schedule": "constant"}
STEPS = 5
METHODS = ["decentlam", "dsgd", "dmsgd", "da_dmsgd", "awc_dmsgd"]

# The mixing matrices of 4 replicas and, of one_peer_exponential, of its two steps, by hand.
RING = np.array([[2, 2, 0, 2], [2, 2, 2, 0], [0, 2, 2, 2], [2, 0, 2, 2]]) / 6
GRID = np.array([[1, 1, 1, 0], [1, 1, 0, 1], [1, 0, 1, 1], [0, 1, 1, 1]]) / 3
STAR = np.array([[1, 1, 1, 1], [1, 3, 0, 0], [1, 0, 3, 0], [1, 0, 0, 3]]) / 4
ONE_PEER = [
    np.array([[1, 0, 0, 1], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]) / 2,
    np.array([[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]]) / 2,
]
HALVES = np.full((2, 2), 0.5)
QUARTERS = np.full((4, 4), 0.25)


class Reference:
    """The update of all replicas in plain tensors, from the papers' formulas."""

    def __init__(self, method, momentum, matrices):
        self.method, self.b, self.matrices = method, momentum, matrices
        self.m, self.count = None, 0

    def __call__(self, x, g, lr):
        w = torch.from_numpy(self.matrices[self.count % len(self.matrices)])
        self.count += 1
        self.m = self.m or [{name: torch.zeros_like(t) for name, t in one.items()} for one in x]
        for name in x[0]:
            xs = torch.stack([one[name] for one in x]).double()
            gs = torch.stack([one[name] for one in g]).double()
            ms = torch.stack([one[name] for one in self.m]).double()
            new, ms = self.update(w, xs, gs, ms, lr)
            for i, one in enumerate(x):
                one[name].copy_(new[i])
                self.m[i][name] = ms[i]

    def update(self, w, x, g, m, lr):
        def mixed(t):
            return torch.einsum("ij,j...->i...", w, t)

        if self.method == "dsgd":
            return mixed(x - lr * g), m
        if self.method == "decentlam":
            m = self.b * m + ((x - mixed(x - lr * g)) / lr if lr else mixed(g))
            return x - lr * m, m
        half = self.b * m + g
        if self.method == "awc_dmsgd":
            return mixed(x) - lr * half, half
        if self.method == "da_dmsgd":
            return mixed(x - lr * half), mixed(half)
        return mixed(x - lr * half), half


def config_of(method, model=GPT, optimizer=(), train=(), **sections):
    """A run in float64."""
    settings = SGD | {"momentum": 0.0 if method == "dsgd" else 0.8} | dict(optimizer)
    train = {"steps": STEPS, "precision": "fp64", "matmul": "strict"} | dict(train)
    sections["sync"] = {"method": method} | sections.get("sync", {})
    batch = {"global_batch_size": 8} | sections.pop("batch", {})
    return run_config(model, optimizer=settings, train=train, batch=batch, **sections)


def expected(config, matrices, data_ranks=1):
    """([(loss, norm)], the tensors of each replica) of one-rank runs and the reference."""
    alone = Alone(config, len(matrices[0]), data_ranks)
    method = Reference(config.sync.method, config.optimizer.momentum, matrices)
    steps = [alone.step(method) for _ in range(config.train.steps)]
    alone.close()
    return steps, [alone.weights(replica) for replica in range(len(matrices[0]))]


def assert_trains_as(config, world, matrices, folder, data_ranks=1):
    steps, tensors = expected(config, matrices, data_ranks)
    found = run_ranks(world, train_and_save, config, folder, 0, config.train.steps)
    for rank in found:
        assert [step.loss for step in rank] == pytest.approx([a for a, _ in steps], rel=1e-10)
        assert [s.grad_norm for s in rank] == pytest.approx([b for _, b in steps], rel=1e-10)
    checkpoint = checkpoint_of(folder, config.train.steps)
    assert checkpoint.replicas == len(tensors)
    for replica, table in enumerate(tensors):
        view = checkpoint.replica(replica)
        for name, tensor in table.items():
            torch.testing.assert_close(
                view.read(name), tensor.view(view.shape(name)), rtol=1e-10, atol=1e-12
            )
    apart = [t - tensors[1][name] for name, t in tensors[0].items()]
    assert max(float(x.abs().max()) for x in apart) > 1e-5, "replicas differ"


@pytest.mark.parametrize("method", METHODS)
def test_a_ring_trains_as_the_reference(method, tmp_path):
    falling = {"clip": 0.0 if method in ("decentlam", "dmsgd") else 0.7, "schedule": "cosine"}
    config = config_of(method, optimizer=falling, parallel={"bucket_mib": 0.005})
    assert config.overlaps_neighbours == (method in ("decentlam", "dmsgd", "awc_dmsgd"))
    assert_trains_as(config, 4, [RING], tmp_path)


TOPOLOGIES = [
    ("decentlam", "grid", [GRID]),
    ("decentlam", "star", [STAR]),
    ("decentlam", "symmetric_exponential", [RING]),
    ("da_dmsgd", "one_peer_exponential", ONE_PEER),
    ("awc_dmsgd", "hierarchical", [QUARTERS]),
]


@pytest.mark.parametrize(
    ("method", "topology", "matrices"),
    [*TOPOLOGIES[:1], *slow_cases("1 to 2 s; matrices are test_mixing's", *TOPOLOGIES[1:])],
)
def test_each_topology_trains_as_its_matrix(method, topology, matrices, tmp_path):
    config = config_of(method, sync={"topology": topology}, optimizer={"clip": 0.0})
    assert_trains_as(config, 4, matrices, tmp_path)


LAYOUTS = {  # with data ranks inside; the parity table has each method's other layouts
    "zero=1": (LLAMA, 4, {"zero": 1}, {"replicas": 2}),
    "ep": (MOE, 4, {"ep": 2}, {}),
    "router biases, tp, etp": (BIASED, 4, {"tp": 2, "etp": 2}, {}),
}


@pytest.mark.parametrize("layout", ["zero=1", *slow_cases("2 s", *list(LAYOUTS)[1:])])
def test_replicas_of_any_layout_train_as_the_reference(layout, tmp_path):
    """awc_dmsgd: of two replicas the others are equal after every step, but for momenta."""
    model, world, parallel, sync = LAYOUTS[layout]
    parallel = parallel | {"bucket_mib": 0.005}
    config = config_of("awc_dmsgd", model, parallel=parallel, sync=sync)
    inside = 2 if sync or "ep" in parallel else 1
    assert_trains_as(config, world, [HALVES], tmp_path, inside)


@slow("8 ranks; rings of 4 replicas and layouts inside are compared one by one")
def test_four_replicas_of_two_ranks_exchange_in_the_backward(tmp_path):
    config = config_of("decentlam", GPT, {"clip": 0.0}, parallel={"pp": 2, "bucket_mib": 0.005})
    assert_trains_as(config, 8, [RING], tmp_path)


@slow("four runs, 4 s")
def test_the_average_of_all_in_every_step_is_parallel_momentum_sgd():
    """The oracle is the run with all_reduce; with a gradient clipped by no replica's own norm."""
    plain = {"clip": 0.0, "lr": 0.3}
    for method in ("decentlam", "dmsgd", "da_dmsgd"):
        config = config_of(method, optimizer=plain, sync={"topology": "full"})
        found = run_ranks(4, train_and_save, config, None, 0, STEPS)[0]
        config = config_of("all_reduce", optimizer=plain)
        expected = run_ranks(4, train_and_save, config, None, 0, STEPS)[0]
        losses = [step.loss for step in found]
        assert losses == pytest.approx([step.loss for step in expected], rel=1e-12)
        assert abs(losses[0] - losses[-1]) > 1e-3


@pytest.mark.parametrize("method", ["decentlam", "dmsgd", "da_dmsgd", "awc_dmsgd"])
def test_one_replica_is_plain_momentum_sgd(method):
    config = config_of(method)
    found = run_ranks(1, train_and_save, config, None, 0, STEPS)[0]
    expected = run_ranks(1, train_and_save, config_of("all_reduce"), None, 0, STEPS)[0]
    assert [s.loss for s in found] == pytest.approx([s.loss for s in expected], rel=1e-12)


def test_buckets_leave_in_the_backward_where_nothing_is_clipped_and_are_dropped_without_an_update():
    plain = {"bucket_mib": 0.005}
    for method in METHODS:
        for clip in (0.0, 0.7):
            still = {"clip": clip, "warmup_steps": 0}
            config = config_of(method, optimizer=still, parallel=plain)
            trainer = Trainer(config, ALONE)
            initialise(trainer)
            before = {name: x.clone() for name, x in trainer.strategy.weights().items()}
            loader = MicroBatchLoader(Samples(config), config, trainer.groups)
            for _ in range(2):  # of which the first makes no update, as after an overflow
                trainer.forward_backward(loader)
                left = [bucket.under_way is not None for bucket in trainer.exchange.buckets]
                assert len(left) > 3 and set(left) == {config.overlaps_neighbours}
            for name, x in trainer.strategy.weights().items():
                assert torch.equal(x, before[name]), "nothing has moved"
            assert not any(x.any() for x in trainer.optimizer.moments.get("momentum", {}).values())
            trainer.exchange.update(0.05, 1.0)
            step = {name: before[name] - x for name, x in trainer.strategy.weights().items()}
            assert all(bucket.under_way is None for bucket in trainer.exchange.buckets)
            gradients, update_of = trainer.strategy.gradients, trainer.optimizer.update_of
            for name, moved in step.items():
                decay = 0.1 * before[name] if update_of(name).decays else 0.0
                torch.testing.assert_close(moved, 0.05 * (gradients[name] + decay), atol=1e-14,
                                           rtol=1e-9)  # fmt: skip
            loader.close()
