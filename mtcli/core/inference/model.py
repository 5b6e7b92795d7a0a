"""Opens a model on this rank: its stages, their weights, and forward passes for evaluation."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from mtcli.core.checkpoint.adapters import base_of
from mtcli.core.checkpoint.blocks import sampled_hash
from mtcli.core.checkpoint.folder import HUGGINGFACE, CheckpointFolder
from mtcli.core.checkpoint.huggingface.json_files import (
    CONFIG_JSON,
    GENERATION_JSON,
    read_json,
)
from mtcli.core.checkpoint.huggingface.multimodal import text_of
from mtcli.core.checkpoint.integrity import verify_weights
from mtcli.core.checkpoint.opening import open_agreed
from mtcli.core.checkpoint.reader import Checkpoint
from mtcli.core.config.errors import visible, wrong
from mtcli.core.config.rules import forward_config, require_causal, require_stored
from mtcli.core.config.schema import RunConfig, StoredDtype
from mtcli.core.config.untrusted import shown
from mtcli.core.data.tokenize import Tokenizer, load_tokenizer
from mtcli.core.inference.scoring import ScoreBatch
from mtcli.core.inference.store_weights import can_pack, store_weights
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import count_parameters, parameters
from mtcli.core.model.block import Block
from mtcli.core.model.build import activation_format, build_stages
from mtcli.core.model.heads import MaskedTokens
from mtcli.core.model.init import load_weights
from mtcli.core.model.inputs import Inputs, KVCache, make_inputs
from mtcli.core.model.slots import SlotPass
from mtcli.core.model.transformer import Stage
from mtcli.core.parallel.collectives import all_reduce, gather_values
from mtcli.core.parallel.groups import Groups, make_groups, world_axis
from mtcli.core.parallel.ownership import unsharded
from mtcli.core.parallel.pipeline import Pipeline
from mtcli.core.parallel.together import together
from mtcli.core.parallel.vocab_parallel import VocabLoss
from mtcli.core.runtime.launch import Runtime
from mtcli.core.schedule.generators import forward_only
from mtcli.kernels.attention.backends import sdpa_backends
from mtcli.kernels.gemm import DTYPES

SCORED_ROWS = 512  # logits at once in evaluation: 256 MiB of float32 at a vocabulary of 128k


class ReadPrefix(NamedTuple):
    """The keys and values of tokens already read, in this rank's layers."""

    length: int
    cache: KVCache


