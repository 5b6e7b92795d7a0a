"""Defines the run config: frozen pydantic sections whose field descriptions are the help texts.

A config is a TOML file or a preset's name, with `section.field=value` overrides. Loading reports
every problem of every section at once; the cross-field rules are in `rules.py`.
"""

from collections.abc import Mapping
from math import isqrt, lcm
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from mtcli.core.config.fields import (
    AnyOf,
    Fraction,
    Int,
    PathText,
    Positive,
    Ranks,
    Real,
    Section,
    Whole,
)
from mtcli.core.config.model import ModelConfig, RopeScaling
from mtcli.core.config.nameable import CHAT_FILE
from mtcli.core.config.sync import DECENTRALIZED, SyncConfig
from mtcli.core.config.untrusted import read_untrusted, shown

RACE_TOKENS, RACE_CHOICES = 512, 4  # at most of a choice with its article, and of a question
# What reads labelled data, by its format; the others are read by more than one head.
HEAD_OF_FORMAT = {"race": "multiple_choice", "classification": "classification"}
SAVING_SHARE = 0.01  # of a run's time, that saves by time may take at most
LOWEST_LOSS_SCALE = 1.0  # below which a dynamic one does not fall; Megatron-LM's --min-loss-scale

Tokens = Annotated[Int, Field(ge=0, le=10**18)]
Rate = Annotated[Real, Field(ge=0.0, le=1e38)]  # as far as float32 goes
TrustRatio = Annotated[Real, Field(ge=0.0, le=1e6)]
Epsilon = Annotated[Real, Field(ge=1e-30, le=1.0)]
Decay = Annotated[Real, Field(ge=0.0, le=100.0)]
StoredDtype = Literal["fp32", "bf16", "int8"]  # of weights that float32 activations multiply
Fp8Scaling = Literal["rowwise", "blockwise", "tensorwise"]
OptimizerName = Literal["adamw", "lamb", "sgd", "muon"]
Coefficient = Annotated[Real, Field(ge=-1000.0, le=1000.0)]
Triple = tuple[Coefficient, Coefficient, Coefficient]
NsSchedule = Literal["jordan", "quintic5", "polar_express"]
Schedule = Literal["constant", "linear", "cosine", "wsd"]
LossOn = Literal["assistant", "last", "all"]


def _listed(value: Any) -> Any:
    """Wraps a single text in a list."""
    return [value] if isinstance(value, str) else value


Sources = Annotated[
    tuple[PathText, ...],
    BeforeValidator(_listed, json_schema_input_type=str | tuple[PathText, ...]),
]


def _lines(value: Any) -> Any:
    """Reads a file's lines where a text names one; blank ones are left out."""
    if not isinstance(value, str):
        return value
    try:
        lines = read_untrusted(value).decode().splitlines()
    except (OSError, ValueError):
        raise PydanticCustomError(
            "no_file", "{text} is no file of texts", {"text": shown(value)}
        ) from None
    return [line for line in lines if line.strip()]


Texts = Annotated[
    tuple[str, ...], BeforeValidator(_lines, json_schema_input_type=str | tuple[str, ...])
]


