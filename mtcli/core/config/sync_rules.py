"""The rules of the sync section: which replicas there can be, and what each method takes."""

from collections.abc import Iterator
from math import lcm

from mtcli.core.config.errors import Problem
from mtcli.core.config.fields import divisors, listing
from mtcli.core.config.schema import RunConfig
from mtcli.core.config.sync import DECENTRALIZED, LEADERS, ONE_SIDED, most_replicas

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


def method_takes_the_optimizer(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks that a method is defined for the optimizer."""
    method, name = config.sync.method, config.optimizer.name
    takes = TAKES.get(method, (name,))
    if name not in takes:
        message = f"method={method!r} is not defined for optimizer.name={name!r}"
        either = " or ".join(f"optimizer.name = {one!r}" for one in takes)
        yield Problem(message, either, "sync.method")


def neighbours_are_mixed(config: RunConfig, world: int) -> Iterator[Problem]:
    """Checks what decentralized methods take of momentum, and their graph of replicas."""
    s, o = config.sync, config.optimizer
    if s.method not in DECENTRALIZED:
        return
    if s.method == "dsgd" and o.momentum:
        message = f"momentum={o.momentum:g} with method='dsgd', which has none"
        yield Problem(message, "sync.method = 'decentlam' or 'dmsgd', or momentum 0", "sync.method")
    if o.nesterov:
        message = f"nesterov=true with method={s.method!r}, whose momentum is plain"
        yield Problem(message, "leave it out", "optimizer.nesterov")
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
