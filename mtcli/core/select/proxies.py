"""Computes proxies of candidates: short vectors whose distances stand for those of gradients.

With probabilities p, one-hot labels y and last hidden states h, the proxy of a sequence is a mean
over its tokens: `gradient` of p - y [V], sketched (CRAIG, arXiv:1906.01827, section 3.4);
`kronecker` of (p - y) h^T [V, D], the gradient of the last layer's weights, sketched; `features`
of h [D]. The `gradient` of a labelled example is p - y [C] itself. Sequences of the same tokens
have the same proxies, bit for bit.
"""

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from mtcli.core.config.errors import failed
from mtcli.core.data.bert.example_rows import ExampleRows
from mtcli.core.data.subset import TokenSequences
from mtcli.core.inference.bert_heads import head_outputs
from mtcli.core.inference.model import InferenceModel
from mtcli.core.model.inputs import make_inputs
from mtcli.core.parallel.collectives import all_gather, all_reduce
from mtcli.core.parallel.vocab_parallel import VocabLoss
from mtcli.core.select.distance_sketch import Sketch
from mtcli.kernels.cross_entropy import row_max
from mtcli.kernels.gemm import DTYPES
from mtcli.kernels.softcap import softcap_slope

Proxy = Literal["gradient", "kronecker", "features"]
WIDTH = 256  # numbers of a sketch: squared distances to 9 %, one standard deviation
CHUNK = 1 << 26  # elements of logits, or of gradients of weights, that are in memory at once
BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}  # of a forward pass
Advance = Callable[[int], object]


class _Output(NamedTuple):
    """The last stage's activations of sequences, and their labels."""

    x_BSD: Tensor  # [b, s, D]; [b, s, D/c] on a grid of tp ranks with c columns
    labels_BS: Tensor


def proxy_width(model: InferenceModel, kind: Proxy) -> int:
    """The numbers of a sequence's proxy."""
    return model.config.model.hidden_size if kind == "features" else _sketch(model, kind).width


