"""The parameter table of a model: canonical names, shapes and shardings, counts and FLOPs.

Names follow the token: embedding, blocks.<i>.attention, blocks.<i>.mlp, final_norm, head. A fused
projection is one box per shard: query, key and value are one tensor
[kv_heads, q_per_kv + 2, head_dim, hidden] sharded on dim 0, and by more ranks than it has heads on
dim 2 too; gate and up are one [2, ffn, hidden] sharded on dim 1. So a shard of any layout is a
slice, and Hugging Face names are plain reshapes.

Axis tp shards heads, ffn and the vocabulary. Where tp ranks form a grid, tp_row shards the hidden
dimension of weights, and tp that of biases and norms, as it does the columns of activations.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain

from mtcli.core.config.errors import Problem
from mtcli.core.config.lora import saved_modules
from mtcli.core.config.model import Mla, ModelConfig
from mtcli.core.config.schema import LoraConfig, RunConfig
from mtcli.core.mesh.adapters import adapter_parameters
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.name_patterns import matched, unmatched
from mtcli.core.mesh.sharding import Init, Layer, Matrix, Parameter
from mtcli.core.mesh.visibility import mean_keys

TOKEN_TYPES = "token_type_embedding.weight"


@cache
def run_parameters(
    model: ModelConfig, lora: LoraConfig, freeze: tuple[str, ...] = ()
) -> dict[str, Parameter]:
    """Every parameter of a run: the model's, of which patterns `freeze` some; or the model's,
    frozen but for modules that are trained whole, and adapters."""
    table = parameters(model)
    if not lora.rank:
        frozen = matched(table, freeze)
        return table | {n: replace(table[n], trained=False, frozen=True) for n in frozen}
    saved = saved_parameters(model, lora)
    run_table: dict[str, Parameter] = {}
    for name, parameter in table.items():
        run_table[name] = parameter
        if name not in saved:
            run_table[name] = replace(parameter, trained=False, frozen=True)
        run_table |= {added.name: added for added in adapter_parameters(parameter, model, lora)}
    return run_table


def saved_parameters(model: ModelConfig, lora: LoraConfig) -> set[str]:
    """The parameters of the modules that are trained whole beside adapters."""
    modules = saved_modules(model) if lora.rank else {}
    names = {name for module in lora.modules_to_save for name in modules.get(module, ())}
    return names & parameters(model).keys()


def pattern_problems(config: RunConfig) -> list[Problem]:
    """Lists every pattern of a config that matches no parameter, and says where none is left to
    train."""
    model, freeze, groups = config.model, config.train.freeze, config.optimizer.group
    problems = unmatched(parameters(model), freeze, "train.freeze")
    table = run_parameters(model, config.lora, freeze)
    trained = {n: p for n, p in table.items() if p.trained}
    modules, names = saved_modules(model), table.keys() - trained.keys()
    if config.train.new_tokens and (frozen := names & {*chain(*modules.values())}):
        message = f"new_tokens with frozen {', '.join(sorted(frozen))}, which trains no row of them"
        hint = f"lora.modules_to_save = {[*modules]}" if config.lora.rank else "freeze fewer"
        problems.append(Problem(message, hint, "train.new_tokens"))
    for number, group in enumerate(groups):
        problems += unmatched(trained, group.match, f"optimizer.group.{number}.match")
    if not trained:
        problems.append(Problem("all parameters are frozen", "freeze fewer", "train.freeze"))
    return problems


@cache
def parameters(model: ModelConfig) -> dict[str, Parameter]:
    """Every parameter of the model by canonical name, in the order of a forward pass."""
    table = [_vocabulary(model, "embedding.weight", "first", tied=model.tie_embeddings)]
    if model.position == "learned":
        shape = (model.position_offset + model.max_seq_len, model.hidden_size)
        name = "position_embedding.weight"
        table.append(Parameter(name, shape, (None, "tp_columns"), "normal", "first"))
    if model.token_types:
        shape = (model.token_types, model.hidden_size)
        table.append(Parameter(TOKEN_TYPES, shape, (None, "tp_columns"), "normal", "first"))
    if model.has_embedding_norm:
        table += _norm(model, "embedding_norm", "first")
    for layer in range(model.num_layers):
        table += _block(model, f"blocks.{layer}", layer)
    if model.norm_order != "post":
        table += _norm(model, "final_norm", "last")
    table += _head(model)
    return {parameter.name: parameter for parameter in table}


def count_parameters(model: ModelConfig) -> int:
    """The number of trained parameters of the model, without a tied head and vocabulary padding."""
    return sum(p.numel for p in parameters(model).values() if p.trained)


def count_adapters(model: ModelConfig, lora: LoraConfig) -> int:
    """The number of parameters of a run's adapters; 0 without adapters."""
    return sum(p.numel for p in _adapters(model, lora))


