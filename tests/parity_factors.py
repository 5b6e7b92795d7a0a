"""The factors of the parity table, and the row that a level of each makes.

A row is a level of every factor. ROWS is a covering array: each pair of levels that some legal row
has occurs in one of them. `cover_parity.py` chose them into parity_rows.json. MORE_ROWS are those
whose sizes are no levels. A new option of training is a level or a factor here.
"""

import json
from pathlib import Path
from typing import NamedTuple

from tiny import (
    BERT,
    BIASED,
    CHOOSING,
    CLASSIFYING,
    DOCUMENTS,
    DROPPING,
    GPT,
    LLAMA,
    MOE,
    EncoderSamples,
    Samples,
    Weighted,
    run_config,
)

from mtcli.core.config import rules
from mtcli.core.config.errors import MtcliError

ROWS_FILE = Path(__file__).parent / "parity_rows.json"
STEPS, STOP = 5, 3  # steps of a run, and the one after which it goes on on another layout
LARGEST = 8  # ranks of a row of the covering array

SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.9}
LAMB = {"name": "lamb", "lr": 0.1}  # a trust ratio near 0.04 makes it small
MUON = {"name": "muon", "lr": 0.02, "other": {"lr": 0.003}}
TWO = {"replicas": 2}

WINDOW = {"window": 3, "window_pattern": "GL"}
QK_NORM = {"qk_norm": "head"}
EACH_HEAD = {"qk_norm": "each_head"}
ROTATION = {"rope_theta": 90.0, "rotary_fraction": 0.5, "rope_local_theta": 30.0}
GEGLU = {"activation": "geglu_tanh"}
SCALES = {"attention_scale": 0.7, "embedding_scale": 9.0, "residual_scale": 0.4, "logit_scale": 3.0}
OFFSET_ALONE = {"norm_offset": 1.0}
OFFSET = OFFSET_ALONE | {"qk_norm": "head"}
# Scores and logits of these models are small, so caps that bend them are too.
CAPS = {"attention_softcap": 0.3, "logit_softcap": 0.2, "init_std": 0.2}
PARALLEL, HEAD_BIAS = {"parallel_residual": True}, {"head_bias": True}
# A limit that about half of the gates and ups of these models pass.
CLAMPED = {"activation": "swiglu_clamped", "activation_limit": 0.3, "init_std": 0.2}
EXPERT_BIASES = {"expert_bias": True, "router_bias": True}
SINKS = {"attention_sinks": True, "init_std": 0.2}
SANDWICH, AFTER = {"norm_order": "sandwich"}, {"norm_order": "after"}
OLMO = AFTER | {"qk_norm": "projection", "init_std": 0.2}
ADAPTED = {"rank": 3, "alpha": 6.0, "targets": ["all-linear"]}
FEW_ADAPTED = {"rank": 2, "targets": ["o_proj", "experts.up_proj", "experts.down_proj"]}
GROUPED = {"group": [{"match": ["embedding", "blocks.0"], "lr_scale": 0.2},
                     {"match": ["*.mlp.*"], "lr_scale": 3.0, "weight_decay": 0.7}]}  # fmt: skip
FROZEN = {"freeze": ["embedding", "blocks.0"]}
FROZEN_PARTS = {"freeze": ["blocks.*.attention", "final_norm", "blocks.1.mlp.experts",
                           "blocks.0.mlp.router"]}  # fmt: skip
FIRST_DENSE = {"first_dense_layers": 1, "ffn_hidden_size": 20, "routed_scale": 2.5}
MLA = {"mla": {"q_rank": 5, "kv_rank": 6, "nope_dim": 3, "rope_dim": 2, "value_dim": 7},
       "num_kv_heads": 4, "head_dim": 5, "qkv_bias": True}  # fmt: skip
MLA_PLAIN = {"mla": {"kv_rank": 3, "nope_dim": 4, "rope_dim": 2, "value_dim": 3},
             "num_kv_heads": 4, "head_dim": 6}  # fmt: skip
ROBERTA = {"norm_order": "post", "norm_eps": 1e-5, "sentence_order": False, "token_types": 1,
           "position_offset": 2}  # fmt: skip