def sequence_proxies(
    model: InferenceModel, sequences: TokenSequences, kind: Proxy, advance: Advance
) -> Tensor:
    """The proxies of all candidates: float32 [n, width] on the host, the same on every rank.

    `advance` gets the number of candidates done. Collective. Raises MtcliError (exit 1) where
    they are not finite.
    """
    distinct, text_of = _distinct(sequences)
    advance(len(sequences) - len(distinct))
    proxies = torch.empty(len(distinct), proxy_width(model, kind))
    size = max(1, BATCH_TOKENS[model.groups.device.type] // sequences.seq_len)
    size *= model.groups.layout.dp * model.groups.tp_row.size
    for start in range(0, len(distinct), size):
        some = distinct[start : start + size]
        part = _of_batch(model, sequences.rows(some), kind)
        if not part.isfinite().all():
            first = int(some[int((~part.isfinite()).any(1).nonzero()[0])])
            message = f"the model gives sequence {first} a proxy that is not finite"
            raise failed(message, "check the checkpoint, or select in fp32")
        proxies[start : start + len(some)] = part
        advance(len(some))
    return proxies[torch.from_numpy(text_of)]


def example_proxies(model: InferenceModel, examples: ExampleRows, advance: Advance) -> Tensor:
    """p - y of each example: float32 [n, classes or choices], the same on every rank."""
    size = max(1, BATCH_TOKENS[model.groups.device.type] // examples.seq_len)
    size *= model.groups.layout.dp
    parts = []
    for start in range(0, len(examples), size):
        numbers = range(start, min(start + size, len(examples)))
        batches = [examples.rows(number, 1) for number in numbers]
        for read, output in zip(batches, head_outputs(model, batches), strict=True):
            p_MC, labels = output.logits_MC.softmax(1), torch.from_numpy(read.classes)
            p_MC[torch.arange(len(labels)), labels] -= 1.0
            parts.append(p_MC.float())
            advance(len(labels))
    proxies = torch.cat(parts)[torch.from_numpy(examples.order()).argsort()]
    if not proxies.isfinite().all():
        raise failed("the model gives logits that are not finite", "check the checkpoint")
    return proxies


def _distinct(sequences: TokenSequences) -> tuple[np.ndarray, np.ndarray]:
    """(the first candidate of each distinct text [u], the text of each candidate [n])."""
    text_numbers: dict[bytes, int] = {}
    firsts: list[int] = []
    text_of = np.empty(len(sequences), np.int64)
    for start in range(0, len(sequences), 1024):
        some = np.arange(start, min(start + 1024, len(sequences)))
        for candidate, row in zip(some.tolist(), sequences.rows(some), strict=True):
            key = xxhash.xxh3_128_digest(row)
            if key not in text_numbers:
                text_numbers[key] = len(firsts)
                firsts.append(candidate)
            text_of[candidate] = text_numbers[key]
    return np.array(firsts, np.int64), text_of


def _sketch(model: InferenceModel, kind: Proxy) -> Sketch:
    size = model.vocab_size * (model.config.model.hidden_size if kind == "kronecker" else 1)
    return Sketch(size, WIDTH, model.config.seed)


@torch.no_grad()
def _of_batch(model: InferenceModel, rows: np.ndarray, kind: Proxy) -> Tensor:
    """The proxies of rows [B, s + 1] on every rank, float32.

    Data parallel ranks, and rows of a grid of tp ranks, take different sequences, equally many, as
    their forward passes may share collectives. The last sequence is repeated as padding.
    """
    groups = model.groups
    shares, index = groups.layout.dp * groups.tp_row.size, groups.dp_rank * groups.tp_row.size
    share, index = -(-len(rows) // shares), index + groups.tp_row.rank
    local_rows = np.arange(index * share, (index + 1) * share)
    tokens = torch.from_numpy(rows[np.minimum(local_rows, len(rows) - 1)])
    proxies = torch.zeros(len(rows), proxy_width(model, kind), dtype=torch.float64)
    proxies = proxies.to(groups.device)
    at = 0
    for output in _outputs(model, tokens, torch.from_numpy(local_rows >= len(rows))):
        part = _partial(model, output, kind)
        real = local_rows[at : at + len(part)]
        real = real[real < len(rows)]
        proxies[torch.from_numpy(real).to(groups.device)] += part[: len(real)]
        at += len(part)
    return all_reduce(proxies, groups.world).float().cpu()


def _outputs(model: InferenceModel, tokens: Tensor, padding: Tensor) -> Iterator[_Output]:
    """Yields the outputs of rows [b, s + 1] on ranks of the last stage, else nothing; `padding` [b]
    marks repeated rows."""
    device, pp = model.groups.device, model.groups.layout.pp
    dtype, size = DTYPES[model.config.train.precision], len(tokens)
    size = size // pp if size % pp == 0 else size
    some = [part.to(device) for part in tokens.split(size)]
    filled = padding.to(device)[:, None].expand(-1, tokens.shape[1] - 1).split(size)
    inputs = [
        make_inputs(model.config.model, dtype, part[:, :-1], padding=fills)
        for part, fills in zip(some, filled, strict=True)
    ]
    outputs = model.forward(inputs)
    for x_TD, part in zip(outputs, some, strict=False):  # none but on the last stage
        yield _Output(x_TD.view(len(part), -1, x_TD.shape[1]), part[:, 1:])


def _partial(model: InferenceModel, output: _Output, kind: Proxy) -> Tensor:
    """This rank's summand of the proxies of some sequences: float64 [b, width]."""
    x_BSD, labels_BS = output
    if kind == "features":
        counts = 1.0 if model.groups.tp.rank == 0 else 0.0  # one rank of each replica answers
        return _hidden(model, x_BSD).double().mean(1) * counts
    sketch = _sketch(model, kind)
    proxies = torch.zeros(len(x_BSD), sketch.width, dtype=torch.float64, device=x_BSD.device)
    loss = cast(VocabLoss, model.stages[model.groups.layout.num_stages - 1].output)
    columns, length = len(loss.table.weight), x_BSD.shape[1]  # the same on every rank
    several = max(1, CHUNK // (length * columns))
    for rows in torch.arange(len(x_BSD), device=x_BSD.device).split(several):
        for some in torch.arange(length, device=x_BSD.device).split(max(1, CHUNK // columns)):
            x, labels = x_BSD[rows][:, some], labels_BS[rows][:, some]
            h_BSD = _hidden(model, x) if kind == "kronecker" else None
            proxies[rows] += _sketched(sketch, loss, (x, labels), h_BSD)
    return proxies / length


def _sketched(
    sketch: Sketch, loss: VocabLoss, tokens: tuple[Tensor, Tensor], h_BSD: Tensor | None
) -> Tensor:
    """The sketches of p - y, times hidden states if given, summed over tokens: float64 [b, width].

    `tokens` are activations [b, s, D] and labels [b, s]; p - y has this rank's columns.
    """
    exps_BSV, scales_BS, slopes_BSV = _probabilities(loss, *tokens)
    local_BS, here_BS = loss.shard.owned(tokens[1])
    local_BS, ones_BS = local_BS.where(here_BS, 0), here_BS.to(scales_BS.dtype)
    if slopes_BSV is not None:
        exps_BSV.mul_(slopes_BSV)
        ones_BS = ones_BS * slopes_BSV.gather(2, local_BS[..., None])[..., 0]
    if h_BSD is None:
        errors_BV = (scales_BS[:, None] @ exps_BSV)[:, 0]  # one pass over the probabilities
        errors_BV.scatter_add_(1, local_BS, -ones_BS)
        sketches = errors_BV.new_zeros(len(errors_BV), sketch.width, dtype=torch.float64)
        sketch.add(sketches, errors_BV[:, : loss.shard.valid], loss.shard.first)
        return sketches
    errors_BSV = exps_BSV.mul_(scales_BS[..., None])
    errors_BSV.scatter_add_(2, local_BS[..., None], -ones_BS[..., None])
    return _of_weights(sketch, errors_BSV[..., : loss.shard.valid], h_BSD, loss.shard.first)


def _of_weights(sketch: Sketch, errors_BSV: Tensor, h_BSD: Tensor, first: int) -> Tensor:
    """The sketches of p - y times hidden states, summed over tokens: float64 [b, width]."""
    count, hidden = len(errors_BSV), h_BSD.shape[2]
    sketches = errors_BSV.new_zeros(count, sketch.width, dtype=torch.float64)
    rows, h_BSD = max(1, CHUNK // (count * hidden)), h_BSD.to(errors_BSV.dtype)
    for begin in range(0, errors_BSV.shape[2], rows):
        part = errors_BSV[:, :, begin : begin + rows].transpose(1, 2) @ h_BSD
        sketch.add(sketches, part.flatten(1), (first + begin) * hidden)
    return sketches


def _probabilities(
    loss: VocabLoss, x_BSD: Tensor, labels_BS: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(exp(logits - max) of this rank's columns [b, s, V], 0 in padding ones; each token's factor
    to probabilities [b, s]; capped logits' slopes [b, s, V], or None), in float32 at least."""
    logits_TV, shard = loss.logits(x_BSD.flatten(0, 1)), loss.shard
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    slopes_TV = softcap_slope(logits_TV, loss.cap) if loss.cap else None
    top_T = all_reduce(row_max(logits_TV[:, : shard.valid]), shard.tp, dist.ReduceOp.MAX)
    sums_T, *_ = shard.exp_parts_(logits_TV, top_T, labels_BS.flatten())
    scales_BS = sums_T.reciprocal().view(labels_BS.shape)
    slopes_BSV = None if slopes_TV is None else slopes_TV.unflatten(0, labels_BS.shape)
    return logits_TV.unflatten(0, labels_BS.shape), scales_BS, slopes_BSV


def _hidden(model: InferenceModel, x: Tensor) -> Tensor:
    """Hidden states with all columns [..., D], gathered where a grid of tp ranks shards them."""
    if x.shape[-1] == model.config.model.hidden_size:
        return x
    parts = all_gather(x.flatten(0, -2).T.contiguous(), model.groups.tp)
    return torch.unflatten(parts.T, 0, x.shape[:-1])
