"""Defines the model section: shapes, and the defaults of each architecture."""

from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from mtcli.core.config.fields import Fraction, Int, Positive, Real, Section, Whole

MAX_LAYERS, MAX_EXPERTS, MAX_LABELS = 10_000, 65_536, 1_000_000
Multiplier = Annotated[Real, Field(ge=1e-6, le=1e6)]
Softcap = Annotated[Real, Field(ge=0.0, le=1e6)]
Coefficient = Annotated[Real, Field(ge=0.0, le=1000.0)]

# What an architecture's name says: defaults of the fields below, each of which may be set.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt": {
        "activation": "gelu",
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "position": "learned",
        "tie_embeddings": True,
        "bias": True,
        "qkv_bias": True,
    },
    "llama": {
        "activation": "swiglu",
        "norm": "rmsnorm",
        "norm_eps": 1e-5,
        "position": "rope",
        "tie_embeddings": False,
        "bias": False,
        "qkv_bias": False,
    },
}
ARCHITECTURES["mixtral"] = ARCHITECTURES["llama"] | {"num_experts": 8, "top_k": 2}
ARCHITECTURES["qwen2-moe"] = ARCHITECTURES["llama"] | {
    "norm_eps": 1e-6,
    "qkv_bias": True,
    "num_experts": 60,
    "top_k": 4,
    "shared_expert_gate": True,
    "normalize_top_k": False,
}
ARCHITECTURES["bert"] = ARCHITECTURES["gpt"] | {
    "head": "mlm",
    "norm_eps": 1e-12,
    "token_types": 2,
    "causal": False,
    "sentence_order": True,
}
# activations that multiply by a second projection
GATED = ("swiglu", "swiglu_clamped", "geglu", "geglu_tanh")
# Heads that classify sequences from their first token, and read no vocabulary.
CLASSIFIERS = ("classification", "multiple_choice")
SEQUENCES = {"multiple_choice": 4}  # of a row, by head, that share a label; of the others 1
MASKED_SHARE = 0.15  # of its tokens mlm predicts, special ones aside (arXiv:1810.04805, 3.1)
OF_EXPERTS = (  # the fields that a dense model has no use for, besides num_experts and top_k
    *("first_dense_layers", "routed_scale"),
    *("moe_ffn_hidden_size", "shared_expert_ffn_hidden_size", "shared_expert_gate"),
    *("normalize_top_k", "router_score", "router_groups", "router_top_groups"),
    *("capacity_factor", "drop_policy", "drop_scope", "pad_to_capacity"),
    *("aux_loss_coeff", "sequence_aux_loss_coeff", "router_bias_update_rate"),
    *("router_biases", "z_loss_coeff", "expert_bias", "router_bias"),
)
OF_ROPE = (  # the fields that a model without rotary positions has no use for
    *("rope_theta", "rope_scaling", "rope_local_theta", "rope_pattern", "rotary_fraction"),
    "rope_interleaved",
)


class RopeScaling(Section):
    """How rotary frequencies are scaled to a longer context than the one trained first."""

    kind: Literal["llama3", "linear", "dynamic", "yarn", "longrope"] = "llama3"
    """Llama 3's, position interpolation (arXiv:2306.15595), dynamic NTK, which stretches the base,
    YaRN (arXiv:2309.00071), or LongRoPE (arXiv:2402.13753)"""
    factor: Annotated[Real, Field(ge=1.0, le=1e6)] = 8.0
    """how many times longer the context is than the one trained first"""
    original_max_seq_len: Positive = 8192
    """all but linear: the context length trained first"""
    low_freq_factor: Annotated[Real, Field(ge=1e-3, le=1e6)] = 1.0
    """llama3: wavelengths longer than original_max_seq_len / this are divided by factor"""
    high_freq_factor: Annotated[Real, Field(ge=1e-3, le=1e6)] = 4.0
    """llama3: wavelengths shorter than original_max_seq_len / this are kept"""
    beta_fast: Annotated[Real, Field(ge=1e-3, le=1e6)] = 32.0
    """yarn: pairs that turn more often than this in the original context are kept"""
    beta_slow: Annotated[Real, Field(ge=1e-3, le=1e6)] = 1.0
    """yarn: frequencies of pairs that turn less often than this are divided by factor"""
    truncate: bool = True
    """yarn: the range between the two ends at whole pairs"""
    attention_factor: Annotated[Real, Field(ge=0.0, le=1e6)] = 0.0
    """yarn, longrope: multiplies rotated queries and keys [0.1 * mscale * ln(factor) + 1, over the
    same of mscale_all_dim; without these 0.1 * ln(factor) + 1; longrope: sqrt(1 + ln(factor) /
    ln(original_max_seq_len))]"""
    mscale: Annotated[Real, Field(ge=0.0, le=1e6)] = 0.0
    """yarn: DeepSeek's weight of ln(factor) in attention_factor"""
    mscale_all_dim: Annotated[Real, Field(ge=0.0, le=1e6)] = 0.0
    """yarn: the same in what attention_factor is divided by; mla: also in the scale of scores"""
    short_factors: tuple[Multiplier, ...] = ()
    """longrope: what divides the frequency of each pair, where batch.seq_len, or max_seq_len in
    eval and generate, is at most original_max_seq_len"""
    long_factors: tuple[Multiplier, ...] = ()
    """longrope: the same where it is longer"""


