"""The exchange of pseudo-gradients, on weights that tests move by hand."""

import pytest
import torch
from ranks import run_ranks
from torch import nn

from mtcli.core.config.errors import MtcliError
from mtcli.core.config.schema import OptimizerConfig
from mtcli.core.config.sync import SyncConfig
from mtcli.core.exchange.diloco import DiLoCoFacts
from mtcli.core.exchange.facts import ReplicaShare
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.sharding import Parameter
from mtcli.core.optim.optimizer import Optimizer
from mtcli.core.parallel.groups import make_groups
from mtcli.core.parallel.ownership import Ownership
from mtcli.core.parallel.transport import process_group
from mtcli.core.sync.all_reduce import BucketedDataParallel
from mtcli.core.sync.diloco import OuterExchange
from mtcli.kernels.gradient_sink import GradientSinks

NAMES = ("embedding.weight", "blocks.0.w", "blocks.1.w", "head.weight")
ROWS = 700  # two blocks of 256 and more


class Weights(nn.Module):
    """Four parameters by their names in the table."""

    def __init__(self, rows):
        super().__init__()
        for name in NAMES:
            self.register_parameter(name.replace(".", "_"), nn.Parameter(torch.zeros(rows)))

    def named_parameters(self, *_, **__):
        return [(name, getattr(self, name.replace(".", "_"))) for name in NAMES]


class Replica:
    """A rank that is a replica: its weights are one number each where nothing else is said."""

    def __init__(self, runtime, rows=1, **sync):
        layout = ParallelLayout(runtime.world, replicas=runtime.world)
        groups = make_groups(layout, runtime.rank, runtime.device)
        table = {name: Parameter(name, (rows,), (None,), "normal", 0) for name in NAMES}
        ownership = Ownership(groups, table, sequence_parallel=True, shard=False)
        inside = BucketedDataParallel({0: Weights(rows)}, ownership, 1e9, GradientSinks())
        config = OptimizerConfig(name="sgd", momentum=0.0)
        self.optimizer = Optimizer(inside.weights(), ownership, config, torch.float32)
        sync = SyncConfig(**{"method": "diloco", "period": 1} | sync)
        sizes = {name: rows for name in NAMES}
        facts = DiLoCoFacts(ReplicaShare(sync, 100, runtime.world, sizes, 4))
        self.exchange = OuterExchange(inside, self.optimizer, facts)

    def begin(self, value):
        for master in self.optimizer.masters.values():
            master.fill_(value)
        self.exchange.begin()
        return self

    def step(self, *moves):
        """Adds a move to each weight, or one to all, as the inner optimizer would; exchanges."""
        for i, name in enumerate(NAMES):
            self.optimizer.masters[name].add_(moves[i % len(moves)])
        self.optimizer.updates += 1
        self.exchange.after_step()
        return self

    @property
    def weights(self):
        return {name: self.optimizer.masters[name].clone() for name in NAMES}

    def each(self, kind=None):
        """The first element of every weight, or of a kind of state."""
        state = self.exchange.state()
        found = [state[f"{kind}/{n}"] if kind else self.optimizer.masters[n] for n in NAMES]
        return [round(float(x[0]), 5) for x in found]


def one_event(runtime, moves, sync):
    return Replica(runtime, **sync).begin(10.0).step(moves[runtime.rank]).each()


def test_outer_weights_go_the_way_that_replicas_went_by_the_outer_learning_rate():
    """Replicas went +1 and +3, so +2 on average; a wrong sign would go down, and a sum by 4."""
    plain = {"outer_lr": 0.5, "outer_momentum": 0.0}
    for weights in run_ranks(2, one_event, [1.0, 3.0], plain):
        assert weights == [11.0] * 4
    heavy_ball = {"outer_lr": 0.5, "outer_momentum": 0.9, "outer_nesterov": False}
    for weights in run_ranks(2, one_event, [1.0, 3.0], heavy_ball):
        assert weights == [11.0] * 4
    nesterov = {"outer_lr": 0.5, "outer_momentum": 0.9}
    for weights in run_ranks(2, one_event, [1.0, 3.0], nesterov):
        assert weights == [10.0 + 0.5 * (2.0 + 0.9 * 2.0)] * 4
    for weights in run_ranks(2, one_event, [1.0, 3.0], {"method": "local"}):
        assert weights == [12.0] * 4


def by_hand(moves, lr, momentum, nesterov):
    """Outer weights after each event, of replicas that go so far in it: numbers, no tensors."""
    outer, velocity, found = 0.0, 0.0, []
    for each in moves:
        pseudo_gradient = sum(outer - (outer + move) for move in each) / len(each)
        velocity = momentum * velocity + pseudo_gradient
        outer -= lr * (pseudo_gradient + momentum * velocity if nesterov else velocity)
        found.append(outer)
    return found


