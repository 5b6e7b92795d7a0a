"""Runs whose replicas exchange pseudo-gradients, against one-rank runs and a loop of torch's."""

import contextlib
import io
import re
from functools import partial
from itertools import pairwise

import pytest
import torch
from marks import slow
from ranks import run_ranks
from tiny import GPT, LLAMA, MOE, Samples, run_config
from trained import checkpoint_of, save_to, train_and_save

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.parallel.ownership import OwnedShard
from mtcli.core.runtime.launch import Runtime
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise, resume
from mtcli.core.training.step import Trainer

ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))
DILOCO = {"method": "diloco", "period": 3}


class OfReplica(Samples):
    """The samples of one replica: of each global batch those that its data ranks read."""

    def __init__(self, config, layout, replica):
        super().__init__(config)
        self.size, self.mbs = config.batch.global_batch_size, config.batch.micro_batch_size
        self.layout, self.replica = layout, replica

    def batch(self, start, count):
        return self.rows[[self._of(i) % len(self.rows) for i in range(start, start + count)]]

    def _of(self, i):
        """The number in the whole order of this replica's sample i."""
        step, j = divmod(i, self.size // self.layout.replicas)
        block, within = divmod(j, self.mbs)
        micro_batch, dp = divmod(block, self.layout.dp)
        shard = micro_batch * self.layout.batch_shards + self.replica * self.layout.dp + dp
        return step * self.size + shard * self.mbs + within


class PlainDiLoCo:
    """The reference: DiLoCo (arXiv:2311.08105, algorithm 1) and Streaming DiLoCo's fragments and
    overlap (arXiv:2501.18512, algorithm 2) by torch.optim.SGD, over replicas' tables of weights."""

    def __init__(self, replicas, sync):
        self.replicas, self.sync, self.under_way = replicas, sync, []
        lr, momentum = (
            (1.0, 0.0) if sync.method == "local" else (sync.outer_lr, sync.outer_momentum)
        )
        self.outer = {n: w.clone().requires_grad_() for n, w in replicas[0].items()}
        nesterov = sync.outer_nesterov and momentum > 0.0
        self.sgd = {
            n: torch.optim.SGD([w], lr=lr, momentum=momentum, nesterov=nesterov)
            for n, w in self.outer.items()
        }

    def fragment(self, name):
        layer = re.match(r"blocks\.(\d+)", name)
        after = self.sync.fragments - 1 if name.startswith(("final", "head")) else 0
        return int(layer[1]) % self.sync.fragments if layer else after

    @torch.no_grad()
    def after(self, step):
        every, share = self.sync.period, 0.5 if self.sync.overlap_steps else 0.0
        for name, outer in self.outer.items():
            turn = every * (self.fragment(name) + 1) // self.sync.fragments
            if step % every == turn % every:
                mean = sum(replica[name] for replica in self.replicas) / len(self.replicas)
                self.under_way.append((step + self.sync.overlap_steps, name, outer - mean))
        for due, name, pseudo_gradient in list(self.under_way):
            if due == step:
                self.under_way.remove((due, name, pseudo_gradient))
                self.outer[name].grad = pseudo_gradient
                self.sgd[name].step()
                for replica in self.replicas:
                    replica[name].copy_(
                        share * replica[name] + (1 - share) * self.outer[name].detach()
                    )


def alone(config, layout, replica):
    """A one-rank trainer of a replica's batches, and its loader."""
    sections = config.model_dump(exclude_none=True)
    batch = sections["batch"] | {
        "global_batch_size": config.batch.global_batch_size // layout.replicas
    }
    one = run_config(
        sections["model"], batch=batch, optimizer=sections["optimizer"], train=sections["train"]
    )
    trainer = Trainer(one, ALONE)
    initialise(trainer)
    return trainer, MicroBatchLoader(OfReplica(config, layout, replica), one, trainer.groups)


def reference(config, world, steps):
    """(weights of each replica, outer weights, losses) of one-rank runs and the plain exchange."""
    layout = ParallelLayout.of_run(config, world)
    pairs = [alone(config, layout, replica) for replica in range(layout.replicas)]
    exchange = PlainDiLoCo([trainer.optimizer.masters for trainer, _ in pairs], config.sync)
    losses = []
    for step in range(1, steps + 1):
        found = [trainer.train_step(loader).loss for trainer, loader in pairs]
        losses.append(sum(found) / len(found))
        exchange.after(step)
    for _, loader in pairs:
        loader.close()
    trainer = pairs[0][0]
    outer = {name: weight.detach() for name, weight in exchange.outer.items()}
    weights = [whole(trainer, table) for table in exchange.replicas]
    return weights, whole(trainer, outer), losses


def whole(trainer, weights):
    """The global tensors of a one-rank trainer's, without padding."""
    found = {}
    for name, weight in weights.items():
        described = trainer.table[name]
        found[name] = weight.new_zeros(described.shape)
        shard = OwnedShard(described, weight, slice(0, len(weight)))
        for box, view in shard.blocks(trainer.groups):
            found[name][box.slices] = view
    return found


def fp64(model=GPT, optimizer=None, batch=None, **sections):
    optimizer = {"clip": 0.05, "lr": 3e-3, "warmup_steps": 2} | (optimizer or {})
    train = {"precision": "fp64", "steps": 20, "device": "cpu"} | sections.pop("train", {})
    return run_config(model, optimizer=optimizer, train=train, batch=batch or {}, **sections)


SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.5}
RUNS = {  # the parity table has more layouts of diloco
    "fragments": (2, fp64(sync=DILOCO | {"period": 2, "fragments": 2})),
    "local sgd": (2, fp64(LLAMA, optimizer=SGD, sync={"method": "local", "period": 2})),
    "lamb, heavy ball": (
        2,
        fp64(LLAMA, {"name": "lamb"}, sync=DILOCO | {"outer_nesterov": False}),
    ),
    "zero 1 inside": (
        4,
        fp64(parallel={"zero": 1}, sync=DILOCO | {"replicas": 2, "fragments": 3}),
    ),
    "moe ep overlap": (
        4,
        fp64(
            MOE,
            parallel={"ep": 2},
            sync=DILOCO | {"replicas": 2, "period": 4, "fragments": 2, "overlap_steps": 3},
        ),
    ),
}