class Mla(Section):
    """Multi-head latent attention (arXiv:2405.04434, section 2.1): widths of latents and heads."""

    q_rank: Whole = 0
    """width of the queries' latent; 0 is none: queries come from the residual stream"""
    kv_rank: Positive = 512
    """width of the latent that keys and values are made from, and a cache keeps"""
    nope_dim: Positive = 128
    """dimensions of a query or key head that do not rotate"""
    rope_dim: Positive = 64
    """further dimensions that do, which all key heads share"""
    value_dim: Positive = 128
    """width of a value head"""
    norm_eps: Annotated[Real, Field(ge=1e-30, le=1.0)] = 1e-6
    """added to the variance of latents"""


class ModelConfig(Section):
    """Shapes of the transformer. Sizes are exact: nothing is rounded silently."""

    architecture: Literal["gpt", "llama", "mixtral", "qwen2-moe", "bert"] = "gpt"
    """family, which sets the defaults of the fields below"""
    head: Literal["lm", "mlm", "classification", "multiple_choice"] = "lm"
    """what is predicted: next tokens, masked tokens, the class of a text, the right one of some"""
    sentence_order: bool = False
    """mlm: also whether the halves of a document are in order (SOP), from the first token"""
    num_labels: Annotated[Int, Field(ge=0, le=MAX_LABELS)] = 0
    """classification: classes [2]"""
    num_layers: Annotated[Int, Field(ge=1, le=MAX_LAYERS)]
    """transformer blocks"""
    hidden_size: Positive
    """width of the residual stream"""
    num_heads: Positive
    """attention (query) heads"""
    num_kv_heads: Positive
    """key and value heads; fewer than num_heads is grouped-query attention [num_heads]"""
    head_dim: Positive
    """width of a head [hidden_size / num_heads]"""
    ffn_hidden_size: Positive
    """inner width of the MLP [4 * hidden_size for gpt, moe_ffn_hidden_size with experts]"""
    vocab_size: Positive
    """number of token ids; padding is derived from tp and never leaks"""
    max_seq_len: Positive
    """longest sequence of learned positions; also the longest context in eval"""
    activation: Literal[
        "gelu", "gelu_tanh", "relu2", "swiglu", "swiglu_clamped", "geglu", "geglu_tanh"
    ]
    """MLP activation: geglu gates by GELU, relu2 squares ReLU, swiglu_clamped is gpt-oss's"""
    activation_limit: Annotated[Real, Field(ge=1e-3, le=1e6)] = 7.0
    """swiglu_clamped: gates are clamped to at most this, and ups to within plus or minus this"""
    activation_alpha: Annotated[Real, Field(ge=1e-3, le=1e3)] = 1.702
    """swiglu_clamped: multiplies the gate in the sigmoid"""
    norm: Literal["layernorm", "rmsnorm"]
    """normalisation before attention, MLP and head"""
    norm_order: Literal["pre", "post", "sandwich", "after"] = "pre"
    """norms: before a sublayer and the head, after its residual add, around it, or of its output"""
    parallel_residual: bool = False
    """attention and MLP read the same residual stream, and both are added to it"""
    parallel_norms: Annotated[Int, Field(ge=1, le=2)] = 2
    """norms of a block with parallel_residual: 1 is of both attention and MLP"""
    embedding_norm: bool = False
    """a norm of the embeddings, which norm_order = post always has"""
    first_attention_norm: bool = True
    """the first block has a norm ahead of attention; false: the embeddings' norm is all"""
    norm_eps: Annotated[Real, Field(ge=1e-30, le=1.0)]
    """added to the variance"""
    norm_offset: Annotated[Real, Field(ge=0.0, le=1.0)] = 0.0
    """added to norms' weights, which begin at 1 minus this: 1 as in Gemma, or 0"""
    position: Literal["learned", "rope"]
    """position information"""
    position_offset: Whole = 0
    """rows of learned positions ahead of the first token's: RoBERTa's padding id + 1"""
    token_types: Whole = 0
    """kinds of segments with an embedding each, such as a first and a second text"""
    rope_theta: Annotated[Real, Field(ge=1.0, le=1e12)] = 10000.0
    """base of the rotary frequencies"""
    rope_scaling: RopeScaling | None = None
    """scaling of the rotary frequencies"""
    rope_local_theta: Annotated[Real, Field(ge=0.0, le=1e12)] = 0.0
    """base of the layers with a window, which are not scaled [rope_theta, scaled]"""
    rope_pattern: Annotated[str, Field(pattern=rf"^[RN]{{0,{MAX_LAYERS}}}$")] = ""
    """letters of the layers, repeated: R rotates queries and keys, N does not [R]"""
    rotary_fraction: Annotated[Real, Field(ge=1e-6, le=1.0)] = 1.0
    """share of a head that rotates: its first int(head_dim * this) dimensions"""
    rope_interleaved: bool = False
    """rotary pairs are neighbours, dimensions 2i and 2i + 1, and not i and i + half of them"""
    causal: bool = True
    """false: tokens attend to all of their sequence, as in encoders; not with head = lm"""
    window: Whole = 0
    """tokens that a local layer's query sees, itself included; not causal: as many either side"""
    window_pattern: Annotated[str, Field(pattern=rf"^[LG]{{0,{MAX_LAYERS}}}$")] = ""
    """letters of the layers, repeated: L has the window, G sees all [L]"""
    attention_scale: Annotated[Real, Field(ge=0.0, le=1e6)] = 0.0
    """multiplies scores before the softmax [1 / sqrt(head_dim), with mla also YaRN's growth]"""
    embedding_scale: Multiplier = 1.0
    """multiplies token embeddings; sqrt(hidden_size) is rounded to their dtype first (Gemma)"""
    residual_scale: Multiplier = 1.0
    """multiplies the outputs of attention and MLP before they are added"""
    logit_scale: Multiplier = 1.0
    """lm: multiplies the logits"""
    attention_softcap: Softcap = 0.0
    """replaces scores x, ahead of the mask, by this * tanh(x / this); 0 caps none"""
    logit_softcap: Softcap = 0.0
    """lm: the same of logits, after logit_scale"""
    attention_sinks: bool = False
    """a trained logit of each query head joins its softmaxes, and has no value"""
    tie_embeddings: bool
    """the head shares the token embedding's weight [false for heads that read no vocabulary]"""
    bias: bool
    """biases of the linear layers, where the fields of their kinds say nothing else"""
    qkv_bias: bool
    """bias of the query, key and value projection"""
    out_bias: bool | None = None
    """bias of attention's output projection [bias]"""
    mlp_bias: bool | None = None
    """biases of the MLP; those of routed experts are expert_bias [bias]"""
    expert_bias: bool = False
    """biases of routed experts, which their tokens' weights multiply too"""
    router_bias: bool = False
    """a trained bias of the router's logits; router_biases are of the choice alone"""
    norm_bias: bool | None = None
    """biases of layernorm; rmsnorm has none [true]"""
    head_bias: bool = False
    """lm: bias of the logits, where the head has a weight of its own"""
    transform_bias: bool = True
    """mlm: bias of the head's layer ahead of its norm"""
    qk_norm: Literal["none", "head", "each_head", "projection"] = "none"
    """a norm before rotation: of query and key heads, by one weight or one each, or all as one"""
    mla: Mla | None = None
    """multi-head latent attention, in place of the query, key and value projection"""
    dropout: Fraction = 0.0
    """after the embedding, attention and MLP outputs"""
    attention_dropout: Fraction = 0.0
    """of attention probabilities"""
    init_std: Annotated[Real, Field(ge=1e-12, le=1000.0)] = 0.02
    """standard deviation of initial weights; before a residual add, over sqrt(2 * num_layers)"""
    num_experts: Annotated[Int, Field(ge=0, le=MAX_EXPERTS)] = 0
    """experts of each MLP; 0 is a dense model"""
    top_k: Annotated[Int, Field(ge=0, le=MAX_EXPERTS)] = 0
    """experts that each token visits"""
    first_dense_layers: Annotated[Int, Field(ge=0, le=MAX_LAYERS)] = 0
    """first layers without experts, whose MLP is ffn_hidden_size wide"""
    moe_ffn_hidden_size: Whole = 0
    """inner width of an expert [ffn_hidden_size]"""
    shared_expert_ffn_hidden_size: Whole = 0
    """inner width of the shared expert; 0 is none"""
    shared_expert_gate: bool = False
    """the shared expert's output is scaled by a sigmoid gate"""
    normalize_top_k: bool = True
    """the chosen experts' weights are rescaled to sum to 1"""
    routed_scale: Multiplier = 1.0
    """multiplies the weighted sum of the chosen experts, without the shared one"""
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    """turns router logits into experts' weights, in float32"""
    router_groups: Annotated[Int, Field(ge=1, le=MAX_EXPERTS)] = 1
    """experts are chosen within the best of this many equal groups of experts"""
    router_top_groups: Annotated[Int, Field(ge=1, le=MAX_EXPERTS)] = 1
    """how many of the groups a token may use"""
    capacity_factor: Annotated[Real, Field(ge=0.0, le=MAX_EXPERTS)] = 0.0
    """an expert takes at most ceil(tokens * top_k / num_experts * this); 0 drops nothing"""
    drop_policy: Literal["probs", "position"] = "probs"
    """which tokens an expert over capacity keeps: the likeliest, or the earliest"""
    drop_scope: Literal["full_sequence", "sub_sequence"] = "full_sequence"
    """tokens that share a capacity: a sequence's, on any layout, or those that a rank holds"""
    pad_to_capacity: bool = False
    """every expert gets exactly its capacity, filled up with zeros: fixed shapes"""
    aux_loss_coeff: Coefficient = 0.0
    """Switch load-balancing loss over a rank's micro-batch, so it depends on micro_batch_size"""
    sequence_aux_loss_coeff: Coefficient = 0.0
    """the same loss over each sequence, which no layout changes"""
    router_bias_update_rate: Coefficient = 0.0
    """step of each expert's bias in the choice of experts, towards an even load; 0 moves none"""
    router_biases: bool = False
    """keep a bias per expert where no step moves it, as of weights that have them"""
    z_loss_coeff: Coefficient = 0.0
    """mean square of the router's log-sum-exp"""

    @property
    def has_router_biases(self) -> bool:
        """True where the choice of experts has a bias for each expert."""
        return self.router_biases or self.router_bias_update_rate > 0.0

    @property
    def norms_outputs(self) -> bool:
        """True where attention's and the MLP's outputs have norms ahead of the residual add."""
        return self.norm_order in ("sandwich", "after")

    @property
    def norms_per_block(self) -> int:
        return 4 if self.norm_order == "sandwich" else self.parallel_norms

    @property
    def has_norm_bias(self) -> bool:
        return self.norm == "layernorm" and self.norm_bias is not False

    @property
    def has_embedding_norm(self) -> bool:
        return self.embedding_norm or self.norm_order == "post"

    def has_attention_norm(self, layer: int) -> bool:
        """True where a layer, numbered over all stages, has a norm ahead of its attention or, with
        norm order "post", after the add."""
        return self.norm_order != "after" and (layer > 0 or self.first_attention_norm)

    @property
    def has_out_bias(self) -> bool:
        return self.bias if self.out_bias is None else self.out_bias

    @property
    def has_mlp_bias(self) -> bool:
        return self.bias if self.mlp_bias is None else self.mlp_bias

    @property
    def is_gated(self) -> bool:
        """True where an MLP's first GEMM has a gate column for each column of the inner width."""
        return self.activation in GATED

    @property
    def activation_clamp(self) -> tuple[float, float]:
        """(limit, alpha) of swiglu_clamped."""
        return self.activation_limit, self.activation_alpha

    @property
    def up_factor(self) -> int:
        """The width of an MLP's first GEMM over the inner width."""
        return 2 if self.is_gated else 1

    def layer_window(self, layer: int) -> int:
        """The window of a layer, numbered over all stages; 0 where its queries see all."""
        letters = self.window_pattern or "L"
        return self.window if letters[layer % len(letters)] == "L" else 0

    def has_experts(self, layer: int) -> bool:
        """Says whether a layer, numbered over all stages, has experts."""
        return self.num_experts > 0 and layer >= self.first_dense_layers

    @property
    def of_first_layers(self) -> "ModelConfig":
        """The dense model whose blocks are the first ones of this mixture."""
        no_experts = dict.fromkeys(("num_experts", "top_k", "first_dense_layers"), 0)
        widths = dict.fromkeys(("moe_ffn_hidden_size", "shared_expert_ffn_hidden_size"), 0)
        return self.model_copy(update=no_experts | widths | {"shared_expert_gate": False})

    @property
    def rotary_dim(self) -> int:
        """The dimensions of a head that rotate, where its layer does."""
        return self.mla.rope_dim if self.mla else int(self.head_dim * self.rotary_fraction)

    @property
    def value_dim(self) -> int:
        """The width of a value head; of a query or key head it is head_dim."""
        return self.mla.value_dim if self.mla else self.head_dim

    @property
    def padded_head_dim(self) -> int:
        """The width at which attention's kernels see queries, keys and values."""
        return max(self.head_dim, self.value_dim)

    @property
    def rotating_share(self) -> float:
        """The share of the layers that rotate queries and keys."""
        return sum(map(self.layer_rotates, range(self.num_layers))) / self.num_layers

    @property
    def copies_of_heads(self) -> float:
        """How often a layer writes queries and keys anew, on average: normalised, and rotated."""
        return self.rotating_share + (self.qk_norm != "none")

    def layer_rotates(self, layer: int) -> bool:
        """True where a layer, numbered over all stages, rotates its queries and keys."""
        letters = self.rope_pattern or "R"
        return self.position == "rope" and letters[layer % len(letters)] == "R"

    @property
    def dense_ffn_hidden_size(self) -> int:
        """The inner width of the MLP that every token visits, which is the shared expert of a
        mixture; 0: none."""
        return self.shared_expert_ffn_hidden_size if self.num_experts else self.ffn_hidden_size

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, values: Any) -> Any:
        return with_model_defaults(values) if isinstance(values, dict) else values