def count_active_adapters(model: ModelConfig, lora: LoraConfig) -> int:
    """The number of parameters of adapters used for one token, which visits top_k experts."""
    return count_adapters(model, lora) - _idle(model, _adapters(model, lora))


def _adapters(model: ModelConfig, lora: LoraConfig) -> list[Parameter]:
    return [p for p in run_parameters(model, lora).values() if p.of_adapter]


def count_active(model: ModelConfig) -> int:
    """The number of parameters used for one token: of the experts, top_k out of num_experts."""
    return count_parameters(model) - _idle(model, parameters(model).values())


def _idle(model: ModelConfig, table: Iterable[Parameter]) -> int:
    """The parameters of experts that a token does not visit."""
    experts = sum(p.numel for p in table if p.is_expert)
    return experts * (model.num_experts - model.top_k) // model.num_experts if experts else 0


def stage_parameters(
    table: Mapping[str, Parameter], layers: Sequence[int], first: bool, last: bool
) -> list[Parameter]:
    """The parameters of a pipeline stage. The last stage has a copy of a tied embedding."""
    return [
        p
        for p in table.values()
        if p.layer in layers
        or (first and p.layer == "first")
        or (last and (p.layer == "last" or p.tied))
    ]


def stage_layers(model: ModelConfig, layout: ParallelLayout, given: tuple[int, ...]) -> list[range]:
    """The layers of each stage: `given` numbers of them, or num_layers / num_stages."""
    sizes = given or (model.num_layers // layout.num_stages,) * layout.num_stages
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def forward_flops(model: ModelConfig, seq_len: int, causal: bool = False) -> float:
    """FLOPs of one token's forward pass at a sequence length.

    2 per weight of every matrix that multiplies the token (the head, but not the embedding lookup),
    plus 2 * keys * heads * (head_dim + value_dim) per layer for scores and values. `keys` is
    seq_len, the full square; with `causal` the mean number of keys that a query sees, half of them
    in a causal layer. Adapters are not counted.
    """
    weights = _multiplied(model, parameters(model).values())
    keys = mean_keys(model, seq_len, full_square=not causal)
    widths = model.head_dim + model.value_dim
    attention = 2.0 * keys * model.num_heads * widths * model.num_layers
    return 2.0 * weights + attention


def _multiplied(model: ModelConfig, table: Iterable[Parameter]) -> int:
    """Elements of the matrices of some parameters that multiply a token, a tied head's too."""
    tables = ("embedding.weight", "position_embedding.weight", TOKEN_TYPES)
    kinds = [p for p in table if p.init in ("normal", "residual")]
    matrices = [p for p in kinds if p.name not in tables or p.tied]
    return sum(p.numel for p in matrices) - _idle(model, matrices)


def training_flops(
    model: ModelConfig,
    seq_len: int,
    lora: LoraConfig,
    causal: bool = False,
    freeze: tuple[str, ...] = (),
) -> float:
    """FLOPs of one token's forward and backward pass (see `forward_flops`).

    Each GEMM of the forward has two in the backward, so 3 times the forward (arXiv:2205.05198,
    appendix A). Frozen weights have no gradient: with adapters twice the forward, plus 3 times the
    adapters'. The gradient of the first block's inputs counts too, though nothing needs it; where
    patterns `freeze` weights, none of the blocks below the first that is trained.
    """
    forward = forward_flops(model, seq_len, causal)
    if not lora.rank:
        table = run_parameters(model, lora, freeze).values()
        depths = dict.fromkeys(("first", *range(model.num_layers), "last"))
        depth = {layer: number for number, layer in enumerate(depths)}
        lowest = min(depth[p.layer] for p in table if p.trained)
        below = [p for p in table if depth[p.layer] < max(1, lowest)]
        of_weights = _multiplied(model, (p for p in table if not p.trained))
        scores = (forward - 2.0 * _multiplied(model, table)) * max(0, lowest - 1)
        of_inputs = _multiplied(model, (p for p in below if not p.tied))
        return 3.0 * forward - 2.0 * (of_weights + of_inputs) - 2.0 * scores / model.num_layers
    weights, saved = forward_flops(model, 0), saved_parameters(model, lora)
    of_saved = 2.0 * _multiplied(model, (p for n, p in parameters(model).items() if n in saved))
    adapters = 6.0 * count_active_adapters(model, lora)
    return 2.0 * weights + 3.0 * (forward - weights) + of_saved + adapters


def _vocabulary(model: ModelConfig, name: str, layer: Layer, tied: bool = False) -> Parameter:
    shape = (model.vocab_size, model.hidden_size)
    return Parameter(name, shape, ("tp", "tp_row"), "normal", layer, padded=0, tied=tied)


def _block(model: ModelConfig, name: str, layer: int) -> Iterator[Parameter]:
    for part in ("attention", "mlp"):
        has_norm = model.norm_order != "after" and model.parallel_norms == 2
        if model.has_attention_norm(layer) if part == "attention" else has_norm:
            yield from _norm(model, f"{name}.{part}_norm", layer)
        if part == "attention" and model.mla:
            yield from _latent_attention(model, model.mla, f"{name}.{part}", layer)
        elif part == "attention":
            yield from _attention(model, f"{name}.{part}", layer)
        elif model.has_experts(layer):
            yield from _experts(model, f"{name}.{part}", layer)
        else:
            yield from _feed_forward(model, f"{name}.{part}", layer, model.ffn_hidden_size)
        if model.norms_outputs:
            yield from _norm(model, f"{name}.{part}_post_norm", layer)


def _head(model: ModelConfig) -> Iterator[Parameter]:
    """The parameters of a head for masked tokens or for classes."""
    hidden = model.hidden_size
    if model.head == "lm":
        if not model.tie_embeddings:
            yield _vocabulary(model, "head.weight", "last")
        if model.head_bias:
            yield _bias_of_logits(model)
        return
    if model.head == "mlm":
        yield from _dense("head.transform", hidden, model.transform_bias)
        yield from _norm(model, "head.norm", "last")
        yield _bias_of_logits(model)
        if not model.sentence_order:
            return
    outputs = {"mlm": 2, "classification": model.num_labels, "multiple_choice": 1}[model.head]
    yield from _dense("head.pooler", hidden)
    # A pre-trained one is of no use to a classifier, and so has another name.
    name = f"head.{'sentence_order' if model.head == 'mlm' else 'classifier'}"
    shape, axes = (outputs, hidden), (None, "tp_columns")
    yield Parameter(f"{name}.weight", shape, axes, "normal", "last")
    yield Parameter(f"{name}.bias", (outputs,), (None,), "zeros", "last")


def _bias_of_logits(model: ModelConfig) -> Parameter:
    return Parameter("head.bias", (model.vocab_size,), ("tp",), "zeros", "last", padded=0)


def _dense(name: str, hidden: int, has_bias: bool = True) -> Iterator[Parameter]:
    """A square layer of the head, which tp ranks replicate unless they form a grid."""
    shape, axes = (hidden, hidden), ("tp_columns", "tp_row")
    yield Parameter(f"{name}.weight", shape, axes, "normal", "last")
    if has_bias:
        yield Parameter(f"{name}.bias", (hidden,), ("tp_columns",), "zeros", "last")


def _norm(model: ModelConfig, name: str, layer: Layer) -> list[Parameter]:
    return _norm_of(model, name, layer, (model.hidden_size,), ("tp_columns",))


def _norm_of(
    model: ModelConfig,
    name: str,
    layer: Layer,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
) -> list[Parameter]:
    """A norm over columns that axes shard; without axes, of heads, of which tp ranks have some."""
    kinds: list[tuple[str, Init]] = [("weight", "zeros" if model.norm_offset else "ones")]
    if model.has_norm_bias:
        kinds.append(("bias", "zeros"))
    partial = axes == (None,)
    return [
        Parameter(f"{name}.{kind}", shape, axes, init, layer, partial_over_tp=partial)
        for kind, init in kinds
    ]


def _linear(
    name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], layer: int, *matrices: Matrix
) -> Parameter:
    """The weight of a block's linear layer; one ahead of a residual addition gets smaller initial
    values."""
    init: Init = "residual" if matrices[0].role in ("output", "down") else "normal"
    return Parameter(f"{name}.weight", shape, axes, init, layer, matrices=matrices)


