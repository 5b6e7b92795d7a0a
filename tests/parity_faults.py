"""Faults to plant, one line each: what the parity table has to notice, and on which rows.

`python tests/plant_faults.py` plants each in a copy of the package and runs rows on it.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple


class Fault(NamedTuple):
    """One line of the package made wrong, and the rows that can tell: `on` is asked of `facts`."""

    what: str
    file: str  # under mtcli/core
    old: str
    new: str
    on: Callable[[SimpleNamespace], bool]


def facts(row):
    """What the rows of a fault are told by: model m, parallel p, batch b, dp and dropout."""
    config = row.config()
    m, p = config.model, config.parallel
    dp = row.world // (p.tp * p.cp * p.pp)
    return SimpleNamespace(
        m=m, p=p, b=config.batch, dp=dp, world=row.world,
        moe=m.num_experts > 0, dropout=m.attention_dropout > 0,
        lamb=config.optimizer.name == "lamb",
        no_sp=p.tp > 1 and not p.sequence_parallel, sp=p.tp > 1 and p.sequence_parallel,
    )  # fmt: skip


# fmt: off
FAULTS = [
    Fault("wrong group: tp sums over the data axis", "parallel/groups.py",
        "{name: _groups(layout, own) for name, own in AXES.items()}",
        '{n: _groups(layout, ("dp",) if n == "tp" else own) for n, own in AXES.items()}',
        lambda f: f.p.tp == f.dp > 1),
    Fault("wrong group: experts' gradients over the attention grid", "spec/sharding.py",
        "grid = layout.experts if self.is_expert else layout.attention",
        "grid = layout.attention",
        lambda f: f.p.ep * f.p.etp > 1),
    Fault("missing reduction: norm gradients not summed over tp", "spec/sharding.py",
        "return axes if sequence_parallel else tuple(", "return tuple(",
        lambda f: f.sp),
    Fault("one reduction too many: norm gradients summed over tp", "spec/sharding.py",
        'return axes if sequence_parallel else tuple(axis for axis in axes if axis != "tp")',
        "return axes",
        lambda f: f.no_sp),
    Fault("missing reduction: the identity for f's backward", "parallel/collectives.py",
        "copy_in     = _differentiable(_identity,       _summed)",
        "copy_in     = _differentiable(_identity,       _identity)",
        lambda f: f.no_sp),
    Fault("wrong transpose: g's backward sums", "parallel/collectives.py",
        "sum_out     = _differentiable(_summed,         _identity)",
        "sum_out     = _differentiable(_summed,         _summed)",
        lambda f: f.no_sp),
    Fault("missing reduction: reduce-scatter keeps its own part", "parallel/collectives.py",
        "return parts.view(axis.size, mine, *x.shape[1:]).sum(0)",
        "return parts.view(axis.size, mine, *x.shape[1:])[axis.rank]",
        lambda f: f.p.etp > 1 and f.p.dispatcher == "all_to_all"),
    Fault("missing reduction: a tied embedding's two copies", "parallel/dp.py",
        'all_reduce(views[ownership.tied], ownership.groups.axes["ends"])', "pass",
        lambda f: f.p.pp > 1 and f.m.tie_embeddings),
    Fault("early reduction: a bucket leaves before its last micro-batch", "parallel/dp.py",
        "if stage in self.armed:", "if True:",
        lambda f: f.p.zero < 3 and f.dp * f.p.cp > 1 and f.b.micro_batch_size * f.dp < 4),
    Fault("missing gather: zero = 1 keeps updated rows to itself", "trainer.py",
        "self.gradients.share_parameters()", "pass",
        lambda f: f.p.zero == 1 and f.dp * f.p.cp > 1),
    Fault("wrong group: zero = 1 shares rows where there is one owner", "parallel/dp.py",
        "for bucket in self.buckets if bucket.owners.size > 1]",
        'for bucket in self.buckets if bucket.owners.name != "alone"]',
        lambda f: f.p.zero == 1 and f.world == 1),
    Fault("wrong scale: zero = 3 averages gradients", "parallel/zero.py",
        "module.set_gradient_divide_factor(1.0)", "module.set_gradient_divide_factor(2.0)",
        lambda f: f.p.zero == 3),
    Fault("missing merge: ring attention without its later hops", "parallel/cp.py",
        "merge_(mixed[:, :, at], lse[:, :, at], part, part_lse)",
        "hop or merge_(mixed[:, :, at], lse[:, :, at], part, part_lse)",
        lambda f: f.p.cp > 1 and f.p.cp_mode == "ring" and not f.dropout),
    Fault("wrong order: gathered keys as the ranks hold them", "parallel/cp.py",
        "return parts[sequence_order(parts.shape[0], axis)].transpose(0, 2)",
        "return parts.transpose(0, 2)",
        lambda f: f.p.cp > 1 and (f.p.cp_mode == "all_gather" or f.dropout)),
    Fault("wrong order: Ulysses' way back", "parallel/cp.py",
        "back = torch.argsort(sequence_order(s, axis))", "back = sequence_order(s, axis)",
        lambda f: f.p.cp > 1 and f.p.cp_mode == "a2a" and not f.dropout),
    Fault("wrong slice: every context rank holds the first chunks", "parallel/cp.py",
        "return torch.cat([chunks[rank], chunks[2 * axis_size - 1 - rank]])",
        "return torch.cat([chunks[0], chunks[2 * axis_size - 1]])",
        lambda f: f.p.cp > 1),
    Fault("wrong scale: the mean over a rank's own sequences", "trainer.py",
        "scale=gradient_scale,", "scale=gradient_scale * self.layout.dp,",
        lambda f: f.dp > 1),
    Fault("wrong scale: the loss counted once per tp rank", "trainer.py",
        "mine = loss_sum if self.groups.tp.rank == 0 else 0.0", "mine = loss_sum",
        lambda f: f.p.tp > 1),
    Fault("wrong slice: positions and masks of another tp rank", "parallel/build.py",
        "return x.tensor_split(tp.size)[tp.rank] if tp.size > 1 else x",
        "return x.tensor_split(tp.size)[0] if tp.size > 1 else x",
        lambda f: f.sp and (f.dropout or f.m.position == "learned")),
    Fault("wrong slice: a vocabulary shard that starts at row 0", "parallel/tp.py",
        "self.first, self.valid = box.start[0], box.size[0]",
        "self.first, self.valid = 0, box.size[0]",
        lambda f: f.p.tp > 1),
    Fault("wrong slice: rank 0's initial weights everywhere", "parallel/ownership.py",
        "described.blocks(groups.layout, groups.rank, self.rows)",
        "described.blocks(groups.layout, 0, self.rows)",
        lambda f: f.p.tp * f.p.ep * f.p.etp > 1),
    Fault("padding counted: padded logits in the softmax", "parallel/tp.py",
        "exp_and_target_(logits_TV, top_T, local_T, self.valid)",
        "exp_and_target_(logits_TV, top_T, local_T, logits_TV.shape[1])",
        lambda f: f.p.tp > 1),
    Fault("wrong mask: attention dropout by the local head", "model/attention.py",
        "torch.arange(q.shape[1], device=q.device) + self.tp_rank * q.shape[1]",
        "torch.arange(q.shape[1], device=q.device)",
        lambda f: f.dropout and f.p.tp > 1),
    Fault("wrong mask: dropout by the local sample", "feed.py",
        "ids = torch.arange(first, first + mbs, device=rows.device)",
        "ids = torch.arange(mbs, device=rows.device)",
        lambda f: f.dropout and f.b.micro_batch_size > 1),
    Fault("double count: the norm counts replicas on every rank", "parallel/ownership.py",
        "return mine and not self.is_second_copy(name)",
        "return not self.is_second_copy(name)",
        lambda f: f.p.tp > 1 or (f.dp > 1 and not f.p.zero)),
    Fault("double count: the norm counts both copies of a tied embedding", "parallel/ownership.py",
        "return mine and not self.is_second_copy(name)",
        "return mine",
        lambda f: f.p.pp > 1 and f.m.tie_embeddings),
    Fault("missing reduction: LAMB's norms of a rank's own parts", "parallel/whole.py",
        "return all_reduce(every, self.world)[self.rows]", "return every[self.rows]",
        lambda f: f.lamb and (f.p.tp * f.p.ep * f.p.etp > 1 or f.dp > 1 and f.p.zero)),
    Fault("wrong hop: every tp rank sends the first part", "parallel/pp.py",
        "part = flat[self.tp.rank * size : (self.tp.rank + 1) * size]", "part = flat[:size]",
        lambda f: f.no_sp and f.p.pp > 1),
    Fault("wrong scale: a gradient doubles at every hop back", "parallel/pp.py",
        "self.hops.send(op, x.grad)", "self.hops.send(op, x.grad * 2)",
        lambda f: f.p.pp * f.p.vpp > 1),
    Fault("lost work: the split backward's weight halves", "parallel/split.py",
        "self.pending.append(partial(left.backward, left.detach()))",
        "pass",
        lambda f: f.p.schedule == "zero_bubble"),
    Fault("wrong batch: every data rank reads the same samples", "feed.py",
        "first = step * size + self.groups.dp_rank * self._mbs", "first = step * size",
        lambda f: f.dp > 1),
    Fault("wrong order: experts' results as they were computed", "parallel/ep.py",
        "segments.sum((0, 1)).tolist()), back)", "segments.sum((0, 1)).tolist()), order)",
        lambda f: f.p.ep * f.p.etp > 1 and f.p.dispatcher == "all_to_all"),
    Fault("wrong slice: every rank takes the first experts' tokens", "parallel/ep.py",
        "local = all_gather(routing.experts, axis) - ep.rank * per_rank",
        "local = all_gather(routing.experts, axis)",
        lambda f: f.p.ep > 1 and f.p.dispatcher == "all_gather"),
    Fault("wrong group: capacity is a context rank's own", "model/router.py",
        "limit = self._limit(scores_bsE.shape[1])",
        "limit = self._limit(scores_bsE.shape[1] // self.build.groups.cp.size)",
        lambda f: f.m.capacity_factor > 0 and f.p.cp > 1),
    Fault("wrong scope: a sequence's balance over its whole micro-batch", "model/router.py",
        "if inputs.shape[0] > 1 else None", "if inputs.shape[0] > 9 else None",
        lambda f: f.m.sequence_aux_loss_coeff > 0 and f.b.micro_batch_size > 1),
]
# fmt: on