def events(runtime, moves, sync):
    replica = Replica(runtime, **sync).begin(0.0)
    return [replica.step(each[runtime.rank]).each()[0] for each in moves]


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_carries_over_from_event_to_event(nesterov):
    moves = [(1.0, 2.0, -0.5), (0.25, 0.5, 0.0), (-1.0, 1.0, 3.0), (0.0, 0.0, 0.0)]
    sync = {"outer_lr": 0.7, "outer_momentum": 0.8, "outer_nesterov": nesterov}
    for found in run_ranks(3, events, moves, sync):
        assert found == pytest.approx(by_hand(moves, 0.7, 0.8, nesterov), abs=1e-4)


def in_turn(runtime, sync, steps):
    replica = Replica(runtime, method="local", **sync).begin(0.0)
    return [replica.step(float(1 + runtime.rank)).each() for _ in range(steps)]


def test_fragments_are_exchanged_in_turn_and_their_layers_are_strided():
    """Replicas go +1 and +2 a step. Blocks 0 and 1 have their turns after odd and even steps; the
    embedding goes with the first block and the head with the last."""
    first, second = run_ranks(2, in_turn, {"period": 2, "fragments": 2}, 3)
    assert first == [[1.5, 1.5, 1, 1], [2.5, 2.5, 3, 3], [4.5, 4.5, 4, 4]]
    assert second == [[1.5, 1.5, 2, 2], [3.5, 3.5, 3, 3], [4.5, 4.5, 5, 5]]


def test_an_overlapped_exchange_is_applied_later_to_half():
    """Sent after step 2, when replicas are at 2 and 4, and applied after step 4, at 4 and 8: half
    of that and half of the average that was sent, 3."""
    first, second = run_ranks(2, in_turn, {"period": 4, "overlap_steps": 2, "fragments": 2}, 4)
    assert [weights[0] for weights in first] == [1.0, 2.0, 3.0, 0.5 * 4.0 + 0.5 * 3.0]
    assert [weights[0] for weights in second] == [2.0, 4.0, 6.0, 0.5 * 8.0 + 0.5 * 3.0]


def missed(runtime, absent, sync):
    """Two events; replicas `absent` have broken down in the first."""
    replica = Replica(runtime, outer_lr=0.5, outer_momentum=0.5, **sync).begin(10.0)
    move = torch.nan if runtime.rank in absent else float(1 + runtime.rank)
    after = replica.step(0.0, move, 0.0, move).each(), replica.each("outer_momentum")
    return *after, replica.step(1.0).each()


@pytest.mark.parametrize("sync", [{}, {"quantise": 8}, {"quantise": 4}, {"fragments": 1}])
def test_a_replica_that_misses_an_event_rejoins_from_the_outer_weights(sync):
    """Replicas 0 and 2 go +1 and +3, and 1 is not finite: the mean is 2, of the two that are."""
    for weights, momentum, after in run_ranks(3, missed, (1,), sync):
        moved = 10.0 + 0.5 * (2.0 + 0.5 * 2.0)
        assert weights == [10.0, moved, 10.0, moved]
        assert momentum == [0.0, -2.0, 0.0, -2.0]
        velocity = -0.5 * 2.0 - 1.0
        assert after[1] == pytest.approx(moved + 0.5 * (1.0 - 0.5 * velocity))


def errors(runtime):
    """Errors that are fed back, after an event and after one that replica 0 has missed."""
    replica = Replica(runtime, rows=ROWS, top_k=0.05).begin(0.0)
    found = []
    for broken in (0.0, torch.nan if runtime.rank == 0 else 0.0):
        replica.step(torch.arange(ROWS) + broken)
        found.append(replica.exchange.state()["error/blocks.0.w"].any().item())
    return found


def test_a_replica_that_misses_an_event_feeds_no_error_back():
    assert run_ranks(2, errors) == [[True, False], [True, True]]


def test_an_event_that_all_miss_leaves_the_outer_weights_where_they_were():
    for weights, momentum, _ in run_ranks(2, missed, (0, 1), {}):
        assert weights == [10.0] * 4 and momentum == [0.0] * 4


COMPRESSED = {
    "8 bits": {"quantise": 8},
    "4 bits": {"quantise": 4},
    "2 bits": {"quantise": 2},
    "largest": {"top_k": 0.05},
    "largest, 2 bits": {"top_k": 0.05, "quantise": 2},
}


