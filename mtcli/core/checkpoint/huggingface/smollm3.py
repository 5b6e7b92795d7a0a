"""Maps SmolLM3, which is Llama with some layers that do not rotate queries and keys."""

from dataclasses import replace

from mtcli.core.checkpoint.huggingface.family import Table, WindowRule
from mtcli.core.checkpoint.huggingface.llama import LLAMA, NO_PADDING
from mtcli.core.checkpoint.huggingface.rope import read_rope, write_rope
from mtcli.core.checkpoint.huggingface.window import shortest
from mtcli.core.config.errors import wrong
from mtcli.core.config.model import MAX_LAYERS, ModelConfig
from mtcli.core.config.untrusted import shown


def rotating(theirs: Table) -> str:
    """Returns a letter of rope_pattern for each layer; in no_rope_layers a 1 rotates."""
    layers, given = theirs.get("num_hidden_layers"), theirs.get("no_rope_layers")
    if type(layers) is not int or not 0 < layers <= MAX_LAYERS:
        return ""  # refused elsewhere
    if given is None:
        interval = theirs.get("no_rope_layer_interval", 4)
        if type(interval) is not int or interval < 1:
            hint = "a number of layers, such as 4"
            raise wrong(f"no_rope_layer_interval={shown(interval)} is no number of layers", hint)
        given = [int((layer + 1) % interval != 0) for layer in range(layers)]
    flags = given[:layers] if isinstance(given, list) else []
    if len(flags) < layers or any(type(flag) is not int or not 0 <= flag <= 1 for flag in flags):
        message = f"no_rope_layers={shown(given)} is not a 0 or 1 for each of {layers} layers"
        raise wrong(message, "1 where a layer rotates")
    return "".join("NR"[flag] for flag in flags)


def unrotated_local(theirs: Table) -> str:
    """Gives the window to the layers that do not rotate."""
    return rotating(theirs).replace("R", "G").replace("N", "L")


def read_unrotated(theirs: Table) -> Table:
    """Reads rotary positions and the layers without. Raises MtcliError for other lists."""
    letters = rotating(theirs)
    return read_rope(theirs) | {"rope_pattern": shortest(letters) if letters else ""}


def write_unrotated(model: ModelConfig) -> Table:
    """Writes what `read_unrotated` reads."""
    layers = [int(model.layer_rotates(layer)) for layer in range(model.num_layers)]
    return write_rope(model) | NO_PADDING | {"no_rope_layers": layers}


SMOLLM3 = replace(
    LLAMA,
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    fields=tuple(field for field in LLAMA.fields if field.ours != "head_dim"),
    defaults={**LLAMA.defaults, "num_hidden_layers": 36, "hidden_size": 2048}
    | {"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 128256}
    | {"max_position_embeddings": 32768, "rope_theta": 2e6, "tie_word_embeddings": True},
    supports=("no_rope_layers",),
    window=WindowRule(unrotated_local, switched=True, by_layer=True),
    read_more=read_unrotated,
    write_more=write_unrotated,
)
