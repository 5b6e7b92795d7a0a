"""Reads and writes sliding windows in config.json: how many tokens, and of which layers."""

from mtcli.core.checkpoint.huggingface.family import Table, WindowRule
from mtcli.core.config.errors import MtcliError, wrong
from mtcli.core.config.model import MAX_LAYERS, ModelConfig
from mtcli.core.config.untrusted import shown

LETTERS = {"sliding_attention": "L", "full_attention": "G"}  # of ModelConfig.window_pattern
KINDS = {letter: kind for kind, letter in LETTERS.items()}
SWITCH = "use_sliding_window"


def all_local(theirs: Table) -> str:
    """Gives every layer the window, as Mistral."""
    return "L" * _number(theirs, "num_hidden_layers")


def last_local(theirs: Table) -> str:
    """Gives the window to the layers from max_window_layers on, as Qwen2."""
    layers, first = _number(theirs, "num_hidden_layers"), _number(theirs, "max_window_layers")
    return ("G" * first + "L" * layers)[:layers]


def alternating(theirs: Table, period: int) -> str:
    """Gives the window to all layers but each `period`-th, as Gemma."""
    return "".join("LG"[layer % period == 0] for layer in _layers(theirs))


def after_global(theirs: Table, period: int) -> str:
    """Gives the window to all layers but the first and each `period`-th after it, as ModernBERT."""
    return "".join("LG"[(layer - 1) % period == 0] for layer in _layers(theirs))


def _layers(theirs: Table) -> range:
    """The numbers of the layers, from 1 on."""
    return range(1, _number(theirs, "num_hidden_layers") + 1)


def alternating_local(theirs: Table) -> str:
    """Gives the window to the first layer and every other one below max_window_layers, as
    Qwen2-MoE."""
    layers, end = _number(theirs, "num_hidden_layers"), _number(theirs, "max_window_layers")
    return "".join("LG"[layer % 2 or layer >= end] for layer in range(layers))


def read_window(theirs: Table, rule: WindowRule | None) -> Table:
    """Reads model.window and window_pattern; a window that spans the context is none.

    Raises MtcliError for a window where the family has none, and for layers of another kind.
    """
    size, context = _size(theirs, rule), theirs.get("max_position_embeddings")
    if rule and rule.switched and not theirs.get(SWITCH):
        size = 0
    is_short = size > 0 and not (isinstance(context, int) and size >= context)
    if is_short and rule is None:
        message = f"sliding_window={size} is shorter than max_position_embeddings={context}"
        hint = f"set sliding_window to null, or max_position_embeddings to {size}, in config.json"
        raise wrong(message, hint)
    pattern = rule.pattern(theirs) if rule and size else ""
    if (kinds := theirs.get("layer_types")) is not None:
        named = _letters(kinds)
        if (rule is None or not size) and "L" in named:
            raise _unrepresented(kinds, "full_attention")
        if rule and not rule.by_layer and size and named != pattern:
            raise _unrepresented(kinds, "sliding_attention")
        pattern = named
    if not is_short or "L" not in pattern:
        return {"window": 0}
    return {"window": size, "window_pattern": shortest(pattern)}


def write_window(model: ModelConfig, rule: WindowRule | None) -> Table:
    """Writes sliding_window, and its layers where the family's config.json can say them."""
    if rule is None:
        return {}
    table: Table = {"sliding_window": model.window or None}
    if rule.doubled:  # of no layer, where there is no window
        table = {rule.doubled: 2 * (model.window or model.max_seq_len)}
    if rule.switched:
        table[SWITCH] = model.window > 0
    if rule.by_layer:
        windows = [model.layer_window(layer) for layer in range(model.num_layers)]
        kinds = [KINDS["L" if window else "G"] for window in windows]
        first = next((layer for layer, window in enumerate(windows) if window), len(windows))
        table |= {"layer_types": kinds} | ({} if rule.doubled else {"max_window_layers": first})
    return table


def _size(theirs: Table, rule: WindowRule | None) -> int:
    """The tokens of a window, or in an encoder those on either side; 0 is none."""
    name = rule.doubled if rule and rule.doubled else "sliding_window"
    size, least = theirs.get(name), 0 if name == "sliding_window" else 2
    if (size is None and not least) or (type(size) is int and size >= least):
        return (size or 0) // max(1, least)
    what = f"a whole number of {least} or more" if least else "a whole number"
    raise wrong(f"{name}={shown(size)} is not {what}", "128" if least else "null, or a number")


def _letters(kinds: object) -> str:
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise _unrepresented(kinds, *LETTERS)
    if not LETTERS.keys() >= set(kinds):
        raise _unrepresented(kinds, *LETTERS)
    return "".join(LETTERS[kind] for kind in kinds)


def _unrepresented(kinds: object, *can: str) -> MtcliError:
    message = f"layer_types={shown(kinds)} cannot be represented"
    return wrong(message, f"only {' and '.join(can)} can")


def shortest(pattern: str) -> str:
    """The fewest letters that give the pattern when they are repeated."""
    sizes = range(1, len(pattern) + 1)
    return next(pattern[:n] for n in sizes if pattern[n:] == pattern[: len(pattern) - n])


def layer_count(theirs: Table) -> int:
    """The number of layers; 0 where the model is refused for it."""
    return _number(theirs, "num_hidden_layers")


def _number(theirs: Table, name: str) -> int:
    """A number of layers; 0 where the model is refused for it."""
    value = theirs.get(name)
    return value if type(value) is int and 0 <= value <= MAX_LAYERS else 0
