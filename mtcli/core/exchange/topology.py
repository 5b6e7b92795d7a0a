"""Topologies of decentralized replicas: who exchanges with whom, and with which weights.

In the mixing matrix W of n replicas, w[i][j] is the weight that replica i gives to the tensor from
j. Every W here is doubly stochastic for any n, so mixing keeps the mean of all replicas. Replicas
converge at the rate of the spectral gap, 1 - rho with rho = ||W - 11'/n||. The graphs are those of
BlueFog (arXiv:2111.04287), used by DecentLaM (arXiv:2104.11981, section 6).
"""

import cmath
from dataclasses import dataclass
from math import pi, sqrt

from mtcli.core.config.fields import divisors
from mtcli.core.config.sync import SyncConfig, Topology

DENSE = 1024  # replicas of a grid up to which its eigenvalues are computed from the matrix
ITERATIONS = 500  # of the power method beyond


@dataclass(frozen=True)
class MixingGraph:
    """The graph of `n` replicas, and the mixing matrix of each step."""

    name: Topology
    n: int
    machine_size: int = 1

    @classmethod
    def of(cls, sync: SyncConfig, replicas: int) -> "MixingGraph":
        """The graph of a run. In a hierarchy without machine_size, a machine has the largest
        divisor of n that is at most sqrt(n)."""
        size = sync.machine_size or max(d for d in divisors(replicas) if d * d <= replicas)
        return cls(sync.topology, replicas, size if sync.topology == "hierarchical" else 1)

    @property
    def period(self) -> int:
        """Steps after which the sequence of matrices repeats: ceil(log2(n)) for one peer, else
        1."""
        return max(1, (self.n - 1).bit_length()) if self.name == "one_peer_exponential" else 1

    @property
    def machines(self) -> "MixingGraph":
        """The graph between the machines of a hierarchy; any other graph is its own."""
        if self.name != "hierarchical":
            return self
        return MixingGraph("symmetric_exponential", self.n // self.machine_size)

    def row(self, i: int, step: int = 0) -> dict[int, float]:
        """Row i of W in a step: the weight of every replica that i receives from, and of i."""
        n, m = self.n, self.machine_size
        if self.name == "hierarchical":
            above = self.machines.row(i // m, step)
            return {a * m + k: w / m for a, w in above.items() for k in range(m)}
        if self.name == "full":
            return dict.fromkeys(range(n), 1.0 / n)
        if self.name == "star":
            leaf = {i: 1.0 - 1.0 / n, 0: 1.0 / n}
            return leaf if i else dict.fromkeys(range(n), 1.0 / n)
        if self.name == "grid":
            return _metropolis_row(i, n)
        offsets = self._offsets(step)
        return {(i + offset) % n: w for offset, w in offsets.items()}

    def matrix(self, step: int = 0) -> list[list[float]]:
        """W of a step, dense."""
        rows = (self.row(i, step) for i in range(self.n))
        return [[row.get(j, 0.0) for j in range(self.n)] for row in rows]

    def senders(self, i: int, step: int = 0) -> list[int]:
        """The other replicas that i receives from in a step, ascending."""
        return sorted(j for j in self.row(i, step) if j != i)

    def receivers(self, i: int, step: int = 0) -> list[int]:
        """The other replicas that i sends to in a step, ascending."""
        if self.name == "one_peer_exponential":
            return sorted((i - offset) % self.n for offset in self._offsets(step) if offset)
        return self.senders(i, step)

    @property
    def most_neighbours(self) -> int:
        """The most replicas that one receives from in a step."""
        if self.name == "hierarchical":
            return self.machine_size - 1 + self.machines.most_neighbours
        if self.name in ("star", "full"):
            return self.n - 1
        if self.name == "grid":
            rows, columns = grid_shape(self.n)
            return min(2, rows - 1) + min(2, columns - 1)
        return len(self._offsets(0)) - 1

    @property
    def sent_per_replica(self) -> float:
        """Tensors of a replica's size that a replica sends in a step, as the mean over replicas.

        In a hierarchy of m replicas per machine a rank sends 1/m of the tensor twice to each of its
        machine, and once to each neighbouring machine. The full graph and the star are a ring's
        all-reduce.
        """
        n, m = self.n, self.machine_size
        if self.name in ("full", "star"):
            return 2.0 * (n - 1) / n
        if self.name == "hierarchical":
            return (2.0 * (m - 1) + self.machines.sent_per_replica) / m
        if self.name == "grid":
            rows, columns = grid_shape(n)
            return 2.0 * (rows * (columns - 1) + columns * (rows - 1)) / n
        return float(len(self._offsets(0)) - 1)

    @property
    def most_sent(self) -> float:
        """Tensors of a replica's size that the busiest one sends in a step."""
        m = self.machine_size
        if self.name == "hierarchical":
            return (2.0 * (m - 1) + self.machines.most_sent) / m
        return (
            float(self.most_neighbours) if self.name in ("star", "grid") else self.sent_per_replica
        )

    @property
    def mixing_passes(self) -> float:
        """Elementwise operations of a mix, each on as many elements as a replica has."""
        if self.name == "full":
            return 1.0
        if self.name == "hierarchical":
            m = self.machine_size
            return (m + 1 + self.machines.most_neighbours) / m
        return 1.0 + self.most_neighbours

    @property
    def buffered_per_replica(self) -> float:
        """Send and receive buffers of the fullest replica in a mix, in tensors of a replica's
        size."""
        if self.name == "full":
            return 1.0
        m = self.machine_size
        return 1.0 + max(m - 1, self.machines.most_neighbours) / m

    @property
    def spectral_gap(self) -> float:
        """1 - rho of W; where matrices change with the step, the mean per step over a period."""
        n = self.n
        if n == 1 or self.name == "full":
            return 1.0
        if self.name == "hierarchical":
            return self.machines.spectral_gap
        if self.name == "star":
            return 1.0 / n if n > 2 else 1.0
        if self.name == "grid":
            return 1.0 - _grid_rho(n)
        largest = max(self._factor(k) for k in range(1, n // 2 + 1))
        return float(1.0 - largest ** (1.0 / self.period))

    def _factor(self, k: int) -> float:
        """The factor by which a period shrinks the wave of k cycles around a circulant graph."""
        factor = 1.0
        for step in range(self.period):
            waves = (
                w * cmath.exp(2j * pi * (k * offset % self.n) / self.n)
                for offset, w in self._offsets(step).items()
            )
            magnitude = abs(sum(waves))
            factor *= magnitude if magnitude > 1e-15 else 0.0
        return factor

    def _offsets(self, step: int) -> dict[int, float]:
        """The weights by distance around the circle, equal for all replicas."""
        n = self.n
        if n == 1:
            return {0: 1.0}
        if self.name == "one_peer_exponential":
            return {0: 0.5, n - 2 ** (step % self.period): 0.5}
        base = 4 if self.name == "symmetric_exponential" else n  # a ring has neighbours at 1 alone
        near, distance = [0], 1
        while 2 * distance <= n:
            near += [distance, n - distance]
            distance *= base
        near = list(dict.fromkeys(near))
        return dict.fromkeys(near, 1.0 / len(near))


def grid_shape(n: int) -> tuple[int, int]:
    """The rows and columns of the grid of n replicas: as square as n allows."""
    rows = max(d for d in divisors(n) if d * d <= n)
    return rows, n // rows


def _metropolis_row(i: int, n: int) -> dict[int, float]:
    """Weights 1 / max(|N_i|, |N_j|), where N_i includes i (Xiao and Boyd, 2004, 4.2)."""
    neighbours = _grid_neighbours(i, n)
    row = {j: 1.0 / (1 + max(len(neighbours), len(_grid_neighbours(j, n)))) for j in neighbours}
    return row | {i: 1.0 - sum(row.values())}


def _grid_neighbours(i: int, n: int) -> list[int]:
    rows, columns = grid_shape(n)
    row, column = divmod(i, columns)
    around = ((row - 1, column), (row, column - 1), (row, column + 1), (row + 1, column))
    return [r * columns + c for r, c in around if 0 <= r < rows and 0 <= c < columns]


def _grid_rho(n: int) -> float:
    """The second largest absolute eigenvalue of a grid's matrix.

    A large grid uses the power method, starting from the wave along its longer side, which is close
    to the eigenvector.
    """
    import numpy as np  # a tenth of a second, for grids alone

    rows, columns = grid_shape(n)
    if n <= DENSE:
        matrix = np.array(MixingGraph("grid", n).matrix())
        return float(np.abs(np.linalg.eigvalsh(matrix - 1.0 / n)).max())
    entries = [(i, j, w) for i in range(n) for j, w in _metropolis_row(i, n).items()]
    to, source, weights = (np.array(part) for part in zip(*entries, strict=True))
    x = np.tile(np.cos(pi * (np.arange(columns) + 0.5) / columns), rows)
    rho = 0.0
    for _ in range(ITERATIONS):
        y = np.bincount(to, weights * x[source], n)
        y -= y.mean()
        rho = sqrt(float(y @ y) / float(x @ x))
        x = y / sqrt(float(y @ y))
    return rho
