"""The cross-field rules: one small function per rule, all problems reported at once."""

from collections.abc import Callable, Iterator, Sequence

from mtcli.core.spec.config import RunConfig
from mtcli.core.spec.errors import MtcliError, Problem
from mtcli.core.spec.load import read_config

Rule = Callable[[RunConfig, int], Iterator[Problem]]


def problems(config: RunConfig, world: int) -> list[Problem]:
    """Every rule that `config` breaks on `world` ranks."""
    return [problem for rule in RULES for problem in rule(config, world)]


def load_checked(source: str, overrides: Sequence[str], world: int) -> RunConfig:
    """The run config of a TOML file, run folder or preset, legal on `world` ranks.

    Raises MtcliError with every problem at once: unknown keys, illegal values and broken rules.
    """
    config, found = read_config(source, overrides)
    if config is not None:
        found = found + problems(config, world)
    if config is None or found:
        raise MtcliError(*found)
    return config


def require(config: RunConfig, world: int) -> None:
    """Raises MtcliError with every rule that `config` breaks on `world` ranks."""
    if broken := problems(config, world):
        raise MtcliError(*broken)


def data_parallel_size(config: RunConfig, world: int) -> int:
    """What the other axes leave of the world: world / (tp * cp * pp)."""
    p = config.parallel
    return max(1, world // (p.tp * p.cp * p.pp))


def _world_divides(config: RunConfig, world: int) -> Iterator[Problem]:
    p = config.parallel
    used = p.tp * p.cp * p.pp
    if world % used:
        above = -(-world // used) * used
        near = f"{world - world % used} or {above}" if world > used else f"{used}"
        yield Problem(
            f"tp*cp*pp = {p.tp}*{p.cp}*{p.pp} = {used} does not divide the world of {world} ranks",
            f"run {near} ranks (--nproc), or choose tp*cp*pp among {listing(divisors(world))}",
            "parallel",
        )


def _experts_fit(config: RunConfig, world: int) -> Iterator[Problem]:
    p, m = config.parallel, config.model
    if m.num_experts == 0:
        if p.ep * p.etp > 1:
            yield Problem(
                f"ep={p.ep} etp={p.etp} cut experts, and num_experts=0",
                "set parallel.ep and parallel.etp to 1, or model.num_experts",
                "parallel.ep",
            )
        return
    if world % (p.pp * p.ep * p.etp):
        yield Problem(
            f"ep*etp*pp = {p.ep}*{p.etp}*{p.pp} does not divide the world of {world} ranks",
            f"choose ep*etp among {listing(divisors(max(1, world // p.pp)))}",
            "parallel.ep",
        )
    yield from _divides("parallel.ep", p.ep, "model.num_experts", m.num_experts)
    yield from _divides("parallel.etp", p.etp, "model.moe_ffn_hidden_size", m.moe_ffn_hidden_size)


def _tensor_parallel_divides(config: RunConfig, world: int) -> Iterator[Problem]:
    p, m = config.parallel, config.model
    yield from _divides("parallel.tp", p.tp, "model.num_kv_heads", m.num_kv_heads)
    if m.num_experts == 0:
        yield from _divides("parallel.tp", p.tp, "model.ffn_hidden_size", m.ffn_hidden_size)
    elif m.shared_expert_ffn_hidden_size:
        name = "model.shared_expert_ffn_hidden_size"
        yield from _divides("parallel.tp", p.tp, name, m.shared_expert_ffn_hidden_size)


def _sequence_divides(config: RunConfig, world: int) -> Iterator[Problem]:
    p, b = config.parallel, config.batch
    if p.sequence_parallel:
        tokens = b.micro_batch_size * b.seq_len // p.cp
        yield from _divides("parallel.tp", p.tp, "the tokens of a micro-batch", tokens)


def _context_divides(config: RunConfig, world: int) -> Iterator[Problem]:
    p, m, b = config.parallel, config.model, config.batch
    if p.cp > 1 and b.seq_len % (2 * p.cp):
        near = sorted(
            {max(1, b.seq_len // (2 * p.cp)) * 2 * p.cp, -(-b.seq_len // (2 * p.cp)) * 2 * p.cp}
        )
        yield Problem(
            f"2*cp={2 * p.cp} does not divide seq_len={b.seq_len}: each rank holds two chunks",
            f"seq_len {listing(near)}",
            "parallel.cp",
        )
    if p.cp > 1 and p.cp_mode == "a2a" and m.num_kv_heads % (p.tp * p.cp):
        yield Problem(
            f"cp_mode='a2a' cuts heads, and tp*cp={p.tp}*{p.cp} does not divide "
            f"num_kv_heads={m.num_kv_heads}",
            f"tp*cp {listing(divisors(m.num_kv_heads))}, or cp_mode 'ring' or 'all_gather'",
            "parallel.cp",
        )


def _heads(config: RunConfig, world: int) -> Iterator[Problem]:
    m = config.model
    if m.num_heads % m.num_kv_heads:
        yield Problem(
            f"num_kv_heads={m.num_kv_heads} does not divide num_heads={m.num_heads}",
            listing(divisors(m.num_heads)),
            "model.num_kv_heads",
        )
    if m.position == "rope" and m.head_dim % 2:
        yield Problem(
            f"head_dim={m.head_dim} is odd and rotary positions turn pairs",
            f"{m.head_dim - 1} or {m.head_dim + 1}",
            "model.head_dim",
        )


def _experts_are_whole(config: RunConfig, world: int) -> Iterator[Problem]:
    m = config.model
    if m.top_k > m.num_experts or (m.num_experts and not m.top_k):
        yield Problem(
            f"top_k={m.top_k} of num_experts={m.num_experts} experts",
            f"1 to {m.num_experts}" if m.num_experts else "0 where there are no experts",
            "model.top_k",
        )
    if m.num_experts:
        yield from _divides("model.router_groups", m.router_groups, "num_experts", m.num_experts)
    if m.router_top_groups > m.router_groups:
        yield Problem(
            f"router_top_groups={m.router_top_groups} of router_groups={m.router_groups} groups",
            f"1 to {m.router_groups}",
            "model.router_top_groups",
        )
    if m.pad_to_capacity and not m.capacity_factor:
        yield Problem(
            "pad_to_capacity=true with capacity_factor=0.0, which sets no capacity",
            "model.capacity_factor of 1.0 or more, or pad_to_capacity=false",
            "model.pad_to_capacity",
        )


def _experts_see_tokens_once(config: RunConfig, world: int) -> Iterator[Problem]:
    p = config.parallel
    if config.model.num_experts and p.tp > 1 and not p.sequence_parallel:
        yield Problem(
            f"with tp={p.tp} and sequence_parallel=false experts would see tokens {p.tp} times",
            "parallel.sequence_parallel = true, or parallel.tp = 1",
            "parallel.sequence_parallel",
        )


def _layers_fill_stages(config: RunConfig, world: int) -> Iterator[Problem]:
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
    p = config.parallel
    if (p.vpp > 1) != (p.schedule == "interleaved"):
        yield Problem(
            f"vpp={p.vpp} with schedule={p.schedule!r}",
            "vpp > 1 takes schedule = 'interleaved', and the other schedules take vpp = 1",
            "parallel.schedule",
        )


def _batch_divides(config: RunConfig, world: int) -> Iterator[Problem]:
    b, dp = config.batch, data_parallel_size(config, world)
    unit = b.micro_batch_size * dp
    if b.global_batch_size % unit:
        near = sorted(
            {max(unit, b.global_batch_size // unit * unit), -(-b.global_batch_size // unit) * unit}
        )
        yield Problem(
            f"micro_batch_size*dp = {b.micro_batch_size}*{dp} = {unit} does not divide "
            f"global_batch_size={b.global_batch_size}",
            f"global_batch_size {listing(near)}",
            "batch.global_batch_size",
        )


def _sequence_fits(config: RunConfig, world: int) -> Iterator[Problem]:
    m, b = config.model, config.batch
    if m.position == "learned" and b.seq_len > m.max_seq_len:
        yield Problem(
            f"seq_len={b.seq_len} exceeds the learned positions, max_seq_len={m.max_seq_len}",
            f"batch.seq_len of at most {m.max_seq_len}",
            "batch.seq_len",
        )


def _curve_fits(config: RunConfig, world: int) -> Iterator[Problem]:
    o = config.optimizer
    if o.min_lr > o.lr:
        yield Problem(f"min_lr={o.min_lr} is above lr={o.lr}", f"0 to {o.lr}", "optimizer.min_lr")


RULES: tuple[Rule, ...] = (
    _heads,
    _experts_are_whole,
    _experts_see_tokens_once,
    _world_divides,
    _experts_fit,
    _tensor_parallel_divides,
    _sequence_divides,
    _context_divides,
    _layers_fill_stages,
    _schedule_fits,
    _batch_divides,
    _sequence_fits,
    _curve_fits,
)


def divisors(n: int) -> list[int]:
    """The divisors of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def listing(numbers: list[int]) -> str:
    """'1, 2, 4 or 8'; long lists keep their ends."""
    if len(numbers) > 10:
        return f"{', '.join(map(str, numbers[:8]))}, ... or {numbers[-1]}"
    head, last = numbers[:-1], numbers[-1]
    return f"{', '.join(map(str, head))} or {last}" if head else str(last)


def _divides(field: str, size: int, of: str, number: int) -> Iterator[Problem]:
    if number % size:
        name = of.removeprefix("model.")
        short = field.rpartition(".")[2]
        legal = [d for d in divisors(number) if d <= 4 * size]
        yield Problem(f"{short}={size} does not divide {name}={number}", listing(legal), field)


def require_trainable(config: RunConfig) -> None:
    """Raises MtcliError for what can be planned and not yet trained."""
    p = config.parallel
    untrained = {
        "parallel.zero": p.zero == 3,
    }
    problems = [
        Problem("this can be planned and not yet trained", "see docs/architecture.md", field)
        for field, chosen in untrained.items()
        if chosen
    ]
    if problems:
        raise MtcliError(*problems)