def with_model_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Fills in the model section's defaults: its architecture's and the derived ones."""
    kind = values.get("architecture", "gpt")
    filled = (ARCHITECTURES.get(kind, {}) if isinstance(kind, str) else {}) | values
    if filled.get("head") in CLASSIFIERS:
        filled |= {"tie_embeddings": False, "sentence_order": False} | values
    if filled.get("head") == "classification":
        filled.setdefault("num_labels", 2)
    heads, hidden = filled.get("num_heads"), filled.get("hidden_size")
    if isinstance(filled.get("mla"), dict):
        with suppress(ValidationError):  # which is reported with the others
            mla = Mla.model_validate(filled["mla"])
            filled.setdefault("head_dim", mla.nope_dim + mla.rope_dim)
    if type(heads) is int and heads > 0:
        filled.setdefault("num_kv_heads", heads)
    if type(heads) is int and type(hidden) is int and heads > 0 and hidden % heads == 0:
        filled.setdefault("head_dim", hidden // heads)
    if type(hidden) is int and filled.get("activation") not in GATED:
        filled.setdefault("ffn_hidden_size", 4 * hidden)
    if filled.get("num_experts"):
        if width := filled.get("moe_ffn_hidden_size"):
            filled.setdefault("ffn_hidden_size", width)  # of no layer
        filled.setdefault("moe_ffn_hidden_size", filled.get("ffn_hidden_size", 0))
    return filled