@dataclass(frozen=True)
class InferenceModel:
    """A model on this rank, ready for forward passes; every rank gets the same answers."""

    config: RunConfig
    groups: Groups
    stages: dict[int, Stage]
    weights: StoredDtype | None = None  # None: of the precision

    @property
    def precision(self) -> str:
        """The dtype of computation, and of weights where that is another."""
        precision = self.config.train.precision
        return (
            precision
            if self.weights in (None, precision)
            else f"{precision}, {self.weights} weights"
        )

    @property
    def max_seq_len(self) -> int:
        """The longest context of the model."""
        return self.config.model.max_seq_len

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary, without padding."""
        return self.config.model.vocab_size

    @property
    def cached_bytes(self) -> int:
        """The bytes of a token's keys and values, on the rank that has most of them."""
        blocks = (block for stage in self.stages.values() for block in stage.blocks.values())
        numbers = sum(cast(Block, block).attention.cached_numbers for block in blocks)
        per_rank = self.of_ranks(numbers * DTYPES[self.config.train.precision].itemsize)
        return int(max(per_rank))

    @property
    def is_separable(self) -> bool:
        """Whether tokens do not depend on what else is in their forward pass. Experts with a
        capacity drop tokens by the number of all."""
        return not self.config.model.capacity_factor

    def of_ranks(self, value: Any) -> list[Any]:
        """Returns every rank's JSON value, in the order of ranks. Collective."""
        return gather_values(value, self.groups.world)

    def of_rank_0(self, value: Any) -> Any:
        """Broadcasts rank 0's JSON value to every rank. Collective."""
        return self.of_ranks(value)[0]

    def forward(self, inputs: list[Inputs]) -> list[Tensor]:
        """Last activations [b * s, D] of micro-batches of one shape, on the last stage's ranks;
        else empty."""
        layout = self.groups.layout
        schedule = forward_only(layout.pp, len(inputs), layout.vpp)
        pipeline = Pipeline(self.stages, schedule, self.groups, activation_format(self.config))
        b, s = inputs[0].shape
        outputs: list[Tensor] = []
        with sdpa_backends(self.groups.device, repeats=False):
            pipeline.forward(inputs.__getitem__, b * s, lambda x_TD, _: outputs.append(x_TD))
        return outputs

    @torch.no_grad()
    def read(self, tokens: Tensor, after: ReadPrefix | None = None) -> ReadPrefix:
        """Reads tokens [P], a prefix of many rows, once; `after` is the prefix that precedes
        them."""
        start = 0 if after is None else after.length
        positions = torch.arange(start, start + len(tokens))[None]
        cache, prefix = KVCache(), None if after is None else after.cache
        given = self._inputs(tokens[None], positions=positions, cache=cache, prefix=prefix)
        self.forward([given])
        return ReadPrefix(start + len(tokens), cache if prefix is None else cache.after(prefix))

    @torch.no_grad()
    def score(self, batch: ScoreBatch, after: ReadPrefix | None = None) -> tuple[Tensor, Tensor]:
        """Scores targets: (log-probability of each [N] float32, whether it is the argmax [N] bool).

        Data parallel ranks, and rows of a grid of tp ranks, score different rows of the batch. All
        compute equally many, as their weights may be sharded over each other: missing rows repeat
        the last row, and missing predictions the first.
        """
        (b, s), down = batch.tokens.shape, self.groups.tp_row
        shares = self.groups.layout.dp * down.size
        share, index = -(-b // shares), self.groups.dp_rank * down.size + down.rank
        first = index * share
        numbers = torch.arange(first, first + share)
        local_rows = numbers.clamp(max=b - 1)
        padding = (numbers >= b)[:, None].expand(-1, s)
        if batch.padding is not None:
            padding = padding | batch.padding[local_rows]
        sharers = batch.rows // s // share
        owned = sharers == index
        local = ScoreBatch(
            batch.tokens[local_rows],
            batch.positions[local_rows],
            None if batch.mask is None else batch.mask[local_rows],
            batch.rows[owned] - first * s,
            batch.targets[owned],
            padding,
        )
        scores = torch.zeros(2, len(batch.rows), device=self.groups.device)
        most = int(sharers.bincount().max()) if len(sharers) else 0
        scores[:, owned] = self._score(local, most, None if after is None else after.cache)
        scores = all_reduce(scores, self.groups.world).cpu()
        return scores[0], scores[1] > 0.5

    @torch.no_grad()
    def next_logits(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: KVCache | SlotPass,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """The logits [b, V] that follow the last token of each sequence, on every rank.

        `lengths` [b] are numbers of tokens, in rows that are filled up behind them.
        """
        b, s = tokens.shape
        inputs = self._inputs(tokens, positions=positions, cache=cache)
        ends = torch.arange(b) * s + (s if lengths is None else lengths) - 1
        ends = ends.to(self.groups.device)
        return self._all_logits([x_TD[ends] for x_TD in self.forward([inputs])], b)

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """The logits [b, s, V] in float32 that follow each token of rows [b, s], on every rank."""
        b, s = tokens.shape
        return self._all_logits(self.forward([self._inputs(tokens)]), b * s).view(b, s, -1)

    def _all_logits(self, outputs: list[Tensor], count: int) -> Tensor:
        """The logits [count, V] of the last stage's activations, on every rank."""
        logits = torch.zeros(count, self.vocab_size, device=self.groups.device)
        for x_TD in outputs:  # one, on the last stage
            stage = self._last_stage()
            if self.config.model.head == "mlm":
                x_TD = cast(MaskedTokens, stage.head).transformed(x_TD)
            output = cast(VocabLoss, stage.output)
            logits = output.all_logits(output.logits(x_TD), self.vocab_size).float()
        return all_reduce(logits.contiguous(), self.groups.axes["pp_forward"])

    def _score(self, batch: ScoreBatch, most: int, prefix: KVCache | None) -> Tensor:
        """Scores [2, N]: log-probabilities, and whether greedy; zeros but on the last stage.

        `most` is the largest N of all ranks, to which each pads the logits' GEMM.
        """
        b = len(batch.tokens)
        device, pp = self.groups.device, self.groups.layout.pp
        size = b // pp if b % pp == 0 else b
        micro_batches = []
        for part in (slice(start, start + size) for start in range(0, b, size)):
            mask = None if batch.mask is None else batch.mask[part]
            padding = None if batch.padding is None else batch.padding[part]
            given = {"positions": batch.positions[part], "paths": mask, "padding": padding}
            micro_batches.append(self._inputs(batch.tokens[part], prefix=prefix, **given))
        outputs = self.forward(micro_batches)
        if not outputs:
            return torch.zeros(2, len(batch.rows), device=device)
        output = cast(VocabLoss, self._last_stage().output)  # a language model's has one
        x_TD = torch.cat(outputs)
        scores = torch.zeros(2, len(batch.rows), device=device)
        for start in range(0, most, SCORED_ROWS):
            part = slice(start, start + SCORED_ROWS)
            rows, targets = (x[part].to(device) for x in (batch.rows, batch.targets))
            if len(rows):
                scores[0, part], scores[1, part] = output.score(output.logits(x_TD[rows]), targets)
            else:
                output.logits(x_TD[:1])
        return scores * float(self.groups.tp.rank == 0)  # one rank of each replica answers

    def _inputs(self, tokens: Tensor, **fields: Any) -> Inputs:
        device = self.groups.device
        moved: dict[str, Any] = {
            k: v.to(device) if isinstance(v, Tensor) else v for k, v in fields.items()
        }
        dtype = DTYPES[self.config.train.precision]
        return make_inputs(self.config.model, dtype, tokens.to(device), **moved)

    def _last_stage(self) -> Stage:
        return self.stages[self.groups.layout.num_stages - 1]


@dataclass(frozen=True)
class OpenModel:
    """A checkpoint opened for evaluation or generation."""

    scorer: InferenceModel
    tokenizer: Tokenizer | None
    checkpoint: Checkpoint

    def require_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer. Raises MtcliError where the checkpoint has none."""
        if self.tokenizer is None:
            hint = "copy its tokenizer.json there, or pass --tokenizer where the command takes it"
            raise wrong(f"{self.checkpoint.folder} holds no tokenizer", hint)
        return self.tokenizer

    def identity(self) -> str:
        """A hash of the weights' files, of the computation's settings and of the tokenizer,
        independent of the layout.

        It includes sizes and times of files, as the hashes of a folder without a manifest are of
        samples.
        """
        config, stored = self.scorer.config, []
        model, train = config.model.model_dump_json(), config.train
        for part in (self.checkpoint, base_of(self.checkpoint)):
            files = sorted(path for path in part.folder.iterdir() if path.is_file())
            stats = [(file.name, status.st_size, status.st_mtime_ns)
                     for file in files for status in [file.stat()]]  # fmt: skip
            readable = [file for file in files if os.access(file, os.R_OK)]
            stored += [str(part.folder.resolve()), stats, sampled_hash(readable)]
        tokenizer = None if self.tokenizer is None else self.tokenizer.sha256
        facts = stored, model, self.scorer.precision, train.matmul, tokenizer
        return sha256(repr(facts).encode()).hexdigest()[:32]

    def facts(self) -> dict[str, Any]:
        """The model's sizes and layout, for reports."""
        model, layout = self.scorer.config.model, self.scorer.groups.layout
        return {
            "model": {
                "architecture": model.architecture,
                "num_parameters": count_parameters(model),
                "num_layers": model.num_layers,
                "hidden_size": model.hidden_size,
                "vocab_size": model.vocab_size,
                "max_seq_len": model.max_seq_len,
                "precision": self.scorer.precision,
            },
            "layout": {
                "world": layout.world,
                "tp": layout.tp,
                "pp": layout.pp,
                "dp": layout.dp,
            },
        }

    def end_ids(self) -> frozenset[int]:
        """The tokens that end a text: those of the weights' Hugging Face folder, else the
        tokenizer's end of document."""
        ids, tokenizer = end_ids(self.checkpoint), self.require_tokenizer()
        if ids is None:
            return frozenset() if tokenizer.eod_id is None else frozenset([tokenizer.eod_id])
        return ids


def open_model(
    path: str,
    overrides: Sequence[str],
    runtime: Runtime,
    encoders: bool = False,
    base: str | None = None,
    weights: StoredDtype | None = None,
) -> OpenModel:
    """Opens an mtcli checkpoint, a run folder or a Hugging Face folder, on any layout. `base` is
    the new folder of weights under adapters, if they were moved.

    `overrides` are `section.field=value`, of the parallel and train sections. Weights are computed
    in float32 unless train.precision says otherwise, and kept in the dtype `weights`: of fp32,
    packed for the CPU if it multiplies them. Raises MtcliError for an illegal layout, for bytes
    that do not match their hashes, and for a model that is not causal, which predicts no next
    token; with `encoders` such models are opened too.
    """
    world = world_axis(runtime.rank, runtime.world, runtime.recorder)
    checkpoint = open_agreed(Path(path), world, base)
    if not (encoders and checkpoint.model.head != "lm"):
        require_causal(path, checkpoint.model)
    together(world, lambda: verify_weights(checkpoint, runtime.rank, runtime.world))
    if checkpoint.replicas > 1 and runtime.rank == 0:
        sys.stderr.write(visible(f"note: {checkpoint.averaging}\n"))
    scorer = open_inference_model(checkpoint, overrides, runtime, weights)
    folder = checkpoint.tokenizer_folder
    tokenizer = None if folder is None else load_tokenizer(folder)
    return OpenModel(scorer, tokenizer, checkpoint)


def open_inference_model(
    checkpoint: Checkpoint,
    overrides: Sequence[str],
    runtime: Runtime,
    weights: StoredDtype | None = None,
) -> InferenceModel:
    """Opens a checkpoint's model, causal or not, for forward passes; see `open_model`."""
    config = forward_config(checkpoint.model, overrides, runtime.world)
    require_stored(weights, config, runtime.device.type)
    if weights == "fp32" and not can_pack(config, runtime.device):
        weights = None
    layout = ParallelLayout.of(config.parallel, runtime.world)
    timeout = config.train.timeout
    groups = make_groups(layout, runtime.rank, runtime.device, timeout, runtime.recorder)
    stages = build_stages(config, groups)
    load_weights(unsharded(stages, parameters(config.model)), checkpoint, config.model, groups)
    for stage in stages.values():
        stage.requires_grad_(False)
        if weights is not None:
            store_weights(stage, weights)
    return InferenceModel(config, groups, stages, weights)


def end_ids(checkpoint: Checkpoint | CheckpointFolder) -> frozenset[int] | None:
    """Reads the end ids of generation_config.json, or else of config.json, as transformers does:
    one, several or none. None for weights without either file.

    Raises MtcliError where the file is damaged, or an id is invalid.
    """
    is_theirs = checkpoint.format == "hf"
    folder = checkpoint.folder if is_theirs else checkpoint.folder / HUGGINGFACE
    path = next(
        (folder / n for n in (GENERATION_JSON, CONFIG_JSON) if (folder / n).is_file()), None
    )
    if path is None:
        return None
    value = text_of(read_json(path), path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(id, int) and not isinstance(id, bool) for id in ids):
        message = f"{path}: eos_token_id={shown(value)} is no token id"
        raise wrong(message, "an id, a list of ids, or null")
    return frozenset(ids)
