"""What decentralized replicas send and keep: bytes of a step, memory, and their graph's facts."""

from mtcli.core.config.sync import SyncConfig
from mtcli.core.mesh.topology import MixingGraph


def decentralized_bytes(sync: SyncConfig, replicas: int, elements: int, width: int) -> float:
    """Bytes that a rank sends along `replicas` in a step for each tensor that is mixed, as the mean
    over ranks, where it owns so many elements of `width` bytes (of masters: 4, or 8 in float64)."""
    return MixingGraph.of(sync, replicas).sent_per_replica * elements * width


def decentralized_state(sync: SyncConfig, replicas: int, width: int) -> float:
    """Bytes per owned element, and for each tensor that is mixed, that the fullest rank keeps where
    it exchanges while the step is computed: what is sent and received."""
    return MixingGraph.of(sync, replicas).buffered_per_replica * width


def graph_facts(sync: SyncConfig, replicas: int) -> dict[str, float]:
    """The spectral gap of the mixing matrix, and the most neighbours of a replica."""
    graph = MixingGraph.of(sync, replicas)
    return {"spectral_gap": graph.spectral_gap, "neighbours": graph.most_neighbours}
