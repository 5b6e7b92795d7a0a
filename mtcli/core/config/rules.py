"""Checks the cross-field rules: one small function per rule, all problems at once.

This module has the rules that no layout changes, `layout_rules.py` those of layouts. A training run
must keep all of them; forward passes, of evaluation and generation, keep fewer and two of their
own.
"""

import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache, partial
from operator import attrgetter
from typing import Any, NamedTuple

from mtcli.core.config.blend import read_blend, read_split
from mtcli.core.config.errors import MtcliError, Problem, collect_errors, wrong
from mtcli.core.config.fields import divides, divisors, either, listing
from mtcli.core.config.fp8 import MULTIPLE, listed, narrow_layers, weight_sizes
from mtcli.core.config.layout_rules import (
    LAYOUT_RULES,
    Rule,
    context_divides,
    experts_see_tokens_once,
    grids_shard_tokens,
    rows_share_micro_batches,
)
from mtcli.core.config.loading import Table, read_config, validate, with_overrides
from mtcli.core.config.lora import ALL_LINEAR, adapts_experts, lora_targets, saved_modules
from mtcli.core.config.model import ARCHITECTURES, CLASSIFIERS, OF_EXPERTS, OF_ROPE, ModelConfig
from mtcli.core.config.phases import PhaseSpan, begins_curve, phases_of
from mtcli.core.config.schema import HEAD_OF_FORMAT, ParallelConfig, RunConfig
from mtcli.core.config.suggest import nearest_hint
from mtcli.core.config.sync_rules import READ_BY, SYNC_RULES
from mtcli.core.config.untrusted import shown

MAX_ELEMENTS = 10**15  # of a tensor: its bytes are far from overflowing
LARGEST_NARROW_DECAY = 1 - 2**-8  # of a mean that is kept in bfloat16
SET_NAME = re.compile(r"[A-Za-z0-9_-]+")
# What a forward pass reads, and the micro-batch that a layout's rules are about.
FORWARD = ("model.", "parallel.", "train.", "batch.micro_batch_size")
SHAPES = ("model", "parallel", "batch")  # sections that decide which layouts are legal


def problems(config: RunConfig, world: int, without: Collection[Rule] = ()) -> list[Problem]:
    """Lists the problems of `config` on `world` ranks, without some rules."""
    return _broken([rule for rule in RULES if rule not in without], config, world)


def lasting_problems(config: RunConfig) -> list[Problem]:
    """Lists the problems of `config` that it has on any layout."""
    bare = config.model_copy(update={"parallel": ParallelConfig()})
    return _broken([rule for rule in RULES if rule not in LAYOUT_RULES], bare, 1)


def load_checked(source: str | Table, overrides: Sequence[str], world: int) -> RunConfig:
    """Loads the run config of a TOML file, run folder or preset, legal on `world` ranks.

    Raises MtcliError with every problem at once: unknown keys, illegal values and broken rules.
    """
    config, load_problems = read_config(source, overrides)
    return require(config, world, *ENGINE_RULES, load_problems=load_problems)


def require(
    config: RunConfig | None,
    world: int,
    *more: Rule,
    without: Collection[Rule] = (),
    load_problems: Sequence[Problem] = (),
) -> RunConfig:
    """Returns the config. Raises MtcliError with `load_problems` and every rule it breaks."""
    if config is None:
        raise MtcliError(*load_problems)
    rules = [rule for rule in (*RULES, *more) if rule not in without]
    if broken := [*load_problems, *_broken(rules, config, world)]:
        raise refusal(config, world, broken, *more, without=without)
    return config


def refusal(
    config: RunConfig,
    world: int | None,
    all_problems: Sequence[Problem],
    *more: Rule,
    without: Collection[Rule] = (),
) -> MtcliError:
    """Builds the error of `all_problems`: those of loading, and broken rules.

    Where another layout would cure some of them, the hint has the nearest legal ones on `world`
    ranks, or on as many as each needs where that is None.
    """
    ranks = world or config.parallel.smallest_world
    curable = _broken((*LAYOUT_RULES, *more), config, ranks)
    lasting = [p for p in problems(config, ranks) if p not in curable]
    misread = [p for p in all_problems if p not in curable and p not in lasting]
    if not curable or any(p.field.startswith(SHAPES) for p in misread):
        return MtcliError(*all_problems)

    def legal(candidate: RunConfig, world: int) -> bool:
        rules = (rule for rule in (*RULES, *more) if rule not in (*without, *OF_DATA))
        broken = (problem for rule in rules for problem in rule(candidate, world))
        return all(problem in lasting for problem in broken)

    # The layout's come last, ahead of the layouts that would cure them.
    ordered = sorted(all_problems, key=curable.__contains__)
    return MtcliError(*ordered, hint=nearest_hint(config, world, legal))


def forward_config(model: ModelConfig, overrides: Sequence[str], world: int) -> RunConfig:
    """Builds the config of forward passes of any shape: no sequence parallelism, one sequence a
    rank.

    Raises MtcliError with all problems of the overrides and their layout.
    """
    base = {
        "model": model.model_dump(exclude_none=True),
        "parallel": {"sequence_parallel": False},
        "batch": {"seq_len": model.max_seq_len, "global_batch_size": world},
    }
    config, load_problems = validate(with_overrides(base, overrides))
    more = (*ENGINE_RULES, _whole_sequences)
    return require(config, world, *more, without=NOT_OF_FORWARD_PASSES, load_problems=load_problems)


