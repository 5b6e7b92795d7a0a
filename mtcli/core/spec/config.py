"""The run config: frozen pydantic sections whose field descriptions are the help texts.

A config is a TOML file or a preset's name, with `section.field=value` overrides on top. Loading
reports every problem of every section at once; the cross-field rules are in `check.py`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(ge=0)]

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


class Section(BaseModel):
    """A frozen config section that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class RopeScaling(Section):
    """Llama 3's frequency scaling of rotary positions."""

    factor: Annotated[float, Field(ge=1.0)] = 8.0
    """how many times longer the context is than the one trained first"""
    low_freq_factor: Annotated[float, Field(gt=0.0)] = 1.0
    """wavelengths longer than original_max_seq_len / this are divided by factor"""
    high_freq_factor: Annotated[float, Field(gt=0.0)] = 4.0
    """wavelengths shorter than original_max_seq_len / this are kept"""
    original_max_seq_len: PositiveInt = 8192
    """the context length trained first"""


class ModelConfig(Section):
    """Shapes of the transformer. Sizes are exact: nothing is rounded silently."""

    architecture: Literal["gpt", "llama", "mixtral", "qwen2-moe"] = "gpt"
    """family, which sets the defaults of the fields below"""
    num_layers: PositiveInt
    """transformer blocks"""
    hidden_size: PositiveInt
    """width of the residual stream"""
    num_heads: PositiveInt
    """attention (query) heads"""
    num_kv_heads: PositiveInt
    """key and value heads; fewer than num_heads is grouped-query attention [num_heads]"""
    head_dim: PositiveInt
    """width of a head [hidden_size / num_heads]"""
    ffn_hidden_size: PositiveInt
    """inner width of the MLP [4 * hidden_size for gpt]"""
    vocab_size: PositiveInt
    """number of token ids; padding is derived from tp and never leaks"""
    max_seq_len: PositiveInt
    """longest sequence of learned positions; also the longest context in eval"""
    activation: Literal["gelu", "gelu_tanh", "swiglu"]
    """MLP activation"""
    norm: Literal["layernorm", "rmsnorm"]
    """normalisation before attention, MLP and head"""
    norm_eps: Annotated[float, Field(gt=0.0)]
    """added to the variance"""
    position: Literal["learned", "rope"]
    """position information"""
    rope_theta: Annotated[float, Field(gt=0.0)] = 10000.0
    """base of the rotary frequencies"""
    rope_scaling: RopeScaling | None = None
    """Llama 3's scaling of the rotary frequencies"""
    tie_embeddings: bool
    """the head shares the token embedding's weight"""
    bias: bool
    """biases of the linear layers"""
    qkv_bias: bool
    """bias of the query, key and value projection"""
    dropout: Fraction = 0.0
    """after the embedding, attention and MLP outputs"""
    attention_dropout: Fraction = 0.0
    """of attention probabilities"""
    init_std: Annotated[float, Field(gt=0.0)] = 0.02
    """standard deviation of initial weights; before a residual add, over sqrt(2 * num_layers)"""
    num_experts: Count = 0
    """experts of each MLP; 0 is a dense model"""
    top_k: Count = 0
    """experts that each token visits"""
    moe_ffn_hidden_size: Count = 0
    """inner width of an expert [ffn_hidden_size]"""
    shared_expert_ffn_hidden_size: Count = 0
    """inner width of the shared expert; 0 is none"""
    shared_expert_gate: bool = False
    """the shared expert's output is scaled by a sigmoid gate"""
    normalize_top_k: bool = True
    """the chosen experts' weights are rescaled to sum to 1"""
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    """turns router logits into experts' weights, in float32"""
    router_groups: PositiveInt = 1
    """experts are chosen within the best of this many equal groups of experts"""
    router_top_groups: PositiveInt = 1
    """how many of the groups a token may use"""
    capacity_factor: NonNegative = 0.0
    """an expert takes at most ceil(tokens * top_k / num_experts * this); 0 drops nothing"""
    drop_policy: Literal["probs", "position"] = "probs"
    """which tokens an expert over capacity keeps: the likeliest, or the earliest"""
    drop_scope: Literal["full_sequence", "sub_sequence"] = "full_sequence"
    """tokens that share a capacity: a sequence's, on any layout, or those that a rank holds"""
    pad_to_capacity: bool = False
    """every expert gets exactly its capacity, filled up with zeros: fixed shapes"""
    aux_loss_coeff: NonNegative = 0.0
    """Switch load-balancing loss over a rank's micro-batch, so it depends on micro_batch_size"""
    sequence_aux_loss_coeff: NonNegative = 0.0
    """the same loss over each sequence, which no layout changes"""
    z_loss_coeff: NonNegative = 0.0
    """mean square of the router's log-sum-exp"""

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, values: Any) -> Any:
        return with_model_defaults(values) if isinstance(values, dict) else values