class ParallelConfig(Section):
    """The layout: world = dp*cp*tp*pp for attention and edp*ep*etp*pp for experts (folding)."""

    tp: Ranks = 1
    """tensor parallel size; divides num_heads, and divides num_kv_heads or is a multiple of it"""
    tp_mode: Literal["1d", "2d"] = "1d"
    """1d is Megatron-LM's; 2d is Optimus', on a grid of tp ranks"""
    tp_rows: Whole = 0
    """rows of 2d's grid of tp ranks, which shard the batch; 1 is Megatron-LM's layout [sqrt(tp)]"""
    sequence_parallel: bool = True
    """norms, dropout and residuals have 1/tp of the tokens; 2d always shards sequences, columns"""
    tp_overlap: bool = True
    """on a GPU, 1d's collectives travel beside the GEMMs of their layers; fp8 and compile do not"""
    cp: Ranks = 1
    """context parallel size"""
    cp_mode: Literal["ring", "all_gather", "a2a"] = "ring"
    """how context parallel attention gets other ranks' keys and values"""
    pp: Ranks = 1
    """pipeline parallel size"""
    vpp: Annotated[Int, Field(ge=1, le=10_000)] = 1
    """model chunks per pipeline rank"""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """order of forwards and backwards"""
    stage_layers: tuple[Whole, ...] = ()
    """layers of each of the pp*vpp stages [num_layers / (pp*vpp)]"""
    ep: Ranks = 1
    """expert parallel size"""
    etp: Ranks = 1
    """tensor parallel size inside an expert"""
    dispatcher: Literal["all_to_all", "all_gather"] = "all_to_all"
    """how tokens reach their experts: each to its own ranks, or all to all of them"""
    zero: Literal[0, 1, 3] = 0
    """0 replicates the optimizer, 1 shards it over dp, 3 shards parameters too (FSDP2)"""
    recompute: Literal["none", "selective", "full"] = "none"
    """activations computed again in the backward pass"""
    bucket_mib: Annotated[Real, Field(ge=1e-6, le=1e6)] = 25.0
    """gradients are reduced in buckets of this many MiB"""

    @property
    def grid_rows(self) -> int:
        """The rows of the grid of tp ranks: 1 in one dimension, and where tp makes no grid."""
        if self.tp_mode == "1d":
            return 1
        rows = self.tp_rows or isqrt(self.tp)
        columns = self.tp // rows if self.tp_rows else rows
        return rows if rows * columns == self.tp else 1

    @property
    def makes_no_grid(self) -> bool:
        """True where tp_mode = "2d" asks for a grid that the tp ranks do not make."""
        return self.tp_mode == "2d" and self.grid_rows == 1 < self.tp and self.tp_rows != 1

    @property
    def smallest_world(self) -> int:
        """The fewest ranks that hold both grids: pp * lcm(tp * cp, ep * etp)."""
        return self.pp * lcm(self.tp * self.cp, self.ep * self.etp)

    def most_replicas(self, world: int) -> int:
        """Returns the most copies of the model that `world` ranks can hold."""
        return max(1, world // self.smallest_world)


class BatchConfig(Section):
    """Sizes of a step, in sequences and tokens."""

    seq_len: Positive = 1024
    """tokens of a sequence [the smaller of 1024 and max_seq_len]"""
    micro_batch_size: Positive = 1
    """sequences of one unit of pipeline work"""
    global_batch_size: Positive = 8
    """sequences of one optimizer step, over all ranks"""

    @property
    def tokens_per_step(self) -> int:
        """The tokens of one optimizer step, over all ranks."""
        return self.global_batch_size * self.seq_len

    def num_micro_batches(self, shards: int) -> int:
        """Returns the micro-batches of one step on each of the ranks that shard the batch."""
        return self.global_batch_size // (self.micro_batch_size * shards)


class OtherConfig(Section):
    """AdamW beside Muon: of embeddings, heads, norms, biases, routers and sinks."""

    lr: Rate | None = None
    """peak learning rate; its curve is Muon's times lr / optimizer.lr [optimizer.lr]"""
    betas: tuple[Fraction, Fraction] | None = None
    """decay of the first and second moments [optimizer.betas]"""
    eps: Epsilon | None = None
    """added to the square root of the second moment [optimizer.eps]"""
    weight_decay: Decay | None = None
    """decoupled; not of biases and norms [optimizer.weight_decay]"""


class GroupConfig(Section):
    """Parameters with a learning rate and weight decay of their own; a parameter is of the first
    group that matches it."""

    match: tuple[str, ...]
    """parameters by checkpoints' names, such as "*.router.*", as train.freeze has them"""
    lr_scale: Annotated[Real, Field(ge=0.0, le=1e6)] = 1.0
    """times the learning rate, whatever its schedule"""
    weight_decay: Decay | None = None
    """decoupled; not of biases and norms [optimizer.weight_decay, or optimizer.other's]"""


# Defaults of the fields below that an optimizer's name says, each of which may be set.
OF_OPTIMIZER: dict[str, dict[str, Any]] = {"muon": {"momentum": 0.95, "nesterov": True}}


class OptimizerConfig(Section):
    """The optimizer and its learning-rate curve, a pure function of the step."""

    name: OptimizerName = "adamw"
    """update rule; lamb has trust ratios, for large batches; muon orthogonalises matrices' steps"""
    lr: Rate = 3e-4
    """peak learning rate"""
    min_lr: Rate = 0.0
    """learning rate of the decay's last step [with train.init: a tenth of lr]"""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """decay of the first and second moments"""
    momentum: Fraction = 0.0
    """sgd: decay of the sum of gradients; muon: of their mean [muon: 0.95]"""
    nesterov: bool = False
    """sgd, muon: Nesterov's momentum, which looks one step ahead [muon: true]"""
    ns_steps: Annotated[Int, Field(ge=1, le=100)] = 5
    """muon: iterations of Newton-Schulz, which orthogonalise a matrix"""
    ns_coefficients: Annotated[NsSchedule | Triple, AnyOf] = "jordan"
    """muon: the polynomial a x + b x^3 + c x^5 of each iteration, by name or as [a, b, c]"""
    scale: Literal["match_adamw", "spectral"] = "match_adamw"
    """muon: a step is times 0.2 sqrt(max(rows, columns)), or times sqrt(max(1, rows / columns))"""
    muon_split_heads: bool = False
    """muon: every query, key and value head is a matrix of its own"""
    other: OtherConfig | None = None
    """AdamW of the parameters that muon leaves"""
    group: tuple[GroupConfig, ...] = ()
    """parameters with a learning rate and weight decay of their own"""
    eps: Epsilon = 1e-8
    """added to the square root of the second moment"""
    weight_decay: Decay = 0.1
    """decoupled, with sgd added to gradients; not of biases and norms (one dimension)"""
    trust_bounds: tuple[TrustRatio, TrustRatio] = (0.01, 10.0)
    """lamb: the least and the largest trust ratio, of a parameter's norm to its step's"""
    clip: Annotated[Real, Field(ge=0.0, le=1e9)] = 1.0
    """largest global gradient norm; 0 does not clip"""
    schedule: Schedule = "cosine"
    """shape of the decay after the warm-up"""
    warmup_steps: Whole = 0
    """steps of linear warm-up from 0"""
    decay_steps: Whole = 0
    """steps of the decay after the warm-up, of wsd at the end; may exceed the run [all left]"""

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("name"), str):
            return values
        return OF_OPTIMIZER.get(values["name"], {}) | values

    @property
    def implied(self) -> set[str]:
        """The fields whose values follow from `name`. A written config leaves them out, so that
        another name brings its own."""
        usual = OF_OPTIMIZER.get(self.name, {})
        fields = {field for defaults in OF_OPTIMIZER.values() for field in defaults}
        default = {field: type(self).model_fields[field].default for field in fields} | usual
        same = {field for field in fields if getattr(self, field) == default[field]}
        return same | ({"group"} if not self.group else set())

    def steps_of_decay(self, steps: int) -> int:
        """Returns the steps of the decay in a run of some steps: the given number, or all that the
        warm-up leaves."""
        if self.schedule == "constant":
            return 0
        return self.decay_steps or steps - self.warmup_steps

    @property
    def of_others(self) -> "OptimizerConfig":
        """The AdamW of the parameters that muon leaves: `other`, and this section where it is
        silent."""
        given = self.other.model_dump(exclude_none=True) if self.other else {}
        return self.model_copy(update={"name": "adamw"} | given)


