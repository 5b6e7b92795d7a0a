"""Maps Granite, which is Llama with multipliers of embeddings, scores, residuals and logits."""

from dataclasses import replace

from mtcli.core.checkpoint.huggingface.family import Field, Table
from mtcli.core.checkpoint.huggingface.llama import LLAMA
from mtcli.core.checkpoint.huggingface.rope import read_rope, write_rope
from mtcli.core.config.errors import wrong
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.untrusted import is_number, shown


def read_logits_scaling(theirs: Table) -> Table:
    """Reads rotary positions and logits_scaling, by which logits are divided. Raises MtcliError."""
    divisor = theirs.get("logits_scaling", 1.0)
    if not is_number(divisor) or divisor <= 0:
        raise wrong(f"logits_scaling={shown(divisor)} is not above 0", "1.0 scales nothing")
    return read_rope(theirs) | {"logit_scale": 1.0 / divisor}


def write_logits_scaling(model: ModelConfig) -> Table:
    """Writes what `read_logits_scaling` reads, and the scale of scores, 1.0 where it is absent."""
    scale = model.attention_scale or model.head_dim**-0.5
    return write_rope(model) | {
        "logits_scaling": 1.0 / model.logit_scale,
        "attention_multiplier": scale,
    }


GRANITE = replace(
    LLAMA,
    model_type="granite",
    architecture="GraniteForCausalLM",
    fields=(
        *LLAMA.fields,
        Field("embedding_scale", "embedding_multiplier", 1.0),
        Field("residual_scale", "residual_multiplier", 1.0),
        Field("attention_scale", "attention_multiplier", 1.0),
    ),
    supports=("logits_scaling",),
    read_more=read_logits_scaling,
    write_more=write_logits_scaling,
)