def _attention(model: ModelConfig, name: str, layer: int) -> Iterator[Parameter]:
    groups, hidden = model.num_kv_heads, model.hidden_size
    queries = model.num_heads // groups
    fused, axes = (groups, queries + 2, model.head_dim), ("tp", None, "tp")
    slots = (
        Matrix("query", 1, 0, queries),
        Matrix("key", 1, queries),
        Matrix("value", 1, queries + 1),
    )
    yield _linear(f"{name}.qkv", (*fused, hidden), (*axes, "tp_row"), layer, *slots)
    if model.qkv_bias:
        yield Parameter(f"{name}.qkv.bias", fused, axes, "zeros", layer)
    for norm, heads in (("q_norm", queries), ("k_norm", 1)) if model.qk_norm != "none" else ():
        yield from _head_norm(model, f"{name}.{norm}", layer, heads)
    yield from _output(model, name, layer)


def _head_norm(model: ModelConfig, name: str, layer: int, heads: int) -> list[Parameter]:
    """The norm of `heads` query or key heads of each key-value head."""
    groups, width = model.num_kv_heads, model.head_dim
    if model.qk_norm == "head":
        return _norm_of(model, name, layer, (width,), (None,))
    if model.qk_norm == "projection":
        return _norm_of(model, name, layer, (groups, heads, width), ("tp", None, "tp"))
    # A rank's queries need all columns of a key head that it shares, so tp replicates the rows.
    init: Init = "zeros" if model.norm_offset else "ones"
    weight, shape = f"{name}.weight", (groups * heads, width)
    return [Parameter(weight, shape, (None, None), init, layer, partial_over_tp=True)]