@pytest.mark.parametrize(("world", "config"), RUNS.values(), ids=RUNS)
def test_replicas_are_one_rank_runs_that_exchange(tmp_path, world, config):
    weights, outer, losses = reference(config, world, 7)
    found = run_ranks(world, train_and_save, config, tmp_path, 0, 7)
    for steps in found:
        assert [step.loss for step in steps] == pytest.approx(losses, rel=1e-10)
    checkpoint = checkpoint_of(tmp_path, 7)
    assert checkpoint.replicas == len(weights)
    for name, expected in outer.items():
        stored = f"optimizer.outer/{name}"
        assert checkpoint.replicas_of(stored) == (None,)
        assert checkpoint.replicas_of(name) == tuple(range(len(weights)))
        if not config.sync.overlap_steps:  # else it has the step of an exchange under way
            close(checkpoint.read(stored), expected)
        for replica, table in enumerate(weights):
            close(checkpoint.read(name, replica=replica), table[name])


close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


def test_every_step_local_sgd_is_data_parallel_sgd(tmp_path):
    """The average of weights after one step of SGD is the step of the average gradient."""
    optimizer = {"name": "sgd", "lr": 0.1, "momentum": 0.0, "clip": 0.0}
    outer = {"method": "diloco", "period": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
    runs = []
    for i, sync in enumerate([{}, {"method": "local", "period": 1}, outer]):
        config, folder = fp64(optimizer=optimizer, sync=sync), tmp_path / str(i)
        steps, _ = run_ranks(2, train_and_save, config, folder, 0, 5)
        runs.append(([step.loss for step in steps], checkpoint_of(folder, 5)))
    losses, plain = runs[0]
    for found, checkpoint in runs[1:]:
        assert found == pytest.approx(losses, rel=1e-12)
        for name in plain.names():
            close(checkpoint.read(name, replica=1), plain.read(name))


RESUMED = {
    "overlap of bits": (
        4,
        {"tp": 2},
        DILOCO | {"period": 6, "overlap_steps": 5, "quantise": 4, "outer_momentum": 0.8},
        {},
    ),
    "largest, zero 1, bf16": (
        4,
        {"zero": 1},
        DILOCO | {"replicas": 2, "fragments": 2, "overlap_steps": 1, "top_k": 0.05, "quantise": 2},
        {"precision": "bf16"},
    ),
}


@slow("ten runs, 5 s; the parity table has one resumed amid an exchange")
@pytest.mark.parametrize(("world", "parallel", "sync", "train"), RESUMED.values(), ids=RESUMED)
def test_a_run_resumed_between_events_and_amid_an_exchange_is_bit_for_bit_the_same(
    tmp_path, world, parallel, sync, train
):
    """Stopped after each of steps 7 to 9: before an exchange, and in both of its phases."""
    config = run_config(GPT, parallel=parallel, sync=sync, train=train | {"steps": 20})
    straight, resumed = run_ranks(world, stopped_and_resumed, config, tmp_path, deadline=150)[0]
    assert resumed == straight
    expected = checkpoint_of(tmp_path / "straight", 12)
    found = checkpoint_of(tmp_path / "resumed", 12)
    assert expected.replicas > 1
    assert found.extra == expected.extra and set(found.names()) == set(expected.names())
    for name in expected.names():
        assert found.replicas_of(name) == expected.replicas_of(name)
        for replica in expected.replicas_of(name):
            same = found.read(name, replica=replica), expected.read(name, replica=replica)
            assert torch.equal(*same), name


def stopped_and_resumed(runtime, config, folder):
    """Losses of 12 steps, at once and in four runs."""
    straight = train_and_save(runtime, config, folder / "straight", 0, 12)
    resumed = []
    for start, stop in pairwise((0, 7, 8, 9, 12)):
        resumed += train_and_save(runtime, config, folder / "resumed", start, stop)
    return [step.loss for step in straight], [step.loss for step in resumed]


def starts(runtime, config, folder, step):
    """What a resumed trainer has on this rank: weights, outer weights and errors; what it said."""
    trainer = Trainer(config, runtime)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        resume(trainer, checkpoint_of(folder, step))
    state = trainer.exchange.state()
    kinds = {kind: {} for kind in ("outer", "error")}
    for key, tensor in state.items():
        kind, _, name = key.partition("/")
        if kind in kinds:
            kinds[kind][name] = tensor.clone()
    masters = {name: master.clone() for name, master in trainer.optimizer.masters.items()}
    return masters, kinds, said.getvalue()


def test_another_number_of_replicas_starts_from_the_outer_weights(tmp_path):
    """As when a machine is lost or joins: its replicas are one run's, wherever each was."""
    sync = DILOCO | {"overlap_steps": 2, "quantise": 8}
    config = run_config(GPT, sync=sync, train={"precision": "bf16"})
    run_ranks(4, train_and_save, config, tmp_path, 0, 4)
    checkpoint = checkpoint_of(tmp_path, 4)
    for world in (1, 2):
        each = "all 2 replicas start" if world == 2 else "the run goes on"
        note = f"note: the checkpoint has 4 replicas: {each} from the outer weights\n"
        for rank, (weights, kinds, said) in enumerate(
            run_ranks(world, starts, config, tmp_path, 4)
        ):
            assert said == ("" if rank else note)
            for name, weight in weights.items():
                outer = checkpoint.read(f"optimizer.outer/{name}").flatten()
                assert torch.equal(flat(weight, outer), outer)
                assert torch.equal(flat(kinds["outer"][name], outer), outer)
                assert not kinds["error"][name].any()
    plain = run_config(GPT, train={"precision": "bf16"})
    said = run_ranks(2, starts_plain, plain, tmp_path)
    assert said == ["note: the checkpoint has 4 replicas: the run goes on from their average\n", ""]


def starts_plain(runtime, config, folder):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        resume(Trainer(config, runtime), checkpoint_of(folder, 4))
    return said.getvalue()


def flat(stored, like):
    """A rank's tensor without the padding behind it."""
    return stored.flatten()[: len(like)]


@slow("3 s")
def test_a_run_that_changes_to_diloco_starts_from_its_weights(tmp_path):
    """Also where its replicas differed, and there is no outer state yet: from their mean."""
    run_ranks(2, train_and_save, run_config(GPT), tmp_path / "plain", 0, 2)
    weights = checkpoint_of(tmp_path / "plain", 2)
    diloco = run_config(GPT, sync=DILOCO | {"quantise": 8})
    for masters, kinds, _ in run_ranks(2, starts, diloco, tmp_path / "plain", 2):
        for name, master in masters.items():
            expected = weights.read(name).flatten()
            assert torch.equal(flat(master, expected), expected)
            assert torch.equal(kinds["outer"][name], master)
    run_ranks(2, moved_apart, run_config(GPT, sync=DILOCO), tmp_path / "apart")
    for masters, kinds, _ in run_ranks(2, starts, diloco, tmp_path / "apart", 0):
        for name, master in masters.items():
            apart = checkpoint_of(tmp_path / "apart", 0)
            each = [apart.read(name, replica=r).flatten() for r in range(2)]
            assert not torch.equal(*each)
            assert torch.equal(flat(master, each[0]), sum(each) / 2)
            assert torch.equal(kinds["outer"][name], master)


def moved_apart(runtime, config, folder):
    """Saves replicas that differ, by a method without outer weights."""
    trainer = Trainer(config, runtime)
    initialise(trainer)
    for master in trainer.optimizer.masters.values():
        master.add_(float(runtime.rank))
    trainer.exchange.state, trainer.exchange.counters = dict, dict
    save_to(folder, trainer)
