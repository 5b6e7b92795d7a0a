"""Quadratics as models: replica i has the gradient A_i x - b_i, exactly, and a method's own class.

Where a method ends is a linear system, which numpy solves: the oracle of its bias.
"""

import numpy as np
import torch

from mtcli.core.config.loading import config_of
from mtcli.core.exchange.decentralized import MixingFacts
from mtcli.core.exchange.facts import ReplicaShare
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.sharding import Parameter
from mtcli.core.optim.optimizer import Optimizer
from mtcli.core.parallel.groups import make_groups
from mtcli.core.parallel.ownership import Ownership
from mtcli.core.sync.decentralized import Decentralized
from mtcli.core.sync.strategy import Strategy

SIZE = 5
MODEL = {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "vocab_size": 8, "max_seq_len": 8}


def problem(n):
    """(A [n, SIZE, SIZE] with eigenvalues in [1, 2], b [n, SIZE])."""
    random = np.random.default_rng(0)
    turns = np.linalg.qr(random.standard_normal((n, SIZE, SIZE)))[0]
    values = random.uniform(1.0, 2.0, (n, 1, SIZE))
    return (turns * values) @ turns.transpose(0, 2, 1), random.standard_normal((n, SIZE))


class Quadratic(Strategy):
    """One replica, whose weights start at zero."""

    def __init__(self, groups):
        a, b = problem(groups.layout.replicas)
        self.a, self.b = (torch.from_numpy(x[groups.replicas.rank]) for x in (a, b))
        self.x = torch.zeros(SIZE, dtype=torch.float64)
        table = {"x": Parameter("x", (SIZE,), (None,), "zeros", 0)}
        self.ownership = Ownership(groups, table, False, False)

    @property
    def gradients(self):
        return {"x": self.a @ self.x - self.b}

    def weights(self):
        return {"x": self.x}


def trained(runtime, cases, steps):
    """x [steps + 1, SIZE] of this replica for each case: (method, topology, momentum, lr)."""
    layout = ParallelLayout(runtime.world, replicas=runtime.world)
    groups, found = make_groups(layout, runtime.rank, runtime.device), []
    for method, topology, momentum, lr in cases:
        optimizer = {"name": "sgd", "momentum": momentum, "clip": 1.0}
        sync = {"method": method, "topology": topology}
        config = config_of({"model": MODEL, "optimizer": optimizer, "sync": sync}, ())
        inside = Quadratic(groups)
        rule = Optimizer(inside.weights(), inside.ownership, config.optimizer, torch.float64)
        share = ReplicaShare(config.sync, steps, runtime.world, {"x": SIZE}, 8, config.optimizer)
        exchange = Decentralized(inside, rule, MixingFacts(share))
        points = [inside.x.clone()]
        for _ in range(steps):
            exchange.before_step(lr)
            exchange.update(lr, 1.0)
            points.append(inside.x.clone())
        found.append(torch.stack(points).numpy())
    return found


def limit(method, w, momentum, lr):
    """The fixed point [n, SIZE] of a method with the mixing matrix w [n, n]."""
    n = len(w)
    a, b = problem(n)
    g = np.zeros((n * SIZE, n * SIZE))
    for i in range(n):
        g[i * SIZE : (i + 1) * SIZE, i * SIZE : (i + 1) * SIZE] = a[i]
    one, w = np.eye(n * SIZE), np.kron(w, np.eye(SIZE))
    if method in ("dsgd", "decentlam"):
        taken = lr * w
    elif method == "dmsgd":
        taken = lr / (1.0 - momentum) * w
    elif method == "awc_dmsgd":
        taken = lr / (1.0 - momentum) * one
    else:  # da_dmsgd: h = momentum W h + gradient, and x = W (x - lr h)
        taken = lr * w @ np.linalg.inv(one - momentum * w)
    return np.linalg.solve(one - w + taken @ g, taken @ b.reshape(-1)).reshape(n, SIZE)


def optimum(n):
    """Where the sum of all quadratics is least."""
    a, b = problem(n)
    return np.linalg.solve(a.sum(0), b.sum(0))


def bias(x):
    """The mean squared distance of replicas' x [n, SIZE] from the optimum, relative to it."""
    best = optimum(len(x))
    return float(((x - best) ** 2).sum(1).mean() / (best**2).sum())
