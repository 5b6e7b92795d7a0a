"""Models small enough to train in a blink, configs of their runs, and data, in memory or not."""

import json

import numpy as np
from indexed_dataset import write_dataset

from mtcli.core.config.loading import config_of, dump_toml
from mtcli.core.data.bert.row_format import EncoderRows
from mtcli.core.data.indexed import token_dtype

GPT = {
    "architecture": "gpt",
    "num_layers": 4,
    "hidden_size": 16,
    "num_heads": 4,
    "vocab_size": 101,  # of 128 rows of a shard: with tp=2 the second shard is all padding
    "max_seq_len": 16,
}
LLAMA = {
    "architecture": "llama",
    "num_layers": 4,
    "hidden_size": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_hidden_size": 24,
    "vocab_size": 150,  # of 256 rows: with tp=2 the second shard holds 22 and 106 of padding
    "max_seq_len": 16,
}
MOE = LLAMA | {
    "architecture": "mixtral",
    "num_layers": 2,
    "num_experts": 4,
    "top_k": 2,
    "moe_ffn_hidden_size": 12,
    "sequence_aux_loss_coeff": 0.01,
    "z_loss_coeff": 0.001,
}
BIASED = MOE | {
    "num_experts": 8,
    "router_groups": 4,
    "router_top_groups": 2,
    "router_score": "sigmoid",
    "router_bias_update_rate": 0.01,
}
BERT = GPT | {"architecture": "bert", "num_layers": 2, "causal": False, "norm_eps": 1e-12}
CLASSIFYING = {"head": "classification", "num_labels": 3}
CHOOSING = {"head": "multiple_choice"}
DROPPING = {"dropout": 0.2, "attention_dropout": 0.1}
DOCUMENTS = {"document_mask": True, "document_positions": True}
BATCH = {"seq_len": 8, "micro_batch_size": 1, "global_batch_size": 4}


def run_config(model=GPT, overrides=(), **sections):
    """The config of a tiny run; each section is merged over the tiny defaults."""
    table = {
        "seed": 7,
        "model": dict(model),
        "batch": BATCH,
        "optimizer": {"lr": 3e-3, "warmup_steps": 2},
        "train": {"steps": 20, "device": "cpu"},
    }
    for section, values in sections.items():
        table[section] = table.get(section, {}) | values
    return config_of(table, overrides)


def write_run(folder, model=GPT, **sections):
    """Writes documents and a run's config into a folder; returns the config's file.

    Its run folder is folder/run, where `sections`, as of `run_config`, name no other.
    """
    write_dataset(folder / "data", documents(), token_dtype(GPT["vocab_size"]))
    sections["data"] = {"train": [str(folder / "data")]} | sections.get("data", {})
    sections["train"] = {"output": str(folder / "run")} | sections.get("train", {})
    (folder / "run.toml").write_text(dump_toml(run_config(model, **sections)))
    return folder / "run.toml"


def documents(count=64, vocab=101, length=60, seed=0):
    """Documents in which the next token is mostly the last one plus three: easy to learn."""
    random = np.random.default_rng(seed)
    starts = random.integers(0, vocab, (count, 1))
    rows = (starts + 3 * np.arange(length)) % vocab
    noise = random.random((count, length)) < 0.1
    return np.where(noise, random.integers(0, vocab, (count, length)), rows)


class Samples:
    """Batches in memory: sample i is a function of i alone."""

    def __init__(self, config, count=10_000):
        self.rows = documents(256, config.model.vocab_size, config.batch.seq_len + 1)
        ends = np.random.default_rng(1).random(self.rows.shape) < 0.3
        ends[:, 0] = False
        self.row_documents = ends.cumsum(1, dtype=np.int32)
        self.count = count

    def __len__(self):
        return self.count

    def batch(self, start, count):
        return self.rows[np.arange(start, start + count) % len(self.rows)]

    def loss_weights(self, start, count):
        return None

    def padding(self, start, count):
        return None

    def documents(self, start, count):
        return self.row_documents[np.arange(start, start + count) % len(self.rows)]


class EncoderSamples:
    """Rows of an encoder in memory: 1 to 4 sequences each, or two questions of 2 choices.

    Of four rows in turn one has no predicted token and no label of a sequence.
    """

    def __init__(self, config, count=10_000):
        self.config, self.count, self.size = config, count, config.batch.seq_len

    def __len__(self):
        return self.count

    def rows(self, start, count):
        model, size, parts = self.config.model, self.size, []
        for number in range(start, start + count):
            random, row = np.random.default_rng(number), number - start
            chooses = model.head == "multiple_choice"
            ends = np.sort(random.choice(np.arange(1, size), 3 if chooses else number % 4, False))
            documents = np.searchsorted(ends, np.arange(size), side="right").astype(np.int32)
            tokens = random.integers(0, model.vocab_size, (3, size))
            weights = (random.random(size) < 0.3) * (number % 4 > 0)
            firsts = np.append(0, ends)
            labels = len(firsts) // 2 if chooses else len(firsts)
            classes = model.num_labels if model.head == "classification" else 2
            parts.append(
                [
                    *(
                        tokens[:1],
                        tokens[1:2] % max(1, model.token_types),
                        documents[None],
                        tokens[2:],
                    ),
                    *(weights[None].astype(np.float32), firsts + row * size),
                    random.integers(0, classes, labels),
                    np.full(labels, number % 4 > 0, np.float32) * random.integers(1, 3, labels),
                ]
            )
        arrays = (np.concatenate(column) for column in zip(*parts, strict=True))
        return EncoderRows(*arrays)


class Weighted(Samples):
    """Samples with random loss weights, among them labels, halves and whole samples without any.

    Of global batches of 4 by turns one data rank of 2, and the first micro-batches, have none. Some
    of the labels without weight, and two whole samples of 8, are padding.
    """

    def loss_weights(self, start, count):
        ids = np.arange(start, start + count) % len(self.rows)
        random = np.random.default_rng(2).random((2, len(self.rows), self.rows.shape[1] - 1))
        weights = (2.0 * random[0] * (random[1] < 0.6)).astype(np.float32)
        weights[2::8, : weights.shape[1] // 2] = 0.0
        weights[6::8, :-1] = 0.0
        weights[np.isin(np.arange(len(weights)) % 8, [1, 3, 4, 5])] = 0.0
        return weights[ids]

    def padding(self, start, count):
        ids = np.arange(start, start + count) % len(self.rows) % 8
        padding = np.zeros((count, self.rows.shape[1] - 1), bool)
        padding[ids == 2, : padding.shape[1] // 2] = True
        padding[np.isin(ids, [1, 3])] = True
        return padding


def metrics(folder):
    """The records of a run's steps, in the order in which they were written."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
