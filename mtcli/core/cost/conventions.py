"""How published numbers count the FLOPs of a step: each convention by name, and what it comes to.

They differ by how often a forward pass counts (3 times, or 4 where blocks are computed again), and
by whether attention is counted over the full square or the causal half of it.
"""

from dataclasses import dataclass

from mtcli.core.spec.model import forward_flops
from mtcli.core.spec.model_config import ModelConfig


@dataclass(frozen=True)
class Convention:
    """A way to count: `again` adds every block's forward pass once more, the head's never."""

    name: str
    again: bool = False
    causal: bool = False
    attention: bool = True

    def token_flops(self, model: ModelConfig, seq_len: int) -> float:
        """FLOPs of a step per token of it (arXiv:2104.04473, equation 3, for `again`)."""
        attended = seq_len if self.attention else 0
        forward = forward_flops(model, attended, self.causal)
        head = 2.0 * model.vocab_size * model.hidden_size
        return 3 * forward + (forward - head if self.again else 0.0)


MODEL = Convention("3x forward, full attention")  # arXiv:2205.05198, appendix A
CAUSAL = Convention("3x forward, causal attention", causal=True)
WEIGHTS = Convention("3x forward, no attention", attention=False)  # 6 FLOPs a parameter
HARDWARE = Convention("4x forward, full attention", again=True)
HARDWARE_CAUSAL = Convention("4x forward, causal attention", again=True, causal=True)

CONVENTIONS = (MODEL, CAUSAL, WEIGHTS, HARDWARE, HARDWARE_CAUSAL)


def convention_of(printed: str, recomputed: bool) -> Convention:
    """The convention that a record's words mean; 3x forward and the full square where they are
    silent, but for a source that counts achieved FLOPs without saying more."""
    unsaid = "not stated (" in printed and recomputed
    words = {
        "again": "4x" in printed or unsaid,
        "causal": "causal" in printed or "half" in printed,
        "attention": "no attention" not in printed and "without attention" not in printed,
    }
    return Convention(printed, **words)