def with_model_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the model section with its architecture's and its derived defaults filled in."""
    filled = ARCHITECTURES.get(values.get("architecture", "gpt"), {}) | values
    heads, hidden = filled.get("num_heads"), filled.get("hidden_size")
    if isinstance(heads, int):
        filled.setdefault("num_kv_heads", heads)
    if isinstance(heads, int) and isinstance(hidden, int) and heads > 0 and hidden % heads == 0:
        filled.setdefault("head_dim", hidden // heads)
    if isinstance(hidden, int) and filled.get("activation") != "swiglu":
        filled.setdefault("ffn_hidden_size", 4 * hidden)
    if filled.get("num_experts"):
        filled.setdefault("moe_ffn_hidden_size", filled.get("ffn_hidden_size", 0))
    return filled


class ParallelConfig(Section):
    """The layout: world = dp*cp*tp*pp for attention and edp*ep*etp*pp for experts (folding)."""

    tp: PositiveInt = 1
    """tensor parallel size"""
    tp_mode: Literal["1d"] = "1d"
    """1d is Megatron-LM's"""
    sequence_parallel: bool = True
    """norms, dropout and residuals hold 1/tp of the tokens"""
    cp: PositiveInt = 1
    """context parallel size"""
    cp_mode: Literal["ring", "all_gather", "a2a"] = "ring"
    """how context parallel attention sees other ranks' keys and values"""
    pp: PositiveInt = 1
    """pipeline parallel size"""
    vpp: PositiveInt = 1
    """model chunks per pipeline rank"""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """order of forwards and backwards"""
    stage_layers: tuple[Count, ...] = ()
    """layers of each of the pp*vpp stages [num_layers / (pp*vpp)]"""
    ep: PositiveInt = 1
    """expert parallel size"""
    etp: PositiveInt = 1
    """tensor parallel size inside an expert"""
    dispatcher: Literal["all_to_all", "all_gather"] = "all_to_all"
    """how tokens reach their experts: each to its own ranks, or all to all of them"""
    zero: Literal[0, 1, 3] = 0
    """0 replicates the optimizer, 1 shards it over dp, 3 shards parameters too (FSDP2)"""
    recompute: Literal["none", "selective", "full"] = "none"
    """activations computed again in the backward pass"""
    bucket_mib: Annotated[float, Field(gt=0.0)] = 25.0
    """gradients are reduced in buckets of this many MiB"""


class BatchConfig(Section):
    """Sizes of a step, in sequences and tokens."""

    seq_len: PositiveInt = 1024
    """tokens of a sequence [the smaller of 1024 and max_seq_len]"""
    micro_batch_size: PositiveInt = 1
    """sequences of one unit of pipeline work"""
    global_batch_size: PositiveInt = 8
    """sequences of one optimizer step, over all ranks"""


class OptimizerConfig(Section):
    """The optimizer and its learning-rate curve, a pure function of the step."""

    name: Literal["adamw"] = "adamw"
    """update rule"""
    lr: NonNegative = 3e-4
    """peak learning rate"""
    min_lr: NonNegative = 0.0
    """learning rate at the end of the decay"""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """decay of the first and second moments"""
    eps: Annotated[float, Field(gt=0.0)] = 1e-8
    """added to the square root of the second moment"""
    weight_decay: NonNegative = 0.1
    """decoupled; not applied to biases, norms (tensors of one dimension)"""
    clip: NonNegative = 1.0
    """largest global gradient norm; 0 does not clip"""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """shape of the decay after the warm-up"""
    warmup_steps: Count = 0
    """steps of linear warm-up from 0"""
    decay_steps: Count = 0
    """steps of the decay after the warm-up; for wsd those of its final decay [all that is left]"""


class DataConfig(Section):
    """Where tokens come from: prefixes of .bin/.idx pairs, alone or as weight, prefix pairs."""

    train: tuple[str, ...] = ()
    """prefixes, or weights and prefixes in turn: ["0.7", "data/a", "0.3", "data/b"]"""
    valid: tuple[str, ...] = ()
    """the same for validation [the valid part of split]"""
    split: str = "969,30,1"
    """shares of train, valid and test where one set of prefixes serves all three"""


class TrainConfig(Section):
    """The run: how long, in which precision, what is saved and shown."""

    steps: PositiveInt = 100
    """optimizer steps"""
    output: str = "runs/run"
    """the run folder"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is cuda where there is one"""
    precision: Literal["fp64", "fp32", "bf16"] = "fp32"
    """of weights and activations; reductions and the optimizer stay in fp32 (fp64 in fp64)"""
    matmul: Literal["fast", "strict"] = "fast"
    """fast lets fp32 products use a quicker routine that has passed a start-up accuracy check"""
    save_every: Count = 0
    """steps between checkpoints; 0 saves at the end only"""
    keep: Count = 2
    """checkpoints kept; 0 keeps all"""
    eval_every: Count = 0
    """steps between evaluations on data.valid; 0 never"""
    eval_batches: PositiveInt = 8
    """global batches of an evaluation"""
    log_every: PositiveInt = 1
    """steps between progress lines and tracker records"""
    timeout: Annotated[float, Field(gt=0.0)] = 600.0
    """seconds a collective may take before the run is stopped"""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """what happens when a loss or gradient is not finite, once its origin is named"""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """experiment trackers; a missing or offline tracker never stops a run"""


class RunConfig(Section):
    """Everything that decides a run. The same config and seed give the same curve on any layout."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1234
    """key of initialisation, dropout and data order"""
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()

    @model_validator(mode="before")
    @classmethod
    def _fit_sequences(cls, values: Any) -> Any:
        """Sequences are as long as the model takes, up to 1024, where nothing is said."""
        match values:
            case {"model": {"max_seq_len": int(longest)}} if 0 < longest < 1024:
                batch = values.get("batch", {})
                if isinstance(batch, dict):
                    return values | {"batch": {"seq_len": longest} | batch}
        return values