class DataConfig(Section):
    """The source of tokens: prefixes of .bin/.idx pairs, alone or as weight, prefix pairs, or the
    files of conversations."""

    format: Literal["tokens", "conversations", "race", "classification"] = "tokens"
    """tokens, conversations [.jsonl .json .parquet, .jsonl.gz], labelled lines, RACE's folders"""
    train: Sources = ()
    """prefixes or text, with or without weights: ["0.7", "data/a", "0.3", "texts"]; or files"""
    valid: Annotated[dict[str, Sources] | Sources, AnyOf] = ()
    """the same for validation, or a table of them by name [the valid part of split]"""
    split: str = "969,30,1"
    """shares of train, valid, test of each dataset [other formats than tokens: 1,0,0]"""
    subset: PathText | None = None
    """a file of `mtcli select`: train on its sequences, with its weights, and on no others"""
    reselect_every: Whole = 0
    """steps after which as many sequences are chosen again, by the run's own weights; 0 never"""
    document_mask: bool = False
    """tokens see only their own document (--reset-attention-mask) [conversations: true]"""
    document_positions: bool = False
    """positions begin again at each document (--reset-position-ids) [conversations: true]"""
    tokenizer: PathText | None = None
    """of text and conversations, a folder, name or train:N [the data's, or train.init's]"""
    chat_template: bool = True
    """conversations: prompts, too, go through the chat template where there is one"""
    loss_on: LossOn = "assistant"
    """conversations: train on the assistant's turns, on the last one of each alone, or on all"""
    skip_bad: bool = False
    """leave bad examples and too long ones out, and count them"""
    seed: Annotated[Int, Field(ge=0, le=2**32 - 1)] | None = None
    """key of the order of the data, and of what is masked in it [seed]"""

    @property
    def valid_sets(self) -> Mapping[str, tuple[str, ...]]:
        """The words of each validation set by name; one without a name where `valid` is no table,
        and without words where it is a part of the training data."""
        return self.valid if isinstance(self.valid, dict) else {"": self.valid}

    @property
    def words_by_field(self) -> dict[str, tuple[str, ...]]:
        """The words of `train` and of each validation set by field, such as data.valid.wiki;
        without what is not set."""
        valid = {f"data.valid.{name}": words for name, words in self.valid_sets.items() if name}
        alone = {"data.train": self.train, "data.valid": self.valid_sets.get("", ())}
        return {field: words for field, words in alone.items() if words} | valid

    @property
    def valid_words(self) -> tuple[str, ...]:
        """The words of all validation sets."""
        return tuple(word for words in self.valid_sets.values() for word in words)


