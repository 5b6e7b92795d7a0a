"""Names the linear layers that low-rank adapters are trained for, as peft does."""

from mtcli.core.config.model import ModelConfig

ALL_LINEAR = "all-linear"  # peft's word for every linear layer, routed experts' too
EXPERTS = "experts."  # what the names of routed experts' targets begin with


def layer_targets(model: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Returns the names of the targets in each linear layer of a block, attention's first."""
    is_gpt, is_gated = model.position == "learned", model.is_gated
    up = ("c_fc",) if is_gpt else ("up_proj",)
    attention: dict[str, tuple[str, ...]]
    if model.mla:
        attention = {"q": ("q_proj",)}
        if model.mla.q_rank:
            attention = {"q_down": ("q_a_proj",), "q_up": ("q_b_proj",)}
        attention |= {"kv_down": ("kv_a_proj_with_mqa",), "kv_up": ("kv_b_proj",)}
    else:
        attention = {"qkv": ("c_attn",) if is_gpt else ("q_proj", "k_proj", "v_proj")}
    return attention | {
        "out": ("c_proj",) if is_gpt else ("o_proj",),
        **({"gate_up": ("gate_proj", "up_proj")} if is_gated else {"up": up}),
        "down": ("c_proj",) if is_gpt and not is_gated else ("down_proj",),
    }


def lora_targets(model: ModelConfig) -> tuple[str, ...]:
    """Lists the targets of a model: the modules of its Hugging Face model that are linear layers of
    its blocks, with the prefix of a shared expert's and of routed experts'."""
    layers = layer_targets(model)
    mlp = [layer for layer in layers if layer in ("gate_up", "up", "down")]
    names = [name for layer in layers if layer not in mlp for name in layers[layer]]
    prefixes = ["shared_expert." if model.num_experts else ""] * (model.dense_ffn_hidden_size > 0)
    prefixes += [""] * (model.first_dense_layers > 0) + [EXPERTS] * (model.num_experts > 0)
    for prefix in prefixes:
        names += [prefix + name for layer in mlp for name in layers[layer]]
    return tuple(dict.fromkeys(names))


def saved_modules(model: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The parameters of modules outside of blocks that may be trained whole beside adapters, by
    peft's names; a tied head is the embedding."""
    embedding = "wte" if model.position == "learned" else "embed_tokens"
    modules: dict[str, tuple[str, ...]] = {embedding: ("embedding.weight",)}
    if model.head == "lm" and not model.tie_embeddings:
        modules["lm_head"] = ("head.weight", "head.bias")
    return modules


def is_chosen(name: str, targets: tuple[str, ...]) -> bool:
    """Says whether a config's `targets` name a target, by its name with or without the prefix of a
    shared expert; without any they are all but those of routed experts, which multiply their
    number."""
    is_routed = name.startswith(EXPERTS)
    if not targets or ALL_LINEAR in targets:
        return not is_routed or bool(targets)
    return name in targets or (not is_routed and name.rpartition(".")[2] in targets)


def adapts_experts(targets: tuple[str, ...]) -> bool:
    """Says whether a config's `targets` name any of routed experts."""
    return any(name == ALL_LINEAR or name.startswith(EXPERTS) for name in targets)