MODERNBERT = ROTATION | {"position": "rope", "window": 1, "window_pattern": "GL", "init_std": 0.2,
                         "embedding_norm": True, "first_attention_norm": False, "norm_bias": False,
                         "activation": "geglu", "ffn_hidden_size": 24, "bias": False,
                         "qkv_bias": False, "transform_bias": False, "sentence_order": False,
                         "token_types": 0, "norm_order": "pre"}  # fmt: skip

# By factor and level, what a level sets: fields of its section, or sections, or a number. The first
# level of a factor is the plain one.
FACTORS = {
    "model": {
        "gpt": GPT,
        "llama": LLAMA,
        "one key head": LLAMA | {"num_kv_heads": 1, "qkv_bias": True},
        "moe": MOE | {"shared_expert_ffn_hidden_size": 8, "shared_expert_gate": True},
        "moe capped": MOE | {"capacity_factor": 1.0},
        "moe early": MOE
        | {"capacity_factor": 0.5, "drop_policy": "position", "pad_to_capacity": True},
        "moe biased": BIASED,
        "bert": BERT | {"norm_order": "post"},
        "bert classes": BERT | CLASSIFYING,
        # With weights of 0.02 the pooler is linear, and the gradients of softmax sum to 0 over the
        # choices: the gradient of the last norm's bias would be what is left of terms that cancel.
        "bert choices": BERT | CHOOSING | {"norm_order": "post", "init_std": 0.2},
    },
    # What a layer may have besides, as the model's fields.
    "detail": {
        "none": {},
        "window": WINDOW,
        "rotation": WINDOW | ROTATION | {"rope_interleaved": True},
        # A bias of keys that do not rotate moves no softmax, and RMSNorm has none.
        "norms of heads": QK_NORM | {"norm": "rmsnorm"},
        "norms of projections": {"qk_norm": "projection", "norm": "rmsnorm", "init_std": 0.2},
        "sandwich": SANDWICH,
        "after": AFTER | {"init_std": 0.2},
        "parallel": PARALLEL,
        "one norm": PARALLEL | {"parallel_norms": 1},
        "offset": OFFSET_ALONE,
        "scales": SCALES,
        "geglu": GEGLU,
        "clamped": CLAMPED,
        "relu2": {"activation": "relu2"},
        "caps": CAPS,
        "sinks": SINKS,
        "head bias": HEAD_BIAS,
        "expert biases": EXPERT_BIASES,
        "first dense": FIRST_DENSE,
        "latents": MLA,
        "latents of keys": MLA_PLAIN,
    },
    "tp": {
        "1": {},
        "2": {"tp": 2},
        "2 no sp": {"tp": 2, "sequence_parallel": False},
        "4": {"tp": 4},
        "2x2": {"tp": 4, "tp_mode": "2d"},
    },
    "cp": {
        "1": {},
        "ring": {"cp": 2},
        "all_gather": {"cp": 2, "cp_mode": "all_gather"},
        "a2a": {"cp": 2, "cp_mode": "a2a"},
    },
    "pipeline": {
        "1": {},
        "1f1b": {"pp": 2},
        "gpipe": {"pp": 2, "schedule": "gpipe"},
        "interleaved": {"pp": 2, "vpp": 2, "schedule": "interleaved"},
        "zero_bubble": {"pp": 2, "schedule": "zero_bubble"},
    },
    "experts": {"1": {}, "ep": {"ep": 2}, "etp": {"etp": 2}, "ep etp": {"ep": 2, "etp": 2}},
    "dispatcher": {"all_to_all": {}, "all_gather": {"dispatcher": "all_gather"}},
    "zero": {"0": {}, "1": {"zero": 1}, "3": {"zero": 3}},
    "recompute": {
        "none": {},
        "selective": {"recompute": "selective"},
        "full": {"recompute": "full"},
    },
    "buckets": {"one": {}, "many": {"bucket_mib": 0.002}},
    "dp": {"1": 1, "2": 2},
    "micro_batch_size": {"1": 1, "2": 2},
    "dropout": {"no": {}, "yes": DROPPING},
    "samples": {
        "plain": {},
        "documents": {"data": DOCUMENTS},
        "weights": {},
    },
    "update": {
        "adamw": {},
        "lamb": {"optimizer": LAMB},
        "muon": {"optimizer": MUON},
        "onebit": {"optimizer": LAMB, "sync": TWO | {"method": "onebit", "warmup_steps": 2}},
        "awc_dmsgd": {"optimizer": SGD, "sync": TWO | {"method": "awc_dmsgd"}},
        "lsgd": {
            "optimizer": SGD,
            "sync": TWO | {"method": "lsgd", "period": 2, "global_period": 3, "pull": 0.3},
        },
        "diloco": {
            "sync": TWO | {"method": "diloco", "period": 2, "fragments": 2, "overlap_steps": 1}
        },
    },
    "adapters": {"none": {}, "lora": {"lora": {"rank": 3, "alpha": 6.0, "dropout": 0.2}}},
}
LAYOUT = ("tp", "cp", "pipeline", "experts", "dispatcher", "zero", "recompute", "buckets")
PLAIN = {factor: next(iter(levels)) for factor, levels in FACTORS.items()}


