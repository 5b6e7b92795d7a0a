"""Checks the sync section: which replicas can exist, and the settings of each method."""

from collections.abc import Iterator

from mtcli.core.config.errors import Problem
from mtcli.core.config.fields import divisors, listing
from mtcli.core.config.layout_rules import Rule
from mtcli.core.config.schema import RunConfig
from mtcli.core.config.sync import DECENTRALIZED, LEADERS, ONE_SIDED, PERIODIC, Method

# The update rules that a method takes, where it does not take all.
TAKES = {"onebit": ("lamb", "adamw")} | dict.fromkeys((*DECENTRALIZED, *LEADERS), ("sgd",))
# The methods that read some fields.
READ_BY: dict[str, tuple[Method, ...]] = {
    "warmup_steps": ("onebit",),
    "topology machine_size": DECENTRALIZED,
    "group_size global_period global_pull": ("lsgd",),
    "pull asynchronous": LEADERS,
    "period": (*LEADERS, *PERIODIC),
    "outer_lr outer_momentum outer_nesterov": ("diloco",),
    "fragments overlap_steps quantise top_k error_decay": PERIODIC,
}


def replicas_divide(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that replicas of one size fill the world, each with all of its stages and experts."""
    p, s = config.parallel, config.sync
    if s.method == "all_reduce":
        if s.replicas > 1:
            message = f"replicas={s.replicas} with method='all_reduce', which keeps them equal"
            hint = "sync.method = 'diloco', or another, or leave sync.replicas out"
            yield Problem(message, hint, "sync.replicas")
        return
    inside = p.smallest_world // p.pp
    if world % p.smallest_world:
        yield Problem(
            f"a replica has pp * lcm(tp*cp, ep*etp) = {p.pp} * {inside} ranks, which do not divide "
            f"the world of {world}",
            f"ranks (--nproc) that are a multiple of {p.smallest_world}",
            "sync.method",
        )
        return
    most = p.most_replicas(world)
    if s.replicas and most % s.replicas:
        message = f"replicas={s.replicas} does not divide the {most} that {world} ranks can hold"
        yield Problem(message, listing(divisors(most)), "sync.replicas")
    shared = most // (s.replicas or most) * inside // p.tp
    if p.zero and shared == 1:
        yield Problem(
            f"zero={p.zero} shards over the data ranks of a replica, and with method={s.method!r} "
            f"each of the {most} replicas has 1",
            f"parallel.zero = 0, or sync.replicas below {most}",
            "parallel.zero",
        )


def workers_can_be_pulled(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks the groups and periods of lsgd's workers, and that easgd's pull converges."""
    s, workers = config.sync, config.num_replicas(world)
    if s.method not in LEADERS or any(replicas_divide(config, world)):
        return
    if workers % s.workers_of_group(workers):
        message = f"group_size={s.group_size} does not divide the {workers} replicas"
        yield Problem(message, listing(divisors(workers)), "sync.group_size")
    if s.method == "lsgd" and s.steps_between_global < s.steps_between:
        message = f"global_period={s.global_period} is below period={s.steps_between}"
        yield Problem(message, f"{s.steps_between} or more", "sync.global_period")
    if s.method == "easgd" and s.pull * (workers + 1) >= 2.0:
        yield Problem(
            f"pull={s.pull:g} with {workers} replicas: their distance to the centre is times "
            f"1 - pull * (replicas + 1) = {1 - s.pull * (workers + 1):.4g} at each exchange",
            f"below 2 / (replicas + 1) = {2 / (workers + 1):.4g}",
            "sync.pull",
        )


def workers_decide_alone(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that an asynchronous worker needs no other one between two exchanges."""
    if not config.sync.asynchronous:
        return
    t, shared = config.train, "asynchronous=true: between exchanges a worker asks no other"
    if t.precision == "fp16" and not t.loss_scale:
        message = f"{shared}, and a dynamic loss scale is that of all"
        yield Problem(message, "a fixed train.loss_scale, or bf16", "sync.asynchronous")
    if t.on_nonfinite == "skip":
        message = f"{shared}, and on_nonfinite='skip' passes over the batch of all"
        yield Problem(message, "train.on_nonfinite = 'stop'", "sync.asynchronous")


def method_takes_the_optimizer(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that a method is defined for the optimizer."""
    method, name = config.sync.method, config.optimizer.name
    takes = TAKES.get(method, (name,))
    if name not in takes:
        message = f"method={method!r} is not defined for optimizer.name={name!r}"
        either = " or ".join(f"optimizer.name = {optimizer!r}" for optimizer in takes)
        yield Problem(message, either, "sync.method")
    if config.optimizer.group and method in ("onebit", *DECENTRALIZED):
        message = f"method={method!r} with [[optimizer.group]]: it updates all parameters alike"
        yield Problem(
            message, "leave [[optimizer.group]] out, or sync.method = 'all_reduce'", "sync.method"
        )


def exchanges_come_in_turn(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that each fragment has layers and a step of its own, and completes before its next
    turn."""
    s, layers, period = config.sync, config.model.num_layers, config.sync.steps_between
    if s.method not in PERIODIC:
        return
    if s.fragments > layers:
        message = f"fragments={s.fragments} of num_layers={layers} layers"
        yield Problem(message, f"at most {layers}", "sync.fragments")
    elif period % s.fragments:
        message = f"fragments={s.fragments} does not divide period={period}"
        yield Problem(message, listing(divisors(period)), "sync.fragments")
    if s.overlap_steps >= period:
        message = f"overlap_steps={s.overlap_steps} is not below period={period}"
        yield Problem(message, f"at most {period - 1}", "sync.overlap_steps")


def error_feedback_is_used(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks the settings of error feedback, and of the momentum that it replaces."""
    s = config.sync
    if s.method not in PERIODIC:
        return
    if s.error_decay != type(s).model_fields["error_decay"].default and not s.compressed:
        message = f"error_decay={s.error_decay:g} with quantise=0 and top_k=0, which lose nothing"
        hint = "sync.quantise or sync.top_k, or leave sync.error_decay out"
        yield Problem(message, hint, "sync.error_decay")
    if s.top_k and s.outer_momentum not in (0.0, type(s).model_fields["outer_momentum"].default):
        message = f"outer_momentum={s.outer_momentum:g} with top_k={s.top_k:g}, whose error "
        message += "feedback takes its place"
        yield Problem(
            message,
            "leave sync.outer_momentum out, or sync.quantise in place of top_k",
            "sync.top_k",
        )


def neighbours_are_mixed(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks the momentum of decentralized methods, and their graph of replicas."""
    s, o = config.sync, config.optimizer
    if s.method not in DECENTRALIZED:
        return
    if s.method == "dsgd" and o.momentum:
        message = f"momentum={o.momentum:g} with method='dsgd', which has none"
        yield Problem(message, "sync.method = 'decentlam' or 'dmsgd', or momentum 0", "sync.method")
    if o.nesterov:
        message = f"nesterov=true with method={s.method!r}, whose momentum is plain"
        yield Problem(message, "optimizer.nesterov = false", "optimizer.nesterov")
    replicas = config.num_replicas(world)
    if s.machine_size and s.topology != "hierarchical":
        message = f"machine_size={s.machine_size} with topology={s.topology!r}, which has none"
        hint = "sync.topology = 'hierarchical', or leave sync.machine_size out"
        yield Problem(message, hint, "sync.machine_size")
    elif s.machine_size and replicas % s.machine_size:
        message = f"machine_size={s.machine_size} does not divide the {replicas} replicas"
        yield Problem(message, listing(divisors(replicas)), "sync.machine_size")
    elif s.method == "decentlam" and s.topology in ONE_SIDED and replicas > 2:
        yield Problem(
            f"topology={s.topology!r} of {replicas} replicas has a mixing matrix that is not "
            "symmetric, with which decentlam's momentum is of no gradient",
            "sync.topology = 'symmetric_exponential', or sync.method = 'dmsgd'",
            "sync.topology",
        )


SYNC_RULES: tuple[Rule, ...] = (
    replicas_divide,
    method_takes_the_optimizer,
    exchanges_come_in_turn,
    error_feedback_is_used,
    workers_can_be_pulled,
    workers_decide_alone,
    neighbours_are_mixed,
)