def fed_back(runtime, sync, decay, steps=5):
    """What is left of invariants after some events of random moves: the sum of moves, outer
    weights and errors, by parameter."""
    sync = {"method": "local", "error_decay": decay} | sync
    replica = Replica(runtime, rows=ROWS, **sync).begin(0.0)
    random, total = torch.Generator().manual_seed(runtime.rank), torch.zeros(len(NAMES), ROWS)
    for _ in range(steps):
        moves = torch.randn(len(NAMES), ROWS, generator=random)
        total += moves
        replica.step(*moves)
    state = replica.exchange.state()
    kinds = [torch.stack([state[f"{kind}/{n}"] for n in NAMES]) for kind in ("outer", "error")]
    return total, *kinds, torch.stack(list(replica.weights.values()))


@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("sync", COMPRESSED.values(), ids=COMPRESSED)
def test_what_compression_loses_is_sent_later(world, sync):
    """Without decay nothing is lost for good: the outer weights are the mean of all moves, less
    the errors that are left, which count as pseudo-gradients do."""
    ranks = run_ranks(world, fed_back, sync, 1.0)
    moves, errors = (sum(rank[i] for rank in ranks) for i in (0, 2))
    for _, outer, error, weights in ranks:
        assert torch.equal(outer, ranks[0][1]) and torch.equal(weights, outer)
        assert error.any()
        torch.testing.assert_close(world * outer - errors, moves, atol=2e-5, rtol=1e-5)
        assert (world * outer - moves).norm() > 1e-3 * moves.norm()


def over_a_network(runtime, sync, decay):
    process_group.connect = lambda *_: None  # of this forked process: gloo, without shared memory
    return fed_back(runtime, sync, decay)


@pytest.mark.parametrize("sync", [{}, {"overlap_steps": 2, "period": 3, "quantise": 4}])
def test_gloo_exchanges_the_same_as_shared_memory(sync):
    sync = {"quantise": 8} | sync
    for near, far in zip(
        run_ranks(3, fed_back, sync, 0.9), run_ranks(3, over_a_network, sync, 0.9), strict=True
    ):
        assert all(torch.equal(one, other) for one, other in zip(near, far, strict=True))


def test_the_error_decays():
    ((moves, outer, error, _),) = run_ranks(1, fed_back, {"top_k": 0.05}, 0.0, 1)
    assert torch.equal(outer - error, moves)
    ((moves, outer, error, _),) = run_ranks(1, fed_back, {"top_k": 0.05}, 0.0, 3)
    assert not torch.allclose(outer - error, moves, atol=0.5)


def largest_by_hand(moves, k, decay, lr):
    """SparseLoCo's algorithm (arXiv:2508.15706) of replicas' moves, one chunk of numbers each."""
    error, outer = torch.zeros_like(moves[0]), torch.zeros_like(moves[0][0])
    for event in moves:
        sent = torch.zeros_like(error)
        for r, move in enumerate(event):
            error[r] = decay * error[r] - move
            kept = sorted(range(len(move)), key=lambda i: -abs(float(error[r][i])))[:k]
            sent[r][kept] = error[r][kept]
        error -= sent
        outer = outer - lr * sum(sent) / len(event)
    return outer


def sparse(runtime, moves, sync):
    replica = Replica(runtime, rows=moves.shape[2], **sync).begin(0.0)
    for event in moves:
        replica.step(event[runtime.rank])
    return replica.weights["blocks.0.w"]


def test_the_largest_values_are_exchanged_as_sparseloco_does():
    moves = torch.randn(4, 2, 100, generator=torch.Generator().manual_seed(0))
    expected = largest_by_hand(moves, 5, 0.95, 0.6)
    for found in run_ranks(2, sparse, moves, {"top_k": 0.05, "outer_lr": 0.6}):
        torch.testing.assert_close(found, expected)


def restored(runtime, counters):
    replica = Replica(runtime, period=4, overlap_steps=3).begin(0.0)
    replica.exchange.load_counters(counters)
    return replica.exchange.counters()


@pytest.mark.parametrize("due", [[1], {"0": "soon"}, {"x": 3}, None])
def test_counters_that_make_no_sense_are_refused(due):
    ((said,),) = [run_ranks(1, refused, {"outer_due": due})]
    assert said == (
        f"the manifest's sync.outer_due is {due!r}",
        "it maps fragments to the update after which each is applied",
    )


def refused(runtime, counters):
    with pytest.raises(MtcliError) as caught:
        restored(runtime, counters)
    (problem,) = caught.value.problems
    return problem.message, problem.hint


def test_what_is_due_is_restored_but_for_what_is_no_fragment_or_past():
    (found,) = run_ranks(1, restored, {"outer_due": {"0": 3, "7": 3}})
    assert found == {"outer_due": {"0": 3}}
    (found,) = run_ranks(1, restored, {"outer_due": {"0": 0}})
    assert found == {"outer_due": {}}