class Row(NamedTuple):
    """What a row trains and on which layout: its levels that are not plain, by factor, and what is
    set besides, by section."""

    levels: dict
    more: dict = {}

    def __str__(self):
        more = {name: value for fields in self.more.values() for name, value in fields.items()}
        levels = {f: level for f, level in self.levels.items() if f != "model"} | more
        return f"{self.level('model')}: " + " ".join(f"{k}={v}" for k, v in levels.items())

    def level(self, factor):
        return self.levels.get(factor, PLAIN[factor])

    def chosen(self, factor):
        """What the row's level of a factor sets."""
        return FACTORS[factor][self.level(factor)]

    @property
    def replicas(self):
        return self.chosen("update").get("sync", {}).get("replicas", 1)

    @property
    def parallel(self):
        fields = {k: v for factor in LAYOUT for k, v in self.chosen(factor).items()}
        return fields | self.more.get("parallel", {})

    @property
    def batch(self):
        micro, shards = self.chosen("micro_batch_size"), self.chosen("dp") * self.replicas
        size = 8 if micro * shards > 4 else 4
        sizes = {"micro_batch_size": micro, "global_batch_size": size}
        return sizes | self.more.get("batch", {})

    @property
    def world(self):
        p = self.parallel
        model_ranks = p.get("tp", 1) * p.get("cp", 1) * p.get("pp", 1)
        return model_ranks * self.chosen("dp") * self.replicas

    @property
    def model(self):
        layers = {"num_layers": 4 if self.parallel.get("vpp", 1) > 1 else 2}
        fields = self.chosen("model") | self.chosen("detail") | layers | self.chosen("dropout")
        return fields | self.more.get("model", {})

    @property
    def samples(self):
        """The class of its samples."""
        if self.level("model").startswith("bert"):
            return EncoderSamples
        return Weighted if self.level("samples") == "weights" else Samples

    def config(self, precision="fp64", steps=STEPS):
        sections = self.chosen("samples") | self.chosen("update") | self.chosen("adapters")
        sections |= self.more_training
        train = {"precision": precision, "steps": steps, "matmul": "strict"}
        train |= sections.pop("train", {})
        parts = {"parallel": self.parallel, "batch": self.batch, "train": train}
        return run_config(self.model, **parts, **sections)

    @property
    def more_training(self):
        """The sections that its oracle has too, besides the model's."""
        return {
            name: self.more[name] for name in ("lora", "optimizer", "train") if name in self.more
        }

    @property
    def oracle(self):
        """The row that has its curve, without any parallelism: one rank that takes a sequence at a
        time, or as many data ranks as those whose replicas are to differ."""
        levels = {f: level for f, level in self.levels.items() if f not in LAYOUT}
        if self.replicas == 1:
            levels = {
                f: level for f, level in levels.items() if f not in ("dp", "micro_batch_size")
            }
        model = {"num_layers": self.model["num_layers"]} | self.more.get("model", {})
        batch = {"global_batch_size": self.batch["global_batch_size"]}
        return Row(levels, {"model": model, "batch": batch} | self.more_training)

    def on(self, other):
        """This row on another's layout."""
        layout = (*LAYOUT, "dp", "micro_batch_size")
        levels = {f: level for f, level in self.levels.items() if f not in layout}
        levels |= {f: level for f, level in other.levels.items() if f in layout}
        oracle = self.oracle.more
        return Row(levels, oracle | {"parallel": other.more.get("parallel", {})})

    def then(self, rows):
        """This row on the layout of one of some rows, on which its run goes on: of as many ranks,
        and where replicas differ with the same samples for each; else its own."""
        at = rows.index(self)
        for other in (*rows[at + 1 :], *rows[:at]):
            after = self.on(other)
            same = all(self.level(f) == other.level(f) for f in ("dp", "micro_batch_size"))
            if after.world == self.world and (same or self.replicas == 1) and after.is_legal:
                return after
        return self

    @property
    def is_legal(self):
        """Whether a run may have these levels and each makes a difference."""
        experts = self.level("model").startswith("moe")
        encoder = self.level("model").startswith("bert")
        if not experts and (self.level("experts"), self.level("dispatcher")) != ("1", "all_to_all"):
            return False
        if encoder and self.level("samples") != "plain" or self.world > LARGEST:
            return False
        # The gradient of the bias of all choices is rounding, which 1-bit scales to others' size.
        if (self.level("model"), self.level("update")) == ("bert choices", "onebit"):
            return False
        try:
            return not rules.problems(self.config(), self.world)
        except MtcliError:
            return False