class LoraConfig(Section):
    """Low-rank adapters (arXiv:2106.09685): y = W x + alpha / rank * B A x. A and B are trained and
    saved, and the weights of train.init stay as they are."""

    rank: Annotated[Int, Field(ge=0, le=65536)] = 0
    """rows of A; 0 trains all weights and no adapters"""
    alpha: Annotated[Real, Field(ge=0.0, le=1e6)] = 16.0
    """adapters are scaled by alpha / rank"""
    dropout: Fraction = 0.0
    """of the adapters' input"""
    targets: tuple[str, ...] = ()
    """peft's names: ["q_proj", "experts.up_proj"] or ["all-linear"] [all but routed experts]"""
    modules_to_save: tuple[str, ...] = ()
    """trained whole beside adapters, and saved: ["embed_tokens", "lm_head"], or GPT-2's ["wte"]"""


class TrainConfig(Section):
    """The run: its length and precision, and what is saved and shown."""

    steps: Positive = 100
    """optimizer steps"""
    tokens: Tokens = 0
    """train on so many tokens, which set steps; 0 counts steps"""
    epochs: Annotated[Real, Field(ge=0.0, le=1e6)] = 0.0
    """other formats than tokens: passes over the data, which set steps [1 without steps]"""
    init: PathText | None = None
    """start from these weights, a checkpoint or Hugging Face folder; the flag --init sets it"""
    base: PathText | None = None
    """the weights that adapters of train.init are for, where these have moved; --base sets it"""
    freeze: tuple[str, ...] = ()
    """parameters left as they are, by checkpoints' names: ["embedding", "blocks.0-3.*"]"""
    new_tokens: Texts = ()
    """texts, or a file of one a line: added to the tokenizer of train.init, with rows to train"""
    output: PathText = "runs/run"
    """the run folder"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is cuda where there is one"""
    precision: Literal["fp64", "fp32", "bf16", "fp16", "fp8"] = "fp32"
    """number format; fp8 is for GEMMs, beside bf16. Master weights are fp32 or wider"""
    moments: Literal["fp32", "bf16"] = "fp32"
    """number format of the optimizer's moments; bf16: adamw and muon, betas up to 0.996"""
    ema: Fraction = 0.0
    """decay of an average of the weights, kept in fp32 and saved beside them; 0 keeps none"""
    gradients: Literal["fp32", "bf16"] = "fp32"
    """number format of sums of gradients; bf16: adamw and muon, precision bf16 or fp8"""
    fp8_scaling: Fp8Scaling = "rowwise"
    """fp8: what shares a scale: rows, blocks of 128 (1 by 128 of activations), or whole tensors"""
    loss_scale: Annotated[Real, Field(ge=0.0, le=1e15)] = 0.0
    """fp16: fixed factor on the loss; 0 is dynamic"""
    initial_loss_scale: Annotated[Real, Field(ge=LOWEST_LOSS_SCALE, le=1e15)] = 65536.0
    """fp16: the dynamic loss scale that a run starts from"""
    loss_scale_window: Positive = 1000
    """fp16: steps in a row without overflow after which the loss scale doubles"""
    loss_scale_hysteresis: Positive = 2
    """fp16: overflows since it last doubled from which on each halves the loss scale"""
    matmul: Literal["fast", "strict", "tf32"] = "fast"
    """fast: on CPU, quicker and as accurate as torch's own; strict: torch's; tf32: TF32 on a GPU"""
    compile: bool = False
    """train, sweep and profile through torch.compile; on CPU it needs a C++ compiler"""
    cuda_graphs: bool = False
    """replay a micro-batch's forward and backward as CUDA graphs; dp and tp, no expert capacity"""
    save_every: Whole = 0
    """steps between checkpoints; 0 saves by time, and at the end"""
    save_minutes: Annotated[Real, Field(ge=0.0, le=1e6)] = 30.0
    """minutes from one checkpoint to the next, more where one costs over 1 %; 0 not by time"""
    keep: Whole = 2
    """newest checkpoints kept; 0 keeps all"""
    keep_every: Whole = 0
    """checkpoints of steps that are a multiple of it are kept besides; 0 none"""
    keep_best: Whole = 0
    """evaluations with the lowest losses whose checkpoints are saved and kept besides; 0 none"""
    async_save: bool = True
    """train on while a checkpoint is written from a copy in host memory"""
    eval_every: Whole = 0
    """steps between evaluations on data.valid; 0 never"""
    eval_batches: Positive = 8
    """global batches of an evaluation"""
    patience: Whole = 0
    """the run ends after so many evaluations without a lower loss; 0 never"""
    best_of: str | None = None
    """the validation set by whose loss keep_best and patience go [the mean over sets]"""
    log_every: Positive = 1
    """steps between progress lines and tracker records"""
    timeout: Annotated[Real, Field(ge=0.01, le=1e9)] = 600.0
    """seconds a rank may wait for another before the run ends and says who is missing"""
    debug_collectives: bool = False
    """ranks compare every collective (op, number, shape, dtype, line) before it runs; slow"""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """what happens when a loss or gradient is not finite, once its origin is named"""
    max_skips: Positive = 100
    """skip: batches in a row that may be skipped; after so many the run ends, with exit 1"""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ()
    """experiment trackers; a missing or offline tracker never stops a run"""
    tracker_project: PathText | None = None
    """the trackers' project, or MLflow's experiment [WANDB_PROJECT, or mtcli]"""
    tracker_entity: PathText | None = None
    """wandb: the user or team that the project is of [WANDB_ENTITY]"""
    tracker_name: PathText | None = None
    """the run's name for trackers [WANDB_NAME, or that of the run folder]"""
    tracker_tags: tuple[str, ...] = ()
    """the run's tags for trackers"""

    def seconds_between_saves(self, cost_seconds: float) -> float:
        """Returns the seconds from one save by time to the next: more than `save_minutes` where
        training stood still `cost_seconds` for one, so that saves take SAVING_SHARE at most."""
        return max(60.0 * self.save_minutes, cost_seconds / SAVING_SHARE)