def _latent_attention(model: ModelConfig, mla: Mla, name: str, layer: int) -> Iterator[Parameter]:
    """Down-projections, which tp ranks replicate, and up-projections, whose heads they shard. A
    bias is one of a down-projection."""
    heads, hidden, turned = model.num_heads, model.hidden_size, mla.nope_dim + mla.rope_dim
    latents = [("q_down", mla.q_rank, "q_norm", mla.q_rank)] if mla.q_rank else []
    latents.append(("kv_down", mla.kv_rank + mla.rope_dim, "kv_norm", mla.kv_rank))
    for linear, width, norm, rank in latents:
        down = f"{name}.{linear}"
        yield _linear(down, (width, hidden), (None, None), layer, Matrix("latent"))
        if model.qkv_bias:
            yield Parameter(f"{down}.bias", (width,), (None,), "zeros", layer)
        init: Init = "zeros" if model.norm_offset else "ones"
        yield Parameter(f"{name}.{norm}.weight", (rank,), (None,), init, layer)
    axes = ("tp", None, None)
    if mla.q_rank:
        shape = (heads, turned, mla.q_rank)
        yield _linear(f"{name}.q_up", shape, axes, layer, Matrix("query"))
    else:
        shape = (heads, turned, hidden)
        yield _linear(f"{name}.q", shape, (*axes[:2], "tp_row"), layer, Matrix("query"))
    shape = (heads, mla.nope_dim + mla.value_dim, mla.kv_rank)
    slots = Matrix("key", 1, 0, mla.nope_dim), Matrix("value", 1, mla.nope_dim, mla.value_dim)
    yield _linear(f"{name}.kv_up", shape, axes, layer, *slots)
    yield from _output(model, name, layer)