def require_forward(overrides: Iterable[str]) -> None:
    """Raises MtcliError for overridden fields that no forward pass reads."""
    fields = (override.partition("=")[0].strip() for override in overrides)
    if unread := [field for field in fields if not field.startswith(FORWARD)]:
        raise MtcliError(*map(of_training, unread))


def of_training(field: str) -> Problem:
    """Builds the problem of an overridden field that this command does not read."""
    what = "it is of a training run, and has no effect here"
    return Problem(what, f"leave --set {field} out", field)


def require_causal(path: str, model: ModelConfig) -> None:
    """Raises MtcliError where a checkpoint does not predict next tokens, or is not causal."""
    if model.head != "lm":
        message = f"{path} has head={model.head!r}, and predicts no next token"
        raise wrong(message, "mtcli eval takes it: --task mlm=, race= or classification=PATH")
    if not model.causal:
        message = f"{path} has causal=false: its tokens see the ones they would predict"
        hint = "generate and the tasks of eval take models trained with model.causal=true"
        raise wrong(message, hint, "model.causal")


def require_stored(weights: str | None, config: RunConfig, device: str) -> None:
    """Raises MtcliError where weights cannot be kept in a dtype of their own;
    `device` is cpu or another one."""
    if weights in (None, "fp32"):
        return
    problems, said = [], f"weights={weights} "
    if (precision := config.train.precision) != "fp32":
        message = f"{said}are multiplied by float32 activations, and train.precision={precision!r}"
        problems.append(
            Problem(message, "leave --weights or --set train.precision out", "--weights")
        )
    if config.parallel.grid_rows > 1:
        message = f"{said}have no panels, and a grid of {config.parallel.tp} ranks multiplies those"
        problems.append(Problem(message, "parallel.tp_mode=1d", "--weights"))
    if device != "cpu":
        hint = "--device cpu, or --set train.precision=bf16"
        problems.append(
            Problem(f"{said}are of a CPU, and the device is {device}", hint, "--weights")
        )
    if problems:
        raise MtcliError(*problems)


def _broken(rules: Iterable[Rule], config: RunConfig, world: int) -> list[Problem]:
    return [problem for rule in rules for problem in rule(config, world)]