class EvalConfig(Section):
    """A task that is evaluated on the weights of the run; any number of tables."""

    task: str
    """NAME=PATH, FILE.toml=PATH or lm_eval:NAME, as `mtcli eval --task` takes it"""
    every: Positive
    """steps between evaluations"""
    limit: Whole = 0
    """items of each kind; 0 all"""


class PhaseBatch(Section):
    """Sizes of a step from a phase on."""

    seq_len: Positive | None = None
    """batch.seq_len; texts are cut anew, and each source goes on at its tokens [as before]"""
    micro_batch_size: Positive | None = None
    """batch.micro_batch_size [as before]"""
    global_batch_size: Positive | None = None
    """batch.global_batch_size [as before]"""


class PhaseOptimizer(Section):
    """A learning-rate curve that begins with a phase, and ends where the next one begins."""

    lr: Rate | None = None
    """optimizer.lr [as before]"""
    min_lr: Rate | None = None
    """optimizer.min_lr [as before]"""
    schedule: Schedule | None = None
    """optimizer.schedule [as before]"""
    warmup_steps: Whole | None = None
    """optimizer.warmup_steps, of this curve [0]"""
    decay_steps: Whole | None = None
    """optimizer.decay_steps, of this curve [all left]"""


class PhaseData(Section):
    """The sources of tokens from a phase on."""

    train: Sources | None = None
    """data.train; a source that was read before goes on where it was [as before]"""


