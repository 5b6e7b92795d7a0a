"""What a router counts of a step's tokens, and the figures of metrics.jsonl that follow from it.

E experts; a layer's statistics are its token copies per expert, then a sum over tokens for each of
`summed_figures`. They are float64, in which sums of whole numbers are exact.
"""

from torch import Tensor

from mtcli.core.config.model import ModelConfig


def summed_figures(model: ModelConfig) -> tuple[str, ...]:
    """The sums over tokens: the scores' entropy in nats, the auxiliary losses that are trained,
    each without its coefficient, and the copies that are not dropped."""
    trained = {
        "z_loss": model.z_loss_coeff,
        "aux_loss": model.aux_loss_coeff,
        "sequence_aux_loss": model.sequence_aux_loss_coeff,
        "kept": model.capacity_factor,
    }
    return ("entropy", *(name for name, number in trained.items() if number))


def router_figures(model: ModelConfig, sums_LS: Tensor) -> dict[str, list[float]]:
    """The figures of each layer of experts [L], by name, from the statistics of all ranks."""
    loads_LE, sums = sums_LS[:, : model.num_experts], sums_LS[:, model.num_experts :].unbind(1)
    copies_L = loads_LE.sum(1).clamp(min=1.0)
    figures = {"load_max_over_mean": loads_LE.amax(1) * model.num_experts / copies_L}
    for name, sums_L in zip(summed_figures(model), sums, strict=True):
        if name == "kept":
            figures["dropped"] = 1.0 - sums_L / copies_L
        else:
            figures[name] = sums_L * model.top_k / copies_L
    return {f"router_{name}": values.tolist() for name, values in figures.items()}
