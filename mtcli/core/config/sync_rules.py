"""The rules of the sync section: which replicas there can be, and what each method takes."""

from collections.abc import Iterator
from math import lcm

from mtcli.core.config.errors import Problem
from mtcli.core.config.fields import divisors, listing
from mtcli.core.config.schema import RunConfig
from mtcli.core.config.sync import DECENTRALIZED, LEADERS, most_replicas

# The update rules that a method takes, where it does not take all.
TAKES = {"onebit": ("lamb", "adamw")} | dict.fromkeys((*DECENTRALIZED, *LEADERS), ("sgd",))


def replicas_divide(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that replicas of one size fill the world, each with all of its stages and experts."""
    p, s = config.parallel, config.sync
    if s.method == "all_reduce":
        if s.replicas > 1:
            message = f"replicas={s.replicas} with method='all_reduce', which keeps them equal"
            hint = "sync.method = 'diloco', or another, or leave sync.replicas out"
            yield Problem(message, hint, "sync.replicas")
        return
    inside = lcm(p.tp * p.cp, p.ep * p.etp)
    if world % (p.pp * inside):
        yield Problem(
            f"a replica has pp * lcm(tp*cp, ep*etp) = {p.pp} * {inside} ranks, which do not divide "
            f"the world of {world}",
            f"ranks (--nproc) that are a multiple of {p.pp * inside}",
            "sync.method",
        )
        return
    most = most_replicas(world, p.pp, (p.tp * p.cp, p.ep * p.etp))
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
    """Checks that an asynchronous worker needs no other between two exchanges."""
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
        either = " or ".join(f"optimizer.name = {one!r}" for one in takes)
        yield Problem(message, either, "sync.method")
