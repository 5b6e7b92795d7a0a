"""Runs the rounds of asynchronous replicas: each trains alone at its own speed, then all meet.

A replica takes a ticket for each step, the next number of a counter that all share. Of n replicas,
ticket k is part k mod n of global batch k div n: a faster replica makes more steps, each part of
the data is trained on once, and the learning rate is that of the global batch. A round of r steps
has n * r tickets; a replica that finds none left goes to the meeting ("n l tau divides the sum of
t", arXiv:1905.10395, Algorithm 1). Replicas that take turns make the steps of a synchronous run.
"""

from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import Protocol

import torch
import torch.distributed as dist

from mtcli.core.config.schema import TrainConfig
from mtcli.core.exchange.facts import Turns
from mtcli.core.optim.lr_schedule import learning_rate
from mtcli.core.parallel.collectives import all_reduce, broadcast
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.step import Step, Trainer


class Tickets(Protocol):
    """The numbers of the steps of all replicas. Each replica asks until none is left."""

    def take(self, first: int, end: int) -> int | None:
        """The next of the numbers from `first` to `end`, of a round; None where all are taken."""


class StoreTickets:
    """Tickets of a counter in the rendezvous store: each costs a message to it."""

    def __init__(self, replicas: int) -> None:
        met = dist.is_initialized()
        store = dist.distributed_c10d._get_default_store() if met else dist.HashStore()
        self.store, self.replicas = dist.PrefixStore("tickets", store), replicas
        self.counted = 0  # in the rounds before

    def take(self, first: int, end: int) -> int | None:
        """The next number of a round, or None; each replica's None moves the counter on by 1."""
        number = first + self.store.add("next", 1) - 1 - self.counted
        if number < end:
            return number
        self.counted += end - first + self.replicas
        return None


class Rounds:
    """The rounds of a run. Every rank makes the same calls."""

    def __init__(self, trainer: Trainer, tickets: Tickets | None = None) -> None:
        self.trainer = trainer
        self.tickets = tickets or StoreTickets(trainer.layout.replicas)

    def train(self, loader: MicroBatchLoader) -> Step:
        """Trains until the next meeting; returns what the replicas did, as one step.

        A step whose loss is not finite is returned alone, and the replica meets nobody.
        """
        trainer, start, done = self.trainer, perf_counter(), []
        first, updates = trainer.step, trainer.optimizer.updates
        end = next_meeting(trainer.config.train, trainer.exchange.facts.turns, first)
        while (ticket := self._ticket(first, end)) is not None:
            trainer.step, loader.share = divmod(ticket, trainer.layout.replicas)
            done.append(trainer.train_step(loader))
            if done[-1].outcome == "fault":
                return done[-1]
        trainer.step = end
        trainer.optimizer.updates = updates + end - first  # on average, and the same everywhere
        step = self._together(done)
        trainer.exchange.meet(end)
        return step._replace(seconds=perf_counter() - start)

    def _ticket(self, first: int, end: int) -> int | None:
        """The ticket that the first rank of this replica takes for all its ranks."""
        axis, replicas = self.trainer.groups.replica, self.trainer.layout.replicas
        number = None
        if axis.rank == 0:
            number = self.tickets.take(first * replicas, end * replicas)
        ticket = torch.tensor([-1 if number is None else number], device=self.trainer.groups.device)
        agreed = int(broadcast(ticket, axis, source=0))
        return None if agreed < 0 else agreed

    def _together(self, done: Sequence[Step]) -> Step:
        """A step for all replicas: mean loss and norm, and how many steps each has made."""
        trainer, groups = self.trainer, self.trainer.groups
        sums = torch.zeros(4 + trainer.layout.replicas, dtype=torch.float64)
        if groups.replica.rank == 0:
            sums[0] = sum(step.loss * step.labels for step in done)
            sums[1] = sum(step.labels for step in done)
            sums[2] = sum(step.grad_norm for step in done)
            sums[3] = sum(step.tokens for step in done)
            sums[4 + groups.replicas.rank] = len(done)
        loss, labels, norm, tokens, *steps = all_reduce(
            sums.to(groups.device), groups.world
        ).tolist()
        loads = [step.expert_load or 0.0 for step in done]
        load = torch.tensor([max(loads, default=0.0)], dtype=torch.float64, device=groups.device)
        load = all_reduce(load, groups.world, dist.ReduceOp.MAX)
        config, counts = trainer.config, tuple(map(round, steps))
        return Step(
            step=trainer.step,
            loss=loss / (labels or 1.0),
            lr=learning_rate(config.optimizer, trainer.step, config.train.steps),
            grad_norm=norm / sum(counts),
            seconds=0.0,
            loss_scale=trainer.loss_scale.scale,
            outcome="updated",
            expert_load=float(load) or None,
            labels=labels,
            tokens=tokens,
            replica_steps=counts,
        )


def next_meeting(train: TrainConfig, exchanges: Iterable[Turns], step: int) -> int:
    """The step after which all replicas meet: for an exchange, a save, an evaluation or the end."""
    periods = [train.save_every, train.eval_every, *(turns.every for turns in exchanges)]
    return min(train.steps, *(step // period * period + period for period in periods if period))
