"""Decentralized methods: each layout trains as the reference on one process, step by step."""

import numpy as np
import pytest
import torch
from ranks import run_ranks
from replicas_alone import Alone
from tiny import GPT, run_config
from trained import checkpoint_of, train_and_save

SGD = {"name": "sgd", "momentum": 0.8, "lr": 0.05, "weight_decay": 0.1, "clip": 0.7}
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
    """A run in float64 whose last step has a learning rate of 0."""
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


@pytest.mark.parametrize("clip", [0.7, 0.0], ids=["clip", "overlapped"])
@pytest.mark.parametrize("method", METHODS)
def test_a_ring_trains_as_the_reference(method, clip, tmp_path):
    config = config_of(method, optimizer={"clip": clip}, parallel={"bucket_mib": 0.005})
    assert config.overlaps_neighbours == (method == "awc_dmsgd" or not clip)
    assert_trains_as(config, 4, [RING], tmp_path)