class PhaseModel(Section):
    """Rotary positions from a phase on, and the length that the model is known by."""

    max_seq_len: Positive | None = None
    """model.max_seq_len, of rotary positions [as before]"""
    rope_theta: Annotated[Real, Field(ge=1.0, le=1e12)] | None = None
    """model.rope_theta [as before]"""
    rope_scaling: RopeScaling | None = None
    """model.rope_scaling [as before]"""


class PhaseConfig(Section):
    """Settings from a number of tokens on, each by its own name; the others stay as before."""

    from_tokens: Annotated[Int, Field(ge=1, le=10**18)]
    """tokens trained on, from which on it holds: at the first step that begins with as many"""
    batch: PhaseBatch | None = None
    optimizer: PhaseOptimizer | None = None
    data: PhaseData | None = None
    model: PhaseModel | None = None


class RunConfig(Section):
    """Everything that decides a run. The same config and seed give the same curve on any layout."""

    seed: Annotated[Int, Field(ge=0, le=2**32 - 1)] = 1234
    """key of initialisation, dropout and, where data.seed is not set, data order"""
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    sync: SyncConfig = SyncConfig()
    data: DataConfig = DataConfig()
    lora: LoraConfig = LoraConfig()
    train: TrainConfig = TrainConfig()
    phase: tuple[PhaseConfig, ...] = ()
    """settings that change after some tokens, in order"""
    eval: tuple[EvalConfig, ...] = ()
    """tasks that are evaluated while the run trains"""

    @property
    def data_seed(self) -> int:
        """The key of the order of the data."""
        return self.seed if self.data.seed is None else self.data.seed

    @property
    def words_by_field(self) -> dict[str, tuple[str, ...]]:
        """The words of the data by field, with those of phases: phase.0.data.train."""
        of_phases = {
            f"phase.{number}.data.train": phase.data.train
            for number, phase in enumerate(self.phase)
            if phase.data and phase.data.train
        }
        return self.data.words_by_field | of_phases

    def validating(self, name: str) -> "RunConfig":
        """Returns the config with one of its validation sets as the only one."""
        data = self.data.model_copy(update={"valid": self.data.valid_sets[name]})
        return self.model_copy(update={"data": data})

    def num_replicas(self, world: int) -> int:
        """Returns the number of copies of the model that may differ on `world` ranks."""
        return self.sync.num_replicas(self.parallel.most_replicas(world))

    @property
    def overlaps_neighbours(self) -> bool:
        """True where decentralized replicas exchange while the step is computed: their messages
        depend on no global gradient norm, and on no gradients that may overflow."""
        free = not self.optimizer.clip and self.train.precision != "fp16"
        return self.sync.method == "awc_dmsgd" or (self.sync.method in DECENTRALIZED and free)

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, values: Any) -> Any:
        for fit in (_fit_head, _fit_conversations, _fit_examples, _fit_sequences, _fit_start):
            values = fit(values)
        return values


