"""Checks a layout: how a world of ranks may shard a model and its batch.

Another layout cures a broken rule of this module; `suggest.py` searches for the nearest.
"""

from collections.abc import Callable, Iterator
from math import isqrt

from mtcli.core.config.counts import counted
from mtcli.core.config.errors import Problem
from mtcli.core.config.fields import divides, divisors, listing, multiples_around
from mtcli.core.config.fp8 import MULTIPLE, listed, narrow_layers, weight_sizes
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import RunConfig

MOST_NARROW_TERMS = 2**8  # of a sum in bfloat16: the next one may be lost
COLUMNS = "tp/tp_rows"  # what shards heads, ffn and vocabulary where tp ranks form a grid

Rule = Callable[[RunConfig, int], Iterator[Problem]]


def data_parallel_size(config: RunConfig, world: int) -> int:
    """Returns the data parallel size: world / (tp * cp * pp)."""
    p = config.parallel
    return max(1, world // (p.tp * p.cp * p.pp))


def _world_divides(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that tp*cp*pp divides the number of ranks; dp is what is left."""
    p = config.parallel
    used = p.tp * p.cp * p.pp
    if world % used:
        near, cuts = listing(multiples_around(world, used)), divisors(world)
        ones = " ".join(f"--set parallel.{a}=1" for a in ("tp", "cp", "pp") if getattr(p, a) > 1)
        choice = f"choose tp*cp*pp among {listing(cuts)}; for 1: " if len(cuts) > 1 else ""
        yield Problem(
            f"tp*cp*pp = {p.tp}*{p.cp}*{p.pp} = {used} does not divide the world of "
            f"{counted(world, 'rank')}",
            f"run {near} ranks (--nproc), or {choice}{ones}",
            "parallel",
        )


def _experts_fit(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that ep*etp*pp divides the ranks, and ep and etp the experts and their widths."""
    p, m = config.parallel, config.model
    if m.num_experts == 0:
        if p.ep * p.etp > 1:
            message = f"ep={p.ep} etp={p.etp} cut experts, and num_experts=0"
            hint = "set parallel.ep and parallel.etp to 1, or model.num_experts"
            yield Problem(message, hint, "parallel.ep")
        return
    if world % (p.pp * p.ep * p.etp):
        ranks = counted(world, "rank")
        message = f"ep*etp*pp = {p.ep}*{p.etp}*{p.pp} does not divide the world of {ranks}"
        cuts = divisors(max(1, world // p.pp))
        hint = f"choose ep*etp among {listing(cuts)}"
        if cuts == [1]:
            hint = "--set parallel.ep=1 --set parallel.etp=1"
        yield Problem(message, hint, "parallel.ep")
    yield from divides("parallel.ep", p.ep, "model.num_experts", m.num_experts)
    yield from divides("parallel.etp", p.etp, "model.moe_ffn_hidden_size", m.moe_ffn_hidden_size)
    if m.expert_bias:
        yield from divides("parallel.etp", p.etp, "model.hidden_size", m.hidden_size)


def _grid_divides(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that a grid of tp ranks (arXiv:2104.05343) has rows, and can shard hidden columns."""
    p, m = config.parallel, config.model
    if p.tp_mode == "1d":
        return
    side = isqrt(p.tp)
    if not p.tp_rows and side * side != p.tp:
        near, legal = f"tp {side * side} or {(side + 1) ** 2}", listing(divisors(p.tp))
        message = f"tp={p.tp} with tp_mode='2d' is no square"
        yield Problem(message, f"{near}, or parallel.tp_rows among {legal}", "parallel.tp")
    if p.tp_rows and p.tp % p.tp_rows:
        message = f"tp_rows={p.tp_rows} does not divide tp={p.tp}"
        yield Problem(message, listing(divisors(p.tp)), "parallel.tp_rows")
    sides = {"row": p.grid_rows, "column": p.tp // p.grid_rows}
    if p.grid_rows == 1:
        return
    for name, count in sides.items():
        if m.hidden_size % count:
            legal = listing(divisors(m.hidden_size)[:8])
            message = f"{_grid(config)} has {count} {name}s, which do not divide "
            hint = f"{name}s {legal}: panels of hidden columns are not padded"
            yield Problem(f"{message}hidden_size={m.hidden_size}", hint, "parallel.tp")


def _grid_holds_whole_sequences(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that a grid of tp ranks is not combined with context parallelism."""
    p = config.parallel
    if p.grid_rows > 1 and p.cp > 1:
        yield Problem(
            f"{_grid(config)} with cp={p.cp}: its rows hold whole sequences, and attention runs in "
            "each by itself",
            "parallel.cp = 1, or tp_mode '1d'",
            "parallel.cp",
        )


def rows_share_micro_batches(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that the rows of a grid of tp ranks get equal numbers of sequences, and their ranks
    of experts' and latents' tokens."""
    p, m, b = config.parallel, config.model, config.batch
    rows = p.grid_rows
    if rows > 1 and b.micro_batch_size % rows:
        yield Problem(
            f"{_grid(config)} has {rows} rows, which do not divide "
            f"micro_batch_size={b.micro_batch_size}: each row holds other sequences of it",
            f"micro_batch_size {listing(multiples_around(b.micro_batch_size, rows))}",
            "batch.micro_batch_size",
        )
    elif rows > 1 and (m.num_experts or m.mla):
        tokens = b.micro_batch_size // rows * b.seq_len
        dividend = "the tokens of a row's micro-batch"
        yield from divides("parallel.tp", p.tp // rows, dividend, tokens, COLUMNS)


def grids_shard_tokens(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that no setting needs activations that the ranks of a grid would replicate."""
    p = config.parallel
    if p.grid_rows > 1 and not p.sequence_parallel:
        yield Problem(
            f"sequence_parallel=false with {_grid(config)}: between layers its ranks always hold "
            "other sequences and columns, and none replicates activations",
            "parallel.sequence_parallel = true, or tp_mode = '1d'",
            "parallel.sequence_parallel",
        )


def _grid_multiplies_whole_panels(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that a grid of tp ranks multiplies neither in fp8 nor compiled."""
    t = config.train
    if config.parallel.grid_rows == 1:
        return
    if t.precision == "fp8":
        message = f"precision='fp8' with {_grid(config)}: scales are of a layer's operands"
        hint = "train.precision = 'bf16', or tp_mode '1d'"
        yield Problem(f"{message}, and it multiplies panels of them", hint, "train.precision")
    if t.compile:
        message = f"compile=true with {_grid(config)}: collectives of its GEMMs are in no graph"
        yield Problem(message, "train.compile = false, or tp_mode '1d'", "train.compile")


def _grid_takes_no_adapters(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that a grid has no adapters, which it does not support."""
    if config.parallel.grid_rows > 1 and config.lora.rank:
        message = f"lora.rank={config.lora.rank} with {_grid(config)}, which multiplies panels"
        yield Problem(message, "tp_mode '1d', or no adapters", "parallel.tp_mode")


def _grid(config: RunConfig) -> str:
    p = config.parallel
    return f"tp_mode='2d' of {p.grid_rows} x {p.tp // p.grid_rows} ranks"


def uneven_heads(model: ModelConfig, tp: int, name: str = "tp") -> str:
    """Words why tp ranks cannot have equal numbers of query heads; empty where they can.

    A key-value head belongs to one rank, or to tp / num_kv_heads ranks, which shard its columns.
    """
    m = model
    if m.num_kv_heads % tp == 0:
        return ""
    if m.mla:
        return f"{name}={tp} does not divide num_heads={m.num_heads}"
    if tp % m.num_kv_heads:
        return f"{name}={tp} does not divide num_kv_heads={m.num_kv_heads}"
    if m.num_heads % tp:
        return f"{name}={tp} does not divide num_heads={m.num_heads}"
    sharers = tp // m.num_kv_heads
    if m.head_dim % sharers:
        sharing = (
            f"{name}/num_kv_heads = {tp}/{m.num_kv_heads} = {sharers} ranks share a key-value head"
        )
        return f"{sharing} and do not divide head_dim={m.head_dim}"
    return ""


def _tensor_parallel_divides(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks the ranks that share heads: all tp ranks, or those of a row of their grid."""
    p, m = config.parallel, config.model
    if p.makes_no_grid:
        return
    name, tp = COLUMNS if p.grid_rows > 1 else "tp", p.tp // p.grid_rows
    if problem := uneven_heads(m, tp, name):
        legal = [tp for tp in divisors(m.num_heads) if not uneven_heads(m, tp)]
        said = listing(legal) if name == "tp" else f"{name} {listing(legal)}"
        yield Problem(problem, said, "parallel.tp")
    if m.num_experts == 0:
        yield from divides("parallel.tp", tp, "model.ffn_hidden_size", m.ffn_hidden_size, name)
    elif m.shared_expert_ffn_hidden_size:
        dividend = "model.shared_expert_ffn_hidden_size"
        yield from divides("parallel.tp", tp, dividend, m.shared_expert_ffn_hidden_size, name)


def _sequence_divides(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that tp divides a micro-batch's tokens, which sequence parallelism shards."""
    p, b = config.parallel, config.batch
    if p.sequence_parallel and p.grid_rows == 1 and not p.makes_no_grid:
        tokens = b.micro_batch_size * b.seq_len // p.cp
        dividend = "the tokens of a micro-batch"
        alternative = "" if config.model.num_experts else ", or parallel.sequence_parallel = false"
        for problem in divides("parallel.tp", p.tp, dividend, tokens):
            yield problem._replace(hint=problem.hint + alternative)


def context_divides(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that each context parallel rank gets two chunks of a sequence, for equal work."""
    p, m, b = config.parallel, config.model, config.batch
    if p.cp > 1 and b.seq_len % (2 * p.cp):
        message = f"2*cp={2 * p.cp} does not divide seq_len={b.seq_len}: each rank holds two chunks"
        hint = f"seq_len {listing(multiples_around(b.seq_len, 2 * p.cp))}"
        yield Problem(message, hint, "parallel.cp")
    if p.cp > 1 and p.cp_mode == "a2a" and m.num_kv_heads % (p.tp * p.cp):
        yield Problem(
            f"cp_mode='a2a' cuts heads, and tp*cp={p.tp}*{p.cp} does not divide "
            f"num_kv_heads={m.num_kv_heads}",
            f"tp*cp {listing(divisors(m.num_kv_heads))}, or cp_mode 'ring' or 'all_gather'",
            "parallel.cp",
        )


def experts_see_tokens_once(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that experts get each token once: tp copies would add up in gradients."""
    p = config.parallel
    if config.model.num_experts and p.tp > 1 and not p.sequence_parallel:
        yield Problem(
            f"with tp={p.tp} and sequence_parallel=false experts would see tokens {p.tp} times",
            "parallel.sequence_parallel = true, or parallel.tp = 1",
            "parallel.sequence_parallel",
        )


def _layers_fill_stages(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that pp*vpp divides the layers, or that stage_layers sum to them."""
    p, m = config.parallel, config.model
    stages = p.pp * p.vpp
    if p.stage_layers:
        if len(p.stage_layers) != stages or sum(p.stage_layers) != m.num_layers:
            yield Problem(
                f"stage_layers has {len(p.stage_layers)} stages of {sum(p.stage_layers)} layers, "
                f"and the run has pp*vpp={stages} stages of num_layers={m.num_layers}",
                f"give {stages} numbers that sum to {m.num_layers}",
                "parallel.stage_layers",
            )
    elif m.num_layers % stages:
        yield Problem(
            f"pp*vpp={p.pp}*{p.vpp}={stages} does not divide num_layers={m.num_layers}",
            f"choose pp*vpp among {listing(divisors(m.num_layers))}, or set parallel.stage_layers",
            "parallel.pp",
        )


def _schedule_fits(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that vpp is above 1 with the interleaved schedule, and with it alone."""
    p = config.parallel
    if (p.vpp > 1) != (p.schedule == "interleaved"):
        message = f"vpp={p.vpp} with schedule={p.schedule!r}"
        hint = "vpp > 1 takes schedule = 'interleaved', and the other schedules take vpp = 1"
        yield Problem(message, hint, "parallel.schedule")


def _sharding_fits(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that zero=3 is combined with schedules and chunks that FSDP2 can shard."""
    p = config.parallel
    if p.zero == 3 and p.schedule == "zero_bubble":
        yield Problem(
            "zero=3 with schedule='zero_bubble': FSDP2 reduces gradients where a backward ends, "
            "and zero_bubble computes those of weights later",
            "schedule '1f1b', 'interleaved' or 'gpipe', or zero 0 or 1",
            "parallel.zero",
        )
    if p.zero == 3 and p.pp == 1 and p.vpp > 1 and config.model.tie_embeddings:
        message = f"zero=3 with pp=1 and vpp={p.vpp}: two stages of a rank share the tied embedding"
        yield Problem(message, "vpp 1, which computes the same", "parallel.vpp")


def _batch_divides(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that micro_batch_size*dp divides global_batch_size."""
    b, dp = config.batch, data_parallel_size(config, world)
    unit = b.micro_batch_size * dp
    if b.global_batch_size % unit:
        yield Problem(
            f"micro_batch_size*dp = {b.micro_batch_size}*{dp} = {unit} does not divide "
            f"global_batch_size={b.global_batch_size}",
            f"global_batch_size {listing(multiples_around(b.global_batch_size, unit))}",
            "batch.global_batch_size",
        )


def _narrow_sums_add_up(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks sums of bfloat16, of which neighbours differ by up to 1 part in 128: a micro-batch's
    gradient below 1 part in 256 of the sum may leave it where it is."""
    b = config.batch
    terms = b.global_batch_size // (b.micro_batch_size * data_parallel_size(config, world))
    is_narrow = config.train.gradients == "bf16" and config.parallel.zero < 3
    if is_narrow and terms > MOST_NARROW_TERMS:
        message = f"gradients='bf16' of {terms} micro-batches, and a sum in bfloat16 rounds off "
        hint = f"at most {MOST_NARROW_TERMS} micro-batches of a rank, or gradients='fp32'"
        yield Problem(f"{message}what is less than 1/256 of it", hint, "train.gradients")


def _fp8_is_left(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that a layout leaves weights of a size for float8, where the model has such."""
    p, t = config.parallel, config.train
    if t.precision != "fp8":
        return
    unsharded, sharded = (weight_sizes(config.model, tp) for tp in (1, p.tp))
    if narrow_layers(t.fp8_scaling, unsharded) and not narrow_layers(t.fp8_scaling, sharded):
        yield Problem(
            f"tp={p.tp} leaves no weight whose rows and columns are multiples of "
            f"{MULTIPLE[t.fp8_scaling]} (fp8_scaling={t.fp8_scaling!r}): {listed(sharded)}",
            "less tp, or train.precision = 'bf16'",
            "parallel.tp",
        )


LAYOUT_RULES: tuple[Rule, ...] = (
    experts_see_tokens_once,
    _world_divides,
    _experts_fit,
    _grid_divides,
    _grid_holds_whole_sequences,
    _grid_multiplies_whole_panels,
    _grid_takes_no_adapters,
    grids_shard_tokens,
    rows_share_micro_batches,
    _tensor_parallel_divides,
    _sequence_divides,
    context_divides,
    _layers_fill_stages,
    _schedule_fits,
    _sharding_fits,
    _batch_divides,
    _narrow_sums_add_up,
    _fp8_is_left,
)
