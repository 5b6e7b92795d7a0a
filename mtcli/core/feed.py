"""From samples to a rank's micro-batches, read ahead off the main thread.

Micro-batch m of data rank r is the contiguous block of samples consumed + m * (mbs * dp) + r * mbs
and so on for mbs samples: a global batch holds the same samples on every layout.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from mtcli.core.data.batches import Batches
from mtcli.core.engine import DTYPES
from mtcli.core.model.inputs import Inputs, make_inputs
from mtcli.core.parallel.cp import zigzag
from mtcli.core.parallel.groups import Groups
from mtcli.core.spec.config import RunConfig
from mtcli.core.spec.errors import wrong


class Feed:
    """The micro-batches of this rank, step by step."""

    def __init__(self, batches: Batches, config: RunConfig, groups: Groups) -> None:
        self.batches, self.config, self.groups = batches, config, groups
        self.reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feed")
        self.ahead: tuple[int, Future[np.ndarray]] | None = None
        cp = groups.cp
        positions = zigzag(config.batch.seq_len, cp.size, cp.rank)
        self.positions = positions.to(groups.device)  # of this rank's part of each sequence

    def step(self, step: int, training: bool = True) -> Callable[[int], Inputs]:
        """The micro-batches of step 0, 1, ...; the next step's are read meanwhile."""
        if self.ahead is None or self.ahead[0] != step:
            self.ahead = (step, self.reader.submit(self._read, step))
        samples = self.ahead[1].result()
        if (step + 2) * self.config.batch.global_batch_size <= len(self.batches):
            self.ahead = (step + 1, self.reader.submit(self._read, step + 1))
        return lambda micro_batch: self._inputs(samples, step, micro_batch, training)

    def close(self) -> None:
        """Ends the reader."""
        self.reader.shutdown(cancel_futures=True)

    def _read(self, step: int) -> np.ndarray:
        """This rank's samples of a step: int64 [micro_batches * mbs, seq_len + 1]."""
        starts = range(*self._block(step))
        return np.concatenate([self.batches.batch(s, self._mbs) for s in starts])

    def _block(self, step: int) -> tuple[int, int, int]:
        batch = self.config.batch
        first = step * batch.global_batch_size + self.groups.dp_rank * self._mbs
        return first, (step + 1) * batch.global_batch_size, self._mbs * self.groups.layout.dp

    def _inputs(self, samples: np.ndarray, step: int, micro_batch: int, training: bool) -> Inputs:
        mbs, seq_len = self._mbs, self.config.batch.seq_len
        rows = torch.from_numpy(samples[micro_batch * mbs : (micro_batch + 1) * mbs])
        rows = rows.to(self.groups.device, non_blocking=True)
        positions = self.positions.expand(mbs, -1)
        model, numbers = self.config.model, None
        if training and (model.dropout or model.attention_dropout):
            start, _, stride = self._block(step)
            samples_m = torch.arange(mbs, device=rows.device) + start + micro_batch * stride
            numbers = samples_m[:, None] * seq_len + positions
        return make_inputs(
            model,
            DTYPES[self.config.train.precision],
            rows[:, self.positions],
            labels=rows[:, self.positions + 1],
            positions=positions,
            numbers=numbers,
            aux_scale=1.0 / (self.config.batch.global_batch_size * seq_len) if training else 0.0,
        )

    @property
    def _mbs(self) -> int:
        return self.config.batch.micro_batch_size


def open_feed(config: RunConfig, groups: Groups, *, validation: bool = False) -> Feed:
    """The training (or validation) data of a config.

    Raises MtcliError where there is no data, or its ids do not fit the model's vocabulary.
    """
    data, steps = config.data, config.train.steps
    paths, which, split = data.train, "train", data.split
    if validation:
        steps = config.train.eval_batches
        paths, which, split = data.valid or data.train, "valid", data.split
        if data.valid:
            split = "0,1,0"
    elif data.valid:
        split = "1,0,0"  # data.valid holds nothing back from data.train
    if not paths:
        hint = "name the PREFIX that `mtcli preprocess` wrote: --set 'data.train=[\"data/a\"]'"
        raise wrong("there is no training data", hint, "data.train")
    samples = steps * config.batch.global_batch_size
    batches = Batches(paths, split, which, samples, config.batch.seq_len, config.seed)
    largest = batches.max_token_id()
    if largest is not None and largest >= config.model.vocab_size:
        message = f"the data's token id {largest} is not below vocab_size={config.model.vocab_size}"
        hint = f"--set model.vocab_size={largest + 1}, or preprocess with the model's tokenizer"
        raise wrong(message, hint, "model.vocab_size")
    return Feed(batches, config, groups)
