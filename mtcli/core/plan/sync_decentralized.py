"""What decentralized replicas send, keep and compute in a step, and their graph's facts."""

from collections.abc import Iterator

from mtcli.core.config.sync import SyncConfig
from mtcli.core.mesh.topology import MixingGraph
from mtcli.core.plan.arithmetic import Arithmetic, passes

# Elementwise operations of a step beyond those of SGD with momentum, by sync/decentralized.py.
MORE_PASSES = {"dsgd": 1, "dmsgd": 3, "awc_dmsgd": 2, "da_dmsgd": 2, "decentlam": 2}


def decentralized_bytes(sync: SyncConfig, replicas: int, elements: int, width: int) -> float:
    """Bytes that a rank sends along `replicas` in a step for each tensor that is mixed, as the mean
    over ranks, where it owns so many elements of `width` bytes (of masters: 4, or 8 in float64)."""
    return MixingGraph.of(sync, replicas).sent_per_replica * elements * width


def decentralized_arithmetic(
    sync: SyncConfig, replicas: int, elements: int, tensors: int, mixed: int, momentum: bool
) -> Iterator[Arithmetic]:
    """Yields the arithmetic of a step on a rank that owns elements of so many tensors, of which
    `mixed` are exchanged for each parameter: what is sent is computed, weighted and summed."""
    method = sync.method if momentum or sync.method == "awc_dmsgd" else "dsgd"
    yield passes(MORE_PASSES[method], elements, tensors)
    yield passes(MixingGraph.of(sync, replicas).mixing_passes, mixed * elements)


def decentralized_state(sync: SyncConfig, replicas: int, width: int) -> float:
    """Bytes per owned element, and for each tensor that is mixed, that the fullest rank keeps where
    it exchanges while the step is computed: what is sent and received."""
    return MixingGraph.of(sync, replicas).buffered_per_replica * width


def graph_facts(sync: SyncConfig, replicas: int) -> dict[str, float]:
    """The spectral gap of the mixing matrix, and the most neighbours of a replica."""
    graph = MixingGraph.of(sync, replicas)
    return {"spectral_gap": graph.spectral_gap, "neighbours": graph.most_neighbours}