def row_of(levels, **more):
    """A row of levels by factor, in the order of the factors."""
    return Row({f: levels[f] for f in FACTORS if levels.get(f, PLAIN[f]) != PLAIN[f]}, more)


# Sizes that are no levels: grids of 6 and 9 ranks, stages of other numbers of layers, more ranks of
# experts than of a replica's attention, 8 ranks along one axis.
SIXES = {"hidden_size": 24, "num_heads": 6}
MORE_ROWS = [
    row_of({"model": "gpt", "micro_batch_size": "2", "dropout": "yes"},
           model=SIXES, parallel={"tp": 6, "tp_mode": "2d", "tp_rows": 2}),
    row_of({"model": "llama"},
           model=SIXES | {"num_heads": 12, "num_kv_heads": 6, "ffn_hidden_size": 36},
           parallel={"tp": 6, "tp_mode": "2d", "tp_rows": 3},
           batch={"micro_batch_size": 3, "global_batch_size": 12}),
    row_of({"model": "gpt", "dropout": "yes"}, model=SIXES, parallel={"tp": 9, "tp_mode": "2d"},
           batch={"micro_batch_size": 3, "global_batch_size": 12}),
    row_of({"model": "one key head", "micro_batch_size": "2", "zero": "1"},
           parallel={"tp": 8, "tp_mode": "2d", "tp_rows": 2}),
    row_of({"model": "gpt", "dropout": "yes", "micro_batch_size": "2"},
           parallel={"tp": 4, "tp_mode": "2d", "tp_rows": 1}),
    row_of({"model": "bert choices", "pipeline": "1f1b", "micro_batch_size": "2"},
           parallel={"tp": 2, "tp_mode": "2d", "tp_rows": 2}),
    row_of({"model": "gpt", "dropout": "yes"}, parallel={"pp": 4, "stage_layers": [0, 1, 1, 0]}),
    row_of({"model": "llama", "adapters": "lora"}, model={"num_layers": 4},
           parallel={"pp": 4, "stage_layers": [0, 2, 2, 0]}),
    row_of({"model": "llama", "pipeline": "1f1b", "zero": "3", "dp": "2"},
           parallel={"stage_layers": [0, 2]}),
    row_of({"model": "gpt", "dropout": "yes", "pipeline": "interleaved"}, model={"num_layers": 8},
           parallel={"pp": 4}),
    row_of({"model": "moe biased", "tp": "2", "cp": "ring", "dp": "2", "micro_batch_size": "2"},
           model={"num_kv_heads": 4}, parallel={"ep": 8}),
    row_of({"model": "moe biased", "tp": "2x2", "dp": "2", "zero": "1", "micro_batch_size": "2"},
           parallel={"ep": 8}),
    row_of({"model": "bert", "tp": "2", "cp": "ring"}, model={"sentence_order": False}),
    row_of({"model": "llama", "tp": "2 no sp", "adapters": "lora"}, model={"num_layers": 4}),
    row_of({"model": "llama", "tp": "2 no sp", "cp": "ring", "samples": "documents"},
           model=WINDOW),
    row_of({"model": "llama", "cp": "all_gather", "pipeline": "interleaved", "dropout": "yes"},
           model=WINDOW),
    row_of({"model": "moe", "cp": "a2a", "zero": "3", "dp": "2", "recompute": "full"},
           model=WINDOW),
    row_of({"model": "llama", "tp": "2 no sp", "pipeline": "zero_bubble", "recompute": "selective"},
           model=QK_NORM),
    row_of({"model": "llama", "tp": "4", "dp": "2", "zero": "1"}, model=QK_NORM),
    row_of({"model": "llama", "tp": "2", "cp": "ring", "pipeline": "1f1b"}, model=SCALES),
    row_of({"model": "bert", "tp": "2x2", "micro_batch_size": "2", "zero": "3"},
           model=SCALES | {"logit_scale": 1.0}),
    row_of({"model": "llama", "tp": "2x2", "micro_batch_size": "2", "update": "lamb"},
           model=QK_NORM | {"norm": "layernorm"}),
    row_of({"model": "moe", "tp": "2", "cp": "ring", "experts": "ep etp", "zero": "3"},
           model=QK_NORM),
    row_of({"model": "llama", "tp": "2 no sp", "pipeline": "zero_bubble", "recompute": "selective"},
           model=EACH_HEAD | {"norm": "layernorm"}),
    row_of({"model": "llama", "tp": "4", "dp": "2", "zero": "1"}, model=EACH_HEAD),
    row_of({"model": "one key head", "tp": "4", "cp": "ring", "samples": "documents"},
           model=EACH_HEAD | OFFSET_ALONE),
    row_of({"model": "llama", "tp": "2x2", "micro_batch_size": "2", "update": "lamb"},
           model=EACH_HEAD | {"norm": "layernorm"}),
    row_of({"model": "moe", "tp": "2", "cp": "ring", "experts": "ep etp", "zero": "3"},
           model=EACH_HEAD),
    row_of({"model": "llama", "cp": "a2a", "dp": "2", "recompute": "full"}, model=EACH_HEAD),
    row_of({"model": "llama", "cp": "a2a", "pipeline": "zero_bubble", "zero": "1", "dp": "2"},
           model=WINDOW | ROTATION),
    row_of({"model": "one key head", "tp": "4", "cp": "ring", "samples": "documents"},
           model=WINDOW | ROTATION),
    row_of({"model": "llama", "pipeline": "interleaved", "recompute": "selective", "dp": "2"},
           model={"rope_pattern": "RNN"}),
    row_of({"model": "llama", "tp": "2", "pipeline": "zero_bubble", "dp": "2"}, model=GEGLU),
    row_of({"model": "moe", "tp": "2x2", "experts": "etp", "micro_batch_size": "2"},
           model=GEGLU | {"activation": "geglu"}),
    row_of({"model": "gpt", "tp": "2 no sp", "pipeline": "1f1b", "zero": "3", "dp": "2"},
           model={"activation": "relu2"}),
    row_of({"model": "llama", "tp": "2", "cp": "ring", "zero": "3"}, model=OFFSET),
    row_of({"model": "gpt", "tp": "2x2", "micro_batch_size": "2", "dropout": "yes"},
           model=OFFSET_ALONE),
    row_of({"model": "gpt", "tp": "2x2", "micro_batch_size": "2"}, model={"norm_bias": False}),
    row_of({"model": "bert", "tp": "2", "update": "lamb"}, model={"norm_bias": False}),
    row_of({"model": "llama", "tp": "2", "cp": "ring", "samples": "documents"}, model=CAPS),
    row_of({"model": "llama", "cp": "all_gather", "pipeline": "1f1b", "zero": "3"}, model=CAPS),
    row_of({"model": "llama", "cp": "a2a", "dp": "2", "recompute": "selective"},
           model=CAPS | WINDOW),
    row_of({"model": "moe", "tp": "2x2", "micro_batch_size": "2", "dropout": "yes"}, model=CAPS),
    row_of({"model": "llama", "cp": "ring", "recompute": "full", "samples": "documents"},
           model=CAPS | WINDOW),
    row_of({"model": "llama", "tp": "2", "cp": "ring", "samples": "documents"}, model=SINKS),
    row_of({"model": "llama", "tp": "2 no sp", "cp": "all_gather", "pipeline": "zero_bubble"},
           model=SINKS | WINDOW),
    row_of({"model": "llama", "cp": "a2a", "dp": "2", "recompute": "selective"},
           model=SINKS | WINDOW),
    row_of({"model": "llama", "tp": "4", "zero": "3", "dp": "2", "update": "lamb"}, model=SINKS),
    row_of({"model": "moe", "tp": "2x2", "micro_batch_size": "2", "dropout": "yes"}, model=SINKS),
    row_of({"model": "llama", "tp": "2", "pipeline": "1f1b"}, model=MLA | SINKS),
    row_of({"model": "llama", "tp": "2", "pipeline": "zero_bubble"}, model=CLAMPED),
    row_of({"model": "moe", "tp": "2x2", "micro_batch_size": "2"}, model=CLAMPED | EXPERT_BIASES),
    row_of({"model": "moe", "tp": "2", "cp": "ring", "experts": "ep etp", "zero": "3"},
           model=EXPERT_BIASES),
    row_of({"model": "moe", "pipeline": "interleaved", "experts": "etp", "zero": "1", "dp": "2",
            "dispatcher": "all_gather"}, model=EXPERT_BIASES | {"activation": "gelu"}),
    row_of({"model": "moe", "pipeline": "zero_bubble", "experts": "ep", "recompute": "full",
            "dropout": "yes", "dp": "2"}, model=EXPERT_BIASES | CLAMPED),
    row_of({"model": "llama", "tp": "2 no sp", "pipeline": "zero_bubble", "dropout": "yes"},
           model=SANDWICH),
    row_of({"model": "moe", "tp": "2", "cp": "ring", "experts": "ep etp", "zero": "3"},
           model=SANDWICH | {"residual_scale": 0.4}),
    row_of({"model": "llama", "tp": "2x2", "micro_batch_size": "2", "recompute": "full"},
           model=SANDWICH),
    row_of({"model": "gpt", "tp": "2", "pipeline": "interleaved", "recompute": "selective"},
           model=AFTER),
    row_of({"model": "bert", "tp": "2x2", "micro_batch_size": "2", "dropout": "yes"}, model=AFTER),
    row_of({"model": "gpt", "tp": "2 no sp", "pipeline": "zero_bubble", "dropout": "yes"},
           model=PARALLEL),
    row_of({"model": "llama", "tp": "2", "cp": "ring", "recompute": "selective", "zero": "1"},
           model=PARALLEL | {"parallel_norms": 1, "residual_scale": 0.4}),
    row_of({"model": "moe", "tp": "2", "experts": "ep etp", "zero": "3", "dp": "2"},
           model=PARALLEL | {"parallel_norms": 1}),
    row_of({"model": "llama", "tp": "2x2", "micro_batch_size": "2", "recompute": "full"},
           model=PARALLEL | {"parallel_norms": 1}),
    row_of({"model": "llama", "tp": "2", "cp": "all_gather", "recompute": "selective"},
           model={"rope_interleaved": True}),
    row_of({"model": "llama", "tp": "2", "pipeline": "zero_bubble", "zero": "1"}, model=HEAD_BIAS),
    row_of({"model": "llama", "tp": "2x2", "micro_batch_size": "2", "samples": "weights"},
           model=HEAD_BIAS),
    row_of({"model": "llama", "cp": "ring", "zero": "3", "dp": "2", "update": "lamb"},
           model=HEAD_BIAS),
    row_of({"model": "llama", "tp": "2 no sp", "pipeline": "zero_bubble", "zero": "1"}, model=OLMO),
    row_of({"model": "llama", "tp": "2x2", "micro_batch_size": "2", "recompute": "selective"},
           model=OLMO | {"norm": "layernorm"}),
    row_of({"model": "one key head", "tp": "4", "dp": "2", "zero": "3"}, model=OLMO),
    row_of({"model": "moe", "tp": "2", "cp": "a2a", "experts": "ep etp", "dropout": "yes"},
           model=OLMO),
    row_of({"model": "moe", "tp": "2", "cp": "ring", "experts": "ep etp", "zero": "3"},
           model=FIRST_DENSE),
    row_of({"model": "moe biased", "pipeline": "interleaved", "experts": "ep", "dp": "2"},
           model=FIRST_DENSE),
    row_of({"model": "llama", "tp": "2 no sp", "pipeline": "zero_bubble", "dropout": "yes"},
           model=MLA),
    row_of({"model": "moe", "tp": "2", "cp": "ring", "experts": "ep etp", "zero": "3"}, model=MLA),
    row_of({"model": "llama", "tp": "2", "cp": "a2a", "recompute": "selective"}, model=MLA_PLAIN),
    row_of({"model": "llama", "tp": "4", "dp": "2", "zero": "1", "adapters": "lora"},
           model=MLA_PLAIN),
    row_of({"model": "llama", "tp": "2", "recompute": "full"}, model=MLA | CAPS | OFFSET_ALONE),
    row_of({"model": "llama", "tp": "2 no sp", "cp": "ring", "pipeline": "zero_bubble"},
           model=SANDWICH | OFFSET | CAPS | WINDOW | GEGLU | {"embedding_scale": 4.0}),
    row_of({"model": "one key head", "tp": "4", "dp": "2", "zero": "1"},
           optimizer=MUON | {"muon_split_heads": True, "nesterov": False}),
    row_of({"model": "moe", "tp": "2", "cp": "ring", "pipeline": "1f1b", "experts": "ep etp"},
           optimizer=MUON | {"scale": "spectral", "ns_coefficients": "polar_express"}),
    row_of({"model": "llama", "tp": "2", "zero": "1", "dp": "2"},
           model=MLA | {"init_std": 0.2}, optimizer=MUON | {"muon_split_heads": True}),
    row_of({"model": "moe", "experts": "ep", "zero": "1", "dp": "2", "adapters": "lora"},
           optimizer=MUON),
    row_of({"model": "llama", "tp": "2", "update": "diloco"}, optimizer=MUON),
    row_of({"model": "llama", "tp": "2x2", "micro_batch_size": "2"}, model=MLA),
    row_of({"model": "moe", "tp": "2x2", "experts": "ep", "micro_batch_size": "2", "zero": "1",
            "recompute": "full"}, model=MLA_PLAIN),
    row_of({"model": "llama", "tp": "2x2", "micro_batch_size": "2", "pipeline": "zero_bubble",
            "update": "muon"}, model=MLA | {"init_std": 0.2}),
    row_of({"model": "gpt", "update": "muon"}, parallel={"pp": 4, "stage_layers": [0, 1, 1, 0]}),
    row_of({"model": "moe", "tp": "2", "cp": "ring", "experts": "ep etp", "zero": "1"},
           lora=ADAPTED),
    row_of({"model": "moe", "tp": "2", "experts": "etp", "dp": "2", "zero": "1",
            "recompute": "full", "dispatcher": "all_gather"}, lora=ADAPTED),
    row_of({"model": "moe", "pipeline": "zero_bubble", "experts": "etp", "dp": "2",
            "update": "lamb"}, model={"activation": "gelu"} | EXPERT_BIASES, lora=ADAPTED),
    row_of({"model": "moe early", "tp": "2", "pipeline": "interleaved", "experts": "ep", "dp": "2",
            "buckets": "many"}, lora=FEW_ADAPTED),
    row_of({"model": "moe capped", "cp": "a2a", "experts": "ep", "micro_batch_size": "2",
            "recompute": "selective"}, model=CLAMPED | EXPERT_BIASES, lora=ADAPTED),
    row_of({"model": "bert", "tp": "2 no sp", "cp": "ring", "pipeline": "zero_bubble"},
           model=ROBERTA),
    row_of({"model": "bert", "tp": "2x2", "micro_batch_size": "2", "dropout": "yes", "zero": "3"},
           model=ROBERTA),
    row_of({"model": "bert", "tp": "2 no sp", "cp": "ring", "pipeline": "zero_bubble"},
           model=MODERNBERT),
    row_of({"model": "bert", "tp": "2", "cp": "all_gather", "zero": "3", "dp": "2"},
           model=MODERNBERT),
    row_of({"model": "bert", "tp": "2x2", "micro_batch_size": "2", "recompute": "full"},
           model=MODERNBERT),
    row_of({"model": "bert", "cp": "a2a", "pipeline": "interleaved", "dropout": "yes"},
           model=MODERNBERT),
    row_of({"model": "bert", "tp": "4", "zero": "1", "dp": "2", "recompute": "selective",
            "update": "lamb"}, model=MODERNBERT | {"norm_order": "sandwich"}),
    row_of({"model": "moe", "tp": "2", "experts": "ep etp", "dp": "2", "zero": "1"},
           lora=ADAPTED, optimizer=MUON),
    row_of({"model": "llama", "tp": "2 no sp", "pipeline": "zero_bubble", "adapters": "lora"},
           model=MLA),
    row_of({"model": "llama", "tp": "2 no sp", "dp": "2", "zero": "1", "adapters": "lora"},
           model=MLA_PLAIN),
    row_of({"model": "moe", "tp": "2", "cp": "ring", "experts": "etp", "zero": "1",
            "adapters": "lora"}, model=MLA | {"init_std": 0.2}),
    row_of({"model": "gpt", "tp": "2", "pipeline": "1f1b", "dp": "2", "zero": "1",
            "dropout": "yes"}, train=FROZEN),
    row_of({"model": "llama", "dp": "2", "zero": "3", "recompute": "full"}, train=FROZEN),
    row_of({"model": "gpt", "tp": "2x2", "micro_batch_size": "2"}, train=FROZEN),
    row_of({"model": "moe biased", "tp": "2", "experts": "ep etp", "dp": "2", "zero": "1"},
           train=FROZEN_PARTS),
    row_of({"model": "moe biased", "pipeline": "1f1b", "experts": "ep", "dp": "2", "zero": "3"},
           train=FROZEN_PARTS),
    row_of({"model": "moe biased", "pipeline": "zero_bubble", "experts": "ep", "dp": "2",
            "recompute": "full"}, train=FROZEN),
    row_of({"model": "gpt", "pipeline": "interleaved", "update": "lamb"}, train=FROZEN),
    row_of({"model": "llama", "tp": "2 no sp", "cp": "ring", "update": "muon"}, train=FROZEN),
    row_of({"model": "moe", "tp": "2", "experts": "ep etp", "dp": "2", "zero": "3"},
           optimizer=GROUPED),
    row_of({"model": "llama", "tp": "2", "pipeline": "1f1b", "dp": "2", "zero": "1"},
           optimizer=MUON | GROUPED),
    row_of({"model": "gpt", "cp": "ring", "dp": "2", "zero": "1"}, optimizer=LAMB | GROUPED),
    row_of({"model": "llama", "tp": "2", "pipeline": "1f1b", "dp": "2", "zero": "1"},
           lora=ADAPTED | {"modules_to_save": ["embed_tokens", "lm_head"]}),
    row_of({"model": "gpt", "tp": "2 no sp", "pipeline": "zero_bubble", "dp": "2"},
           lora={"rank": 2, "modules_to_save": ["wte"]}),
]  # fmt: skip

_TABLE = json.loads(ROWS_FILE.read_text())
ROWS = [row_of(levels) for levels in _TABLE["rows"]]
GATE = set(_TABLE["gate"])
