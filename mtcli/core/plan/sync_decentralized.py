"""What decentralized replicas send and keep: bytes of a step, memory, and their graph's facts."""

from mtcli.core.config.schema import RunConfig
from mtcli.core.mesh.topology import MixingGraph


def decentralized_bytes(config: RunConfig, replicas: int, elements: int, width: int) -> float:
    """Bytes that a rank sends along `replicas` in a step, as the mean over ranks, where it owns so
    many elements of `width` bytes (of masters, so 4, or 8 in float64)."""
    return _tensors(config) * _graph(config, replicas).sent_per_replica * elements * width


def decentralized_state(config: RunConfig, replicas: int, width: int) -> float:
    """Bytes per owned element that the fullest rank keeps besides the optimizer: what is sent and
    received while the step is computed; none where the exchange follows the backward."""
    if not config.overlaps_neighbours:
        return 0.0
    return _tensors(config) * _graph(config, replicas).buffered_per_replica * width


def graph_facts(config: RunConfig, replicas: int) -> dict[str, float]:
    """The spectral gap of the mixing matrix, and the most neighbours of a replica."""
    graph = _graph(config, replicas)
    return {"spectral_gap": graph.spectral_gap, "neighbours": graph.most_neighbours}


def _graph(config: RunConfig, replicas: int) -> MixingGraph:
    return MixingGraph.of(config.sync, replicas)


def _tensors(config: RunConfig) -> int:
    """Tensors of a replica's size that are mixed: with da_dmsgd momenta too, if there are any."""
    return 2 if config.sync.method == "da_dmsgd" and config.optimizer.momentum else 1