def _fit_head(values: Any) -> Any:
    """Sets the encoder head for the data's format, or the format for the head, where only one of
    them is set."""
    match values:
        case {"model": {"head": _}, "data": {"format": _}}:
            return values
        case {
            "model": {"architecture": "bert"},
            "data": {"format": "race" | "classification" as kind},
        }:
            return _with_defaults(values, "model", head=HEAD_OF_FORMAT[kind])
        case {"model": {"head": "classification" | "multiple_choice" as head}}:
            (kind,) = (name for name, reader in HEAD_OF_FORMAT.items() if reader == head)
            return _with_defaults(values, "data", format=kind)
    return values


def _fit_conversations(values: Any) -> Any:
    """Sets the defaults for JSON lines, JSON and Parquet as conversations: packed with document
    masks, nothing held out for validation, and one epoch where no length is set."""
    match values:
        case {"data": {"train": names}} if _are_chats(_listed(names)):
            values = _with_defaults(values, "data", format="conversations")
    match values:
        case {"data": {"format": "conversations"}}:
            packed = {"document_mask": True, "document_positions": True, "split": "1,0,0"}
            return _one_epoch(_with_defaults(values, "data", **packed))
    return values


def _fit_examples(values: Any) -> Any:
    """Sets the defaults for labelled examples: nothing held out for validation, rows for a
    question's four choices, and one epoch where no length is set."""
    match values:
        case {"data": {"format": "race" | "classification"}}:
            values = _one_epoch(_with_defaults(values, "data", split="1,0,0"))
    match values:
        case {"data": {"format": "race"}, "model": {"max_seq_len": int(longest)}} if longest > 0:
            size = RACE_CHOICES * min(RACE_TOKENS, longest)
            return _with_defaults(values, "batch", seq_len=size)
    return values


def _fit_sequences(values: Any) -> Any:
    """Defaults the sequence length to the model's longest, up to 1024."""
    match values:
        case {"model": {"max_seq_len": int(longest)}} if 0 < longest < 1024:
            return _with_defaults(values, "batch", seq_len=longest)
    return values


def _fit_start(values: Any) -> Any:
    """Defaults the end of the decay to a tenth of lr in runs that start from weights: these may
    have a step or two, and one with a learning rate of 0 teaches nothing."""
    match values:
        case {"train": {"init": str()}}:
            peak = OptimizerConfig.model_fields["lr"].default
            match values:
                case {"optimizer": {"lr": int(lr) | float(lr)}}:
                    peak = lr
            return _with_defaults(values, "optimizer", min_lr=peak / 10)
    return values


def _one_epoch(values: dict[str, Any]) -> dict[str, Any]:
    """Adds an epoch to tables that set no length of the run."""
    match values:
        case {"train": {"steps": _} | {"epochs": _}}:
            return values
    return _with_defaults(values, "train", epochs=1.0)


def _with_defaults(values: dict[str, Any], section: str, **defaults: Any) -> dict[str, Any]:
    """Adds defaults to a section, where that is a table and does not set them."""
    given = values.get(section, {})
    return values | {section: defaults | given} if isinstance(given, dict) else values


def _are_chats(names: Any) -> bool:
    texts = names if isinstance(names, list | tuple) else ()
    return bool(texts) and all(isinstance(t, str) and CHAT_FILE.search(t) for t in texts)