def _output(model: ModelConfig, name: str, layer: int) -> Iterator[Parameter]:
    if model.attention_sinks:  # of the queries of qkv, as its first two dims
        groups = model.num_heads if model.mla else model.num_kv_heads
        heads = (groups, model.num_heads // groups)
        yield Parameter(f"{name}.sinks", heads, ("tp", "tp"), "normal_vector", layer)
    shape = (model.hidden_size, model.num_heads * model.value_dim)
    yield _linear(f"{name}.out", shape, ("tp_row", "tp"), layer, Matrix("output"))
    if model.has_out_bias:
        yield Parameter(f"{name}.out.bias", shape[:1], ("tp_columns",), "zeros", layer)


def _feed_forward(model: ModelConfig, name: str, layer: int, ffn: int) -> Iterator[Parameter]:
    hidden, gated = model.hidden_size, model.is_gated
    up = "gate_up" if gated else "up"
    shape, axes = ((2, ffn), (None, "tp")) if gated else ((ffn,), ("tp",))
    slots = (Matrix("gate", 0, 0), Matrix("up", 0, 1)) if gated else (Matrix("up"),)
    yield _linear(f"{name}.{up}", (*shape, hidden), (*axes, "tp_row"), layer, *slots)
    if model.has_mlp_bias:
        yield Parameter(f"{name}.{up}.bias", shape, axes, "zeros", layer)
    yield _linear(f"{name}.down", (hidden, ffn), ("tp_row", "tp"), layer, Matrix("down"))
    if model.has_mlp_bias:
        yield Parameter(f"{name}.down.bias", (hidden,), ("tp_columns",), "zeros", layer)


def _experts(model: ModelConfig, name: str, layer: int) -> Iterator[Parameter]:
    experts, hidden, ffn = model.num_experts, model.hidden_size, model.moe_ffn_hidden_size
    yield Parameter(f"{name}.router.weight", (experts, hidden), (None, None), "normal", layer)
    if model.router_bias:
        yield Parameter(f"{name}.router.linear_bias", (experts,), (None,), "zeros", layer)
    if model.has_router_biases:
        bias = f"{name}.router.bias"
        yield Parameter(bias, (experts,), (None,), "zeros", layer, trained=False)
    gated = model.is_gated
    shape, axes = ((2, ffn), (None, "etp")) if gated else ((ffn,), ("etp",))
    slots = (Matrix("gate", 1, 0), Matrix("up", 1, 1)) if gated else (Matrix("up"),)
    up, down = f"{name}.experts.{'gate_up' if gated else 'up'}", f"{name}.experts.down"
    yield _linear(up, (experts, *shape, hidden), ("ep", *axes, None), layer, *slots)
    if model.expert_bias:
        yield Parameter(f"{up}.bias", (experts, *shape), ("ep", *axes), "zeros", layer)
    yield _linear(down, (experts, hidden, ffn), ("ep", None, "etp"), layer, Matrix("down"))
    if model.expert_bias:  # each etp rank adds its columns to its partial sums
        yield Parameter(f"{down}.bias", (experts, hidden), ("ep", "etp"), "zeros", layer)
    if shared := model.shared_expert_ffn_hidden_size:
        yield from _feed_forward(model, f"{name}.shared_expert", layer, shared)
    if model.shared_expert_gate:
        gate = f"{name}.shared_expert_gate.weight"
        yield Parameter(gate, (1, hidden), (None, "tp_columns"), "normal", layer)