def _tensors_can_be_counted(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks the largest weight by a formula, as this rule runs for every candidate layout."""
    m = config.model
    rows = {
        "vocab_size": m.vocab_size,
        "max_seq_len": m.max_seq_len,
        "ffn_hidden_size": 2 * m.ffn_hidden_size,
        "num_heads * head_dim": (m.num_heads + 2 * m.num_kv_heads) * m.head_dim,
        "num_experts * moe_ffn_hidden_size": 2 * m.num_experts * m.moe_ffn_hidden_size,
        "shared_expert_ffn_hidden_size": 2 * m.shared_expert_ffn_hidden_size,
    }
    name = max(rows, key=lambda name: rows[name])
    if (count := rows[name] * m.hidden_size) > MAX_ELEMENTS:
        message = f"{name} * hidden_size: {count:.3g} elements, of {MAX_ELEMENTS:.0e} at most"
        yield Problem(message, "smaller layers", "model")


def _heads(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that key-value heads divide the heads, and that what rotates is pairs."""
    m = config.model
    if m.num_heads % m.num_kv_heads:
        message = f"num_kv_heads={m.num_kv_heads} does not divide num_heads={m.num_heads}"
        yield Problem(message, listing(divisors(m.num_heads)), "model.num_kv_heads")
    if m.position == "rope" and m.rotary_dim == m.head_dim and m.head_dim % 2:
        message = f"head_dim={m.head_dim} is odd and rotary positions turn pairs"
        yield Problem(message, f"{m.head_dim - 1} or {m.head_dim + 1}", "model.head_dim")


def _pairs_rotate(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that a fraction of a head is pairs of dimensions, and that some layer rotates them."""
    m = config.model
    if m.rotary_fraction != 1.0 and (m.rotary_dim % 2 or not m.rotary_dim):
        dims = f"{m.rotary_dim} of head_dim={m.head_dim} dimensions"
        message = f"rotary_fraction={m.rotary_fraction:g} rotates {dims}, which are no pairs"
        hint = f"a multiple of 2 / head_dim = {2 / m.head_dim:g}"
        yield Problem(message, hint, "model.rotary_fraction")
    if m.position == "rope" and not m.rotating_share:
        message = f"rope_pattern={m.rope_pattern!r}: no layer rotates"
        yield Problem(message, "a pattern with an R", "model.rope_pattern")


def _latents_have_heads(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that multi-head latent attention has no setting of a query, key and value
    projection."""
    m, mla = config.model, config.model.mla
    if mla is None:
        return
    width = mla.nope_dim + mla.rope_dim
    fixed = {
        "position": "rope", "num_kv_heads": m.num_heads, "head_dim": width, "qk_norm": "none",
        "rotary_fraction": 1.0,
    }  # fmt: skip
    for name, value in fixed.items():
        if (given := getattr(m, name)) != value:
            message = f"{name}={given!r} with model.mla, whose heads come from latents"
            yield Problem(
                message, f"{name} = {value!r}, or leave model.{name} out", f"model.{name}"
            )
    if mla.rope_dim % 2:
        message = f"rope_dim={mla.rope_dim} is odd and rotary positions turn pairs"
        hint = f"{mla.rope_dim - 1} or {mla.rope_dim + 1}"
        yield Problem(message, hint, "model.mla.rope_dim")


def _experts_are_whole(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks the counts of experts: those of a token, their groups, the layers without."""
    m = config.model
    if m.top_k > m.num_experts or (m.num_experts and not m.top_k):
        message = f"top_k={m.top_k} of num_experts={m.num_experts} experts"
        hint = f"1 to {m.num_experts}" if m.num_experts else "0 where there are no experts"
        yield Problem(message, hint, "model.top_k")
    if m.num_experts and m.first_dense_layers >= m.num_layers:
        message = f"first_dense_layers={m.first_dense_layers} of num_layers={m.num_layers}"
        hint = f"at most {m.num_layers - 1}, or num_experts = 0"
        yield Problem(f"{message}: no layer has experts", hint, "model.first_dense_layers")
    if m.num_experts:
        yield from divides("model.router_groups", m.router_groups, "num_experts", m.num_experts)
    if m.router_top_groups > m.router_groups:
        yield Problem(
            f"router_top_groups={m.router_top_groups} of router_groups={m.router_groups} groups",
            f"1 to {m.router_groups}",
            "model.router_top_groups",
        )
    allowed = m.router_top_groups * (m.num_experts // m.router_groups)
    if m.router_groups > 1 and allowed < m.top_k <= m.num_experts:
        yield Problem(
            f"top_k={m.top_k} of the {allowed} experts of router_top_groups={m.router_top_groups}",
            f"at most {allowed}, or more router_top_groups",
            "model.top_k",
        )
    if m.num_experts and m.pad_to_capacity and not m.capacity_factor:
        message = "pad_to_capacity=true with capacity_factor=0.0, which sets no capacity"
        hint = "model.capacity_factor of 1.0 or more, or pad_to_capacity=false"
        yield Problem(message, hint, "model.pad_to_capacity")


def _sequence_fits(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that a sequence is no longer than the learned positions."""
    m, b = config.model, config.batch
    if m.head in CLASSIFIERS:  # whose rows hold several sequences, and positions begin with each
        return
    if m.position == "learned" and b.seq_len > m.max_seq_len:
        message = f"seq_len={b.seq_len} exceeds the learned positions, max_seq_len={m.max_seq_len}"
        yield Problem(message, f"batch.seq_len of at most {m.max_seq_len}", "batch.seq_len")


def _curve_fits(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that min_lr is at most lr, and that the warm-up is no longer than the run."""
    o = config.optimizer
    if o.min_lr > o.lr:
        yield Problem(f"min_lr={o.min_lr} is above lr={o.lr}", f"0 to {o.lr}", "optimizer.min_lr")
    if o.warmup_steps > config.train.steps and not config.train.epochs:  # which set the steps
        message = f"warmup_steps={o.warmup_steps} is above train.steps={config.train.steps}"
        yield Problem(message, f"0 to {config.train.steps}", "optimizer.warmup_steps")


def _run_has_a_length(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that a run has steps, tokens or epochs."""
    train = config.train
    if not train.epochs and train.model_fields_set & {"epochs", "steps"} == {"epochs"}:
        hint = "more epochs, such as 1, or train.steps"
        yield Problem("epochs=0: the run has no length", hint, "train.epochs")


def _trust_bounds_are_a_range(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that the least trust ratio is at most the largest."""
    o = config.optimizer
    least, largest = o.trust_bounds
    if least > largest:
        message = f"the least trust ratio {least:g} is above the largest {largest:g}"
        yield Problem(message, f"[{largest:g}, {least:g}]", "optimizer.trust_bounds")


def _narrow_moments_move(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks moments of bfloat16, of which neighbours differ by 1 part in 128: a rounded mean stays
    where it is unless it moves by 1 part in 256."""
    t, o, field = config.train, config.optimizer, "train.moments"
    if t.moments == "fp32":
        return
    if t.precision == "fp64":
        message = "moments='bf16' with precision='fp64', whose sums are as exact"
        yield Problem(message, "'fp32', or another train.precision", field)
    if config.sync.method == "onebit":
        message = "moments='bf16' with sync.method='onebit', which sums moments in float32"
        yield Problem(message, "'fp32', or another sync.method", field)
    of_adam = "optimizer.other.betas" if o.name == "muon" and o.other else "optimizer.betas"
    decays = [(beta, of_adam) for beta in o.of_others.betas]
    decays += [(o.momentum, "optimizer.momentum")] if o.name == "muon" else []
    for decay, where in decays:
        if decay > LARGEST_NARROW_DECAY:
            message = (
                f"a decay of {decay:g} moves a mean by {1 - decay:.2g} of its value a step, and "
                "moments='bf16' round what is less than 1/256"
            )
            yield Problem(message, f"at most {LARGEST_NARROW_DECAY:.3f}, or moments='fp32'", where)


def _narrow_gradients_are_sums(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that gradients of bfloat16 are of a sync method that sums them so."""
    if config.train.gradients == "bf16" and config.sync.method == "onebit":
        message = "gradients='bf16' with sync.method='onebit', which sums them in float32"
        yield Problem(message, "'fp32', or another sync.method", "train.gradients")


def _fp8_has_gemms(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that some layer has sizes that GEMMs of fp8 take."""
    t, sizes = config.train, weight_sizes(config.model, 1)
    if t.precision == "fp8" and not narrow_layers(t.fp8_scaling, sizes):
        multiple = MULTIPLE[t.fp8_scaling]
        yield Problem(
            f"fp8_scaling={t.fp8_scaling!r} takes weights whose rows and columns are multiples of "
            f"{multiple}, and the model has {listed(sizes)}",
            f"widths that are multiples of {multiple}, or train.precision = 'bf16'",
            "train.precision",
        )


def _weights_are_compiled(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that a compiled backward is not to compute gradients of weights later."""
    if config.train.compile and config.parallel.schedule == "zero_bubble":
        yield Problem(
            "compile=true with schedule='zero_bubble': a compiled backward is one piece, "
            "and zero_bubble computes the gradients of weights later",
            "train.compile = false, or schedule '1f1b', 'interleaved' or 'gpipe'",
            "train.compile",
        )


def _graphs_are_the_same_each_time(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that CUDA graphs replay the same launches at every step."""
    p, m, t = config.parallel, config.model, config.train
    if not t.cuda_graphs:
        return
    sizes = {name: getattr(p, name) for name in ("cp", "pp", "vpp", "ep", "etp")}
    broken = [f"{name}={size}" for name, size in sizes.items() if size > 1]
    broken += [f"tp_mode={p.tp_mode!r}"] if p.grid_rows > 1 else []
    # Which copies it drops decides how many rows there are.
    broken += [f"capacity_factor={m.capacity_factor}"] if m.capacity_factor else []
    broken += [f"attention_dropout={m.attention_dropout}"] if m.attention_dropout else []
    broken += ["zero=3"] if p.zero == 3 else []
    broken += [f"head={m.head!r}"] if m.head != "lm" else []  # predicts some tokens of a batch
    broken += ["precision='fp64'"] if t.precision == "fp64" else []  # our kernels ask for no value
    broken += ["device='cpu'"] if t.device == "cpu" else []
    if broken:
        yield Problem(
            f"cuda_graphs=true with {', '.join(broken)}: what is replayed is one stage, "
            "exchanges nothing but among tp GPUs and asks no tensor for its values",
            "train.cuda_graphs = false, or data and tensor parallel GPUs with zero 0 or 1, and no "
            "expert capacity",
            "train.cuda_graphs",
        )


def _compiler_is_there(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks for a compiler where torch.compile looks; on a GPU triton builds kernels instead."""
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if config.train.compile and config.train.device != "cuda" and not shutil.which(name):
        message = f"compile=true needs a C++ compiler, and there is no {name} on PATH"
        hint = "install one, name one in CXX, or set train.compile = false"
        yield Problem(message, hint, "train.compile")


def _adapters_fit(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks the settings of training adapters, and that the model has their targets."""
    lora, m = config.lora, config.model
    if not lora.rank:
        return
    if config.train.freeze:
        message = f"freeze={shown(list(config.train.freeze))} with lora.rank={lora.rank}"
        hint = "leave train.freeze out, or lora.rank = 0"
        yield Problem(f"{message}, which freezes all weights", hint, "train.freeze")
    if config.parallel.zero == 3:
        message = f"rank={lora.rank} with zero=3: adapters are too small to be sharded by rows"
        yield Problem(message, "parallel.zero = 1", "lora.rank")
    if config.train.precision == "fp8":
        message = f"rank={lora.rank} with precision='fp8', whose frozen weights are not kept narrow"
        yield Problem(message, "train.precision = 'bf16'", "lora.rank")
    if lora.dropout and m.num_experts and adapts_experts(lora.targets):
        message = f"dropout={lora.dropout:g} with adapters of routed experts, which drop nothing"
        yield Problem(message, "lora.dropout = 0, as in peft", "lora.dropout")
    targets = lora_targets(m)
    for name in lora.targets:
        if name not in (*targets, ALL_LINEAR):
            said = f"there is no target {name!r} in this model"
            hint = f"--set \"lora.targets=['{targets[0]}']\"; known: {', '.join(targets)}"
            yield Problem(said, hint, "lora.targets")
    modules = saved_modules(m)
    for name in lora.modules_to_save:
        if name not in modules:
            said = f"there is no module {name!r} to train whole in this model"
            tied = "; its head is the embedding" * m.tie_embeddings
            yield Problem(said, f"known: {', '.join(modules)}{tied}", "lora.modules_to_save")


def _new_tokens_have_a_place(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that new tokens differ, and extend the tokenizer of a language model's weights."""
    texts, field = config.train.new_tokens, "train.new_tokens"
    if not texts:
        return
    said = f"new_tokens={shown(list(texts))}"
    twice = sorted(text for text, count in Counter(texts).items() if count > 1)
    if twice or not all(texts):
        what = f"has {', '.join(map(shown, twice))} twice" if twice else "has an empty text"
        yield Problem(f"{said} {what}", "texts that differ", field)
    if not config.train.init:
        message = f"{said} without train.init: they are added to what weights know"
        hint = "--init CHECKPOINT; a tokenizer of its own has them: preprocess --tokenizer FOLDER"
        yield Problem(message, hint, field)
    if config.model.head != "lm":
        message = f"{said} with head={config.model.head!r}"
        yield Problem(message, "leave train.new_tokens out: they are for language models", field)
    if config.data.tokenizer:
        message = f"{said} with data.tokenizer={shown(config.data.tokenizer)}"
        hint = "leave data.tokenizer out: they are added to that of train.init"
        yield Problem(message, hint, field)


def next_tokens_are_hidden(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that attention is causal where the head predicts the next token, and only there."""
    m = config.model
    if m.head == "lm" and not m.causal:
        yield Problem(
            "causal=false: every token sees the next one, which the language model is to predict",
            "model.causal = true, or model.head = 'mlm'",
            "model.causal",
        )
    if m.head != "lm" and m.causal:
        message = f"head={m.head!r} with causal=true: a token would not see those after it"
        yield Problem(message, "model.causal = false", "model.causal")


def _head_has_its_layers(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks the head's settings: labels of a classifier, tied embeddings, a bias."""
    m = config.model
    if m.head == "classification" and m.num_labels < 2:
        message = f"head='classification' with num_labels={m.num_labels}"
        yield Problem(message, "2 or more classes", "model.num_labels")
    if m.head == "mlm" and not m.tie_embeddings:
        message = "head='mlm' with tie_embeddings=false: it predicts by the token embedding"
        yield Problem(message, "model.tie_embeddings = true", "model.tie_embeddings")
    if m.head_bias and (m.head != "lm" or m.tie_embeddings):
        has = f"head={m.head!r}" if m.head != "lm" else "tie_embeddings=true"
        message = f"head_bias=true with {has}"
        hint = "a language model with tie_embeddings=false, or leave head_bias out"
        yield Problem(f"{message}, whose head has no layer of that kind", hint, "model.head_bias")
    if m.head in CLASSIFIERS and m.tie_embeddings:
        message = f"head={m.head!r} with tie_embeddings=true, and it reads no vocabulary"
        yield Problem(message, "leave model.tie_embeddings out", "model.tie_embeddings")


def data_fits_head(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that the data has the labels that the head predicts."""
    head, kind = config.model.head, config.data.format
    if kind not in FORMATS[head]:
        heads = either(repr(name) for name, kinds in FORMATS.items() if kind in kinds)
        formats = either(map(repr, FORMATS[head]))
        hint = f"data.format = {formats}, or model.head = {heads}"
        yield Problem(f"data.format={kind!r} with head={head!r}", hint, "data.format")


def data_is_shared_out(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks the words of the data section without reading files."""
    d = config.data
    blends = (partial(read_blend, words, field) for field, words in d.words_by_field.items())
    try:
        *read, (train, valid, _) = collect_errors(
            *blends, partial(read_split, d.split, "data.split")
        )
    except MtcliError as error:
        yield from error.problems
        return
    if d.format == "conversations" and any(weights for _, weights in read):
        yield Problem("conversations have no weights", "name their files alone", "data.train")
    if not d.train or d.valid:  # the split is of one set of prefixes
        return
    needed = {"train": train} | ({"valid": valid} if config.train.eval_every else {})
    for name in (name for name, share in needed.items() if not share):
        message = f"split {d.split!r} gives {name} a share of 0"
        yield Problem(message, "a share above 0, as in '969,30,1'", "data.split")


def validation_sets_have_names(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks the names of validation sets, which are parts of metrics' names, and train.best_of."""
    sets, best = config.data.valid, config.train.best_of
    names = list(sets) if isinstance(sets, dict) else []
    for name in names:
        if not SET_NAME.fullmatch(name):
            message = f"a validation set is called {shown(name)}"
            yield Problem(message, "letters, digits, - and _, such as wiki", "data.valid")
    if best is not None and best not in names:
        message = f"best_of={best!r}, and data.valid is no table of names"
        hint = 'data.valid = {wiki = "data/wiki", code = "data/code"}, or leave best_of out'
        if names:
            message, hint = f"best_of={best!r} is no set of data.valid", either(map(repr, names))
        yield Problem(message, hint, "train.best_of")


def validation_is_computed(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that a run that goes by its validation loss computes one."""
    train, data = config.train, config.data
    if train.eval_every:  # then the data is checked
        return
    without, hint = "eval_every=0", "train.eval_every of 1 or more"
    if not data.valid and not _holds_out(data.split):
        without += " and no data.valid"
        hint += " and data.valid, or a valid part of data.split"
    for name in ("keep_best", "patience"):
        if count := getattr(train, name):
            message = f"{name}={count} with {without}: there is no validation loss"
            yield Problem(message, f"{hint}, or {name} = 0", f"train.{name}")


def _holds_out(split: str) -> bool:
    try:
        return read_split(split)[1] > 0.0
    except MtcliError:
        return True  # which is a problem of its own


def subsets_are_of_sequences(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that a subset is of data that has sequences to choose from."""
    d, m = config.data, config.model
    if d.subset and (m.head == "mlm" or d.format == "conversations"):
        kind = f"data.format={d.format!r}" if m.head == "lm" else f"head={m.head!r}"
        message = f"subset={shown(d.subset)} with {kind}, whose rows are no fixed sequences"
        hint = "leave data.subset out, or train a language model on tokens or a classifier"
        yield Problem(message, hint, "data.subset")
    if not d.reselect_every:
        return
    without = []
    without += [] if d.subset else ["no data.subset, which says how many to choose"]
    without += [f"data.format={d.format!r}"] if d.format != "tokens" else []
    hints = ["data.subset = a file of `mtcli select` of token data"] if without else []
    if config.sync.asynchronous:
        without.append("sync.asynchronous=true")
        hints.append("sync.asynchronous = false")
    if without:
        message = f"reselect_every={d.reselect_every} with {' and '.join(without)}"
        hint = f"{' and '.join(hints)}, or reselect_every = 0"
        yield Problem(message, hint, "data.reselect_every")


def _trackers_differ(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that no tracker is named twice."""
    given = config.train.trackers
    for name in dict.fromkeys(given):
        if given.count(name) > 1:
            yield Problem(
                f"{name!r} is in it {given.count(name)} times", "each once", "train.trackers"
            )


def _logits_are_of_tokens(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that logits are scaled and capped by a language model's head alone."""
    m = config.model
    if m.logit_scale != 1.0 and m.head != "lm":
        message = f"logit_scale={m.logit_scale:g} with head={m.head!r}, which scales none"
        yield Problem(message, "1, or model.head = 'lm'", "model.logit_scale")
    if m.logit_softcap and m.head != "lm":
        message = f"logit_softcap={m.logit_softcap:g} with head={m.head!r}, which caps none"
        yield Problem(message, "0, or model.head = 'lm'", "model.logit_softcap")
    if m.logit_scale != 1.0 and m.head_bias:
        message = f"logit_scale={m.logit_scale:g} with head_bias=true, which it would not multiply"
        yield Problem(message, "logit_scale = 1, or head_bias = false", "model.logit_scale")


def _norms_have_their_parts(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that norms have the offset, the bias and the places that are asked for."""
    m = config.model
    if m.norm_offset not in (0.0, 1.0):
        message = f"norm_offset={m.norm_offset:g}: weights begin at 0 or 1, and gains at 1"
        yield Problem(message, "0 or 1", "model.norm_offset")
    if not m.first_attention_norm and (
        m.norm_order not in ("pre", "sandwich") or m.parallel_residual
    ):
        has = f"norm_order={m.norm_order!r}" if m.norm_order != "pre" else "parallel_residual=true"
        message = f"first_attention_norm=false with {has}, where no norm is attention's alone"
        hint = "norm_order = 'pre' or 'sandwich' without parallel_residual, or "
        hint += "first_attention_norm = true"
        yield Problem(message, hint, "model.first_attention_norm")
    if m.norm_bias and not m.has_norm_bias:
        message = f"norm_bias=true with norm={m.norm!r}, which has none"
        yield Problem(message, "model.norm = 'layernorm', or norm_bias = false", "model.norm_bias")


def _parallel_residual_fits(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that parallel residuals have norms of inputs alone, and that these share one."""
    m = config.model
    if m.parallel_residual and m.norm_order != "pre":
        message = f"parallel_residual=true with norm_order={m.norm_order!r}"
        hint = "model.norm_order = 'pre', or model.parallel_residual = false"
        yield Problem(f"{message}, which norms more than inputs", hint, "model.parallel_residual")
    if m.parallel_norms == 1 and not m.parallel_residual:
        message = "parallel_norms=1 with parallel_residual=false: the MLP's input is another"
        hint = "model.parallel_residual = true, or leave parallel_norms out"
        yield Problem(message, hint, "model.parallel_norms")


def _windows_have_layers(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that a window limits some layer, and that a pattern has a window."""
    m = config.model
    if m.window_pattern and not m.window:
        message = f"window_pattern={m.window_pattern!r} with window=0, which limits no layer"
        yield Problem(message, "model.window of 1 or more", "model.window_pattern")
    elif m.window and not any(m.layer_window(layer) for layer in range(m.num_layers)):
        message = f"window={m.window} with window_pattern={m.window_pattern!r}: no layer is local"
        yield Problem(message, "a pattern with an L, or model.window = 0", "model.window_pattern")


def _rope_scaling_is_a_range(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that the ends of a rotary scaling are in order, and that frequencies differ."""
    scaling = config.model.rope_scaling
    ends = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}
    if scaling and (names := ends.get(scaling.kind)):
        low, high = (getattr(scaling, name) for name in names)
        if low >= high:
            message = f"{names[0]}={low:g} is not below {names[1]}={high:g}"
            usual = "as 1 and 4" if scaling.kind == "llama3" else "as 1 and 32"
            hint = f"below {high:g}, {usual}"
            yield Problem(message, hint, f"model.rope_scaling.{names[0]}")
    if scaling and scaling.kind == "yarn" and config.model.rope_theta == 1.0:
        yield Problem("rope_theta=1 turns all pairs alike", "above 1", "model.rope_theta")


def _rope_scaling_fits_heads(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that a rotary scaling has a factor for each pair of dimensions of a head."""
    m, scaling = config.model, config.model.rope_scaling
    if scaling and scaling.kind == "longrope":
        if scaling.original_max_seq_len == 1:
            field = "model.rope_scaling.original_max_seq_len"
            yield Problem("longrope with original_max_seq_len=1", "2 or more", field)
        for name in ("short_factors", "long_factors"):
            if len(numbers := getattr(scaling, name)) != m.rotary_dim // 2:
                message = f"{len(numbers)} {name} for heads of {m.rotary_dim // 2} pairs"
                yield Problem(message, "a factor for each", f"model.rope_scaling.{name}")
    if scaling and scaling.kind == "dynamic" and m.rotary_dim == 2:
        message = "kind='dynamic' has no base for heads of one pair"
        yield Problem(message, "more dimensions that rotate", "model.rope_scaling.kind")


def _phases_follow(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that phases are of tokens, in order, and that each has a step in the run's length."""
    if not (config.phase or config.train.tokens):
        return
    what = f"{len(config.phase)} phases" if config.phase else f"train.tokens={config.train.tokens}"
    field = "phase" if config.phase else "train.tokens"
    d = config.data
    for refused, setting, cure in (
        (d.format != "tokens", f"data.format={d.format!r}", "data.format = 'tokens'"),
        (config.model.head != "lm", f"model.head={config.model.head!r}", "model.head = 'lm'"),
        (bool(d.subset), "data.subset", "no data.subset"),
        (config.sync.asynchronous, "sync.asynchronous=true", "sync.asynchronous = false"),
    ):
        if refused:
            yield Problem(f"{what} with {setting}, whose rows are no run of tokens", cure, field)
    starts = [phase.from_tokens for phase in config.phase]
    for number, (first, second) in enumerate(zip(starts, starts[1:], strict=False), 1):
        if second <= first:
            message = f"from_tokens={second} is not above the {first} of the phase before"
            yield Problem(message, f"{first + 1} or more", f"phase.{number}.from_tokens")
            return
    for span in phases_of(config)[1:-1]:
        if not span.steps and span.last_step < config.train.steps:
            message = f"from_tokens={starts[span.number - 1]}, and the next phase's "
            message += f"{starts[span.number]}: no step of {span.config.batch.tokens_per_step} "
            hint = "phases further apart, or one of them left out"
            yield Problem(f"{message}tokens is between", hint, f"phase.{span.number - 1}")


def _phases_keep_rules(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks the config of each phase by all other rules, but for what the run's own breaks."""
    if not config.phase:
        return
    first, *later = phases_of(config)
    rules = [rule for rule in RULES if rule not in (_phases_follow, _phases_keep_rules)]
    said = set(_broken(rules, first.config, world))
    for span in later:
        number = span.number - 1
        for problem in [*_broken(rules, span.config, world), *_phase_fits_model(span, first)]:
            if problem not in said:
                said.add(problem)
                yield problem._replace(field=f"phase.{number}.{problem.field}")
        warmup, steps = span.config.optimizer.warmup_steps, span.curve[1]
        if begins_curve(config.phase[number]) and span.steps and warmup > steps:
            message = f"warmup_steps={warmup} is above the {steps} steps of its curve"
            field = f"phase.{number}.optimizer.warmup_steps"
            yield Problem(message, f"0 to {steps}", field)


def _phase_fits_model(span: PhaseSpan, first: PhaseSpan) -> Iterator[Problem]:
    """Checks that a phase leaves the model's weights, and what blocks are built with."""
    new, old = span.config.model, first.config.model
    if new.position == "learned" and new.max_seq_len != old.max_seq_len:
        message = f"max_seq_len={new.max_seq_len} of learned positions, and the table has "
        hint = "model.max_seq_len of the longest phase from the start"
        yield Problem(f"{message}{old.max_seq_len}", hint, "model.max_seq_len")
    if new.mla and new.rope_scaling != old.rope_scaling:
        message = "another rope_scaling with model.mla, whose blocks are built with it"
        yield Problem(message, "set it from the start", "model.rope_scaling")


FORMATS = {  # by head
    "lm": ("tokens", "conversations"),
    "mlm": ("tokens",),
    "classification": ("classification",),
    "multiple_choice": ("race",),
}


class Need(NamedTuple):
    """A setting without which `fields` have no meaning: it must be one of `values` or, where there
    are none, at least 1."""

    fields: tuple[str, ...]
    setting: str
    values: tuple[str, ...]
    otherwise: str  # of any other value: why that is no use

    def holds(self, config: RunConfig) -> bool:
        """Says whether a config has the setting."""
        has = attrgetter(self.setting)(config)
        return has in self.values or (not self.values and has > 0)

    @property
    def words(self) -> str:
        """The setting in words: "optimizer.name = 'lamb'"."""
        values = " = " + either(map(repr, self.values)) if self.values else " of 1 or more"
        return self.setting + values


NEEDS = (
    Need(tuple(f"model.{name}" for name in OF_EXPERTS), "model.num_experts", (), "a dense model"),
    Need(
        tuple(f"model.{name}" for name in OF_ROPE),
        "model.position",
        ("rope",),
        "which turns nothing",
    ),
    Need(("model.position_offset",), "model.position", ("learned",), "which has no table"),
    Need(
        ("model.activation_limit", "model.activation_alpha"),
        "model.activation",
        ("swiglu_clamped",),
        "which clamps nothing",
    ),
    Need(("model.rope_local_theta",), "model.window", (), "which no layer has"),
    Need(("parallel.tp_rows",), "parallel.tp_mode", ("2d",), "which has no rows"),
    Need(("model.sentence_order",), "model.head", ("mlm",), "which predicts no order"),
    Need(("model.transform_bias",), "model.head", ("mlm",), "which has no such layer"),
    Need(("model.num_labels",), "model.head", ("classification",), "which has no classes"),
    Need(("optimizer.trust_bounds",), "optimizer.name", ("lamb",), "which has no trust ratio"),
    Need(("train.moments",), "optimizer.name", ("adamw", "muon"), "whose state stays in fp32"),
    Need(("train.gradients",), "optimizer.name", ("adamw", "muon"), "whose sums stay in fp32"),
    Need(("train.gradients",), "train.precision", ("bf16", "fp8"), "which makes none of bfloat16"),
    Need(("train.loss_scale",), "train.precision", ("fp16",), "whose loss is not scaled"),
    Need(("train.fp8_scaling",), "train.precision", ("fp8",), "which scales nothing"),
    Need(
        ("optimizer.momentum", "optimizer.nesterov"),
        "optimizer.name",
        ("sgd", "muon"),
        "which has none",
    ),
    Need(
        (
            *("optimizer.ns_steps", "optimizer.ns_coefficients", "optimizer.scale"),
            *("optimizer.muon_split_heads", "optimizer.other"),
        ),
        "optimizer.name",
        ("muon",),
        "which does not read it",
    ),
    *(
        Need(
            tuple(f"sync.{name}" for name in names.split()),
            "sync.method",
            methods,
            "which does not read it",
        )
        for names, methods in READ_BY.items()
    ),
    Need(
        ("data.chat_template", "data.loss_on"),
        "data.format",
        ("conversations",),
        "which has no chats",
    ),
    Need(
        ("train.epochs", "data.skip_bad"),
        "data.format",
        ("conversations", *HEAD_OF_FORMAT),
        "whose length is in steps and which has no lines to read",
    ),
    Need(("train.ema",), "sync.method", ("all_reduce",), "whose replicas may have other weights"),
    Need(
        ("lora.alpha", "lora.dropout", "lora.targets", "lora.modules_to_save"),
        "lora.rank",
        (),
        "which has no adapters",
    ),
)


def fields_are_used(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that no field is set which the other settings make meaningless."""
    by_name = ARCHITECTURES[config.model.architecture]
    for need in NEEDS:
        if need.holds(config):
            continue
        for section, name, default in _defaults(need.fields):
            value = getattr(getattr(config, section), name)
            if value not in (default, by_name.get(name, default)):
                said = shown(list(value) if isinstance(value, tuple) else value)
                has = attrgetter(need.setting)(config)
                lacking = f"{need.setting.partition('.')[2]}={has!r}, {need.otherwise}"
                hint = f"{need.words}, or leave {section}.{name} out"
                yield Problem(f"{name}={said} with {lacking}", hint, f"{section}.{name}")


@cache
def _defaults(fields: tuple[str, ...]) -> list[tuple[str, str, Any]]:
    """Returns (section, name, default) of each field."""
    found = []
    for section, name in (field.split(".") for field in fields):
        kind: Any = RunConfig.model_fields[section].annotation
        found.append((section, name, kind.model_fields[name].default))
    return found


def _whole_sequences(config: RunConfig, world: int) -> Iterator[Problem]:
    if config.parallel.cp > 1:
        message = f"cp={config.parallel.cp}: evaluation and generation hold whole sequences"
        yield Problem(message, "parallel.cp = 1, and more tp, pp or dp", "parallel.cp")
    if config.parallel.sequence_parallel:
        message = "sequence_parallel=true: evaluation and generation hold whole sequences"
        hint = "leave --set parallel.sequence_parallel out"
        yield Problem(message, hint, "parallel.sequence_parallel")


# Of sections that no layout changes.
OF_DATA: tuple[Rule, ...] = (
    data_fits_head,
    data_is_shared_out,
    validation_sets_have_names,
    validation_is_computed,
    subsets_are_of_sequences,
)

# Of what is trained. A model that is there may be one that no training takes, and have fields that
# it has no use for.
TRAINING_RULES: tuple[Rule, ...] = (
    next_tokens_are_hidden,
    fields_are_used,
    *OF_DATA,
)

ENGINE_RULES: tuple[Rule, ...] = (  # of what can be planned, and not run
    _compiler_is_there,
)

RULES: tuple[Rule, ...] = (
    _tensors_can_be_counted,
    _heads,
    _head_has_its_layers,
    _experts_are_whole,
    *LAYOUT_RULES,
    *SYNC_RULES,
    _sequence_fits,
    next_tokens_are_hidden,
    _logits_are_of_tokens,
    _norms_have_their_parts,
    _parallel_residual_fits,
    _windows_have_layers,
    _pairs_rotate,
    _latents_have_heads,
    _rope_scaling_is_a_range,
    _rope_scaling_fits_heads,
    _curve_fits,
    _run_has_a_length,
    _trust_bounds_are_a_range,
    _narrow_moments_move,
    _narrow_gradients_are_sums,
    fields_are_used,
    _weights_are_compiled,
    _adapters_fit,
    _new_tokens_have_a_place,
    _graphs_are_the_same_each_time,
    _fp8_has_gemms,
    *OF_DATA,
    _trackers_differ,
    _phases_follow,
    _phases_keep_rules,
)

# Rules that forward passes need not keep. tp ranks ask the experts alike, and are answered alike;
# cp is refused, so that another length is no advice.
NOT_OF_FORWARD_PASSES = (
    *TRAINING_RULES,
    experts_see_tokens_once,
    context_divides,
    grids_shard_tokens,
    rows_share_micro_batches,
)
