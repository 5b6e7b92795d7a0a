import json
import time

import pytest
import torch
from indexed_dataset import write_dataset
from tiny import DOCUMENTS, DROPPING, GPT, Samples, documents, run_config

from mtcli.core.config.errors import MtcliError
from mtcli.core.data.indexed import token_dtype
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.parallel.context import zigzag
from mtcli.core.parallel.groups import Axis, Groups, make_groups
from mtcli.core.runtime.health.flight_recorder import FlightRecorder
from mtcli.core.training.loader import MicroBatchLoader, open_loader

BATCH = {"global_batch_size": 12, "micro_batch_size": 2}


def groups_of(layout, rank):
    """The groups of a rank with nobody else there: enough for reading data."""
    cp = layout.coordinates(rank)["cp"]
    recorder = FlightRecorder()
    axes = {name: Axis(name, (rank,), 0, None, recorder) for name in ("tp_row", "replicas")}
    axes["cp"] = Axis("cp", (0,) * layout.cp, cp, None, recorder)
    return Groups(layout, rank, torch.device("cpu"), axes)


def rows_of(config, layout, rank, step, loss_scale=1.0):
    """(tokens, labels, positions, numbers) of every micro-batch of a rank, one after another."""
    loader = MicroBatchLoader(Samples(config), config, groups_of(layout, rank))
    load = loader.step(step, loss_scale).load
    count = config.batch.global_batch_size // (config.batch.micro_batch_size * layout.dp)
    found = [load(m) for m in range(count)]
    loader.close()
    return found


@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("dp", [1, 2, 3])
def test_micro_batch_m_of_data_rank_r_is_the_contiguous_block_that_compat_md_gives(dp, step):
    config = run_config(batch=BATCH)
    whole = torch.from_numpy(Samples(config).batch(step * 12, 12))
    for rank in range(dp):
        for m, inputs in enumerate(rows_of(config, ParallelLayout(dp), rank, step)):
            first = m * (2 * dp) + rank * 2
            assert torch.equal(inputs.tokens, whole[first : first + 2, :-1])
            assert torch.equal(inputs.labels, whole[first : first + 2, 1:])


@pytest.mark.gpu
def test_rows_for_a_gpu_wait_in_pinned_memory_and_arrive_as_they_are():
    config = run_config(batch=BATCH, data=DOCUMENTS)
    groups = make_groups(ParallelLayout(1), 0, torch.device("cuda"))
    loader = MicroBatchLoader(Samples(config), config, groups)
    read = loader._read(0, 2)
    assert read.tokens.is_pinned() and read.documents.is_pinned()
    inputs = loader.step(0, 1.0).load(0)
    loader.close()
    assert torch.equal(inputs.tokens.cpu(), torch.from_numpy(Samples(config).batch(0, 2)[:, :-1]))


def test_ranks_of_one_replica_read_the_same_samples():
    config, layout = run_config(batch=BATCH), ParallelLayout(4, tp=2, pp=2)
    tokens = [rows_of(config, layout, rank, 1)[0].tokens for rank in range(4)]
    assert all(torch.equal(tokens[0], other) for other in tokens)


@pytest.mark.parametrize("cp", [1, 2])
def test_dropout_numbers_are_sample_times_length_plus_position_on_any_layout(cp):
    config = run_config(GPT | DROPPING, batch=BATCH)
    seen = set()
    for rank in range(2 * cp):
        for inputs in rows_of(config, ParallelLayout(2 * cp, cp=cp), rank, step=2):
            samples = inputs.numbers // 8
            assert torch.equal(inputs.numbers % 8, inputs.positions)
            rows = Samples(config).rows[samples.flatten() % 256, inputs.positions.flatten()]
            assert torch.equal(inputs.tokens.flatten(), torch.from_numpy(rows))
            seen.update(inputs.numbers.flatten().tolist())
    assert seen == set(range(24 * 8, 36 * 8)), "step 2 is tokens 24 * 8 to 36 * 8, each once"


def test_without_dropout_or_in_evaluation_tokens_have_no_numbers():
    layout = ParallelLayout(1)
    assert rows_of(run_config(batch=BATCH), layout, 0, 0)[0].numbers is None
    dropping = run_config(GPT | DROPPING, batch=BATCH)
    assert rows_of(dropping, layout, 0, 0, loss_scale=0.0)[0].numbers is None


def test_auxiliary_losses_are_means_over_the_tokens_of_the_global_batch():
    config, layout = run_config(batch=BATCH), ParallelLayout(1)
    for scale in (0.0, 0.25):
        rows = rows_of(config, layout, 0, 0, scale)
        assert {x.aux_scale for x in rows} == {scale / (12 * 8)}


def restarts_by_hand(documents):
    """The position of each token in its document, counted along a row."""
    found = []
    for row in documents.tolist():
        places = [0]
        for before, document in zip(row, row[1:], strict=False):
            places.append(places[-1] + 1 if document == before else 0)
        found.append(places)
    return torch.tensor(found)


@pytest.mark.parametrize("asked", [{}, *({key: True} for key in DOCUMENTS), DOCUMENTS], ids=str)
@pytest.mark.parametrize("cp", [1, 2])
def test_every_context_rank_knows_the_documents_of_whole_rows(cp, asked):
    config = run_config(GPT | DROPPING, batch=BATCH, data=asked)
    whole = torch.from_numpy(Samples(config).documents(12, 12)[:, :8])
    places = torch.arange(8).expand(12, 8)
    if "document_positions" in asked:
        places = restarts_by_hand(whole)
    for rank in range(cp):
        mine = zigzag(8, cp, rank)
        for m, inputs in enumerate(rows_of(config, ParallelLayout(cp, cp=cp), rank, step=1)):
            rows = slice(2 * m, 2 * m + 2)
            if "document_mask" in asked:
                assert torch.equal(inputs.documents.rows, whole[rows])
            else:
                assert inputs.documents is None
            assert torch.equal(inputs.positions, places[rows, mine])
            ids = torch.arange(12, 24)[rows, None]
            assert torch.equal(inputs.numbers, ids * 8 + mine), "dropout is by place in the row"


class Counting(Samples):
    def __init__(self, config, count):
        super().__init__(config, count)
        self.asked = []

    def batch(self, start, count):
        self.asked.append(start)
        return super().batch(start, count)


def test_later_steps_are_read_ahead_and_none_past_the_end():
    config = run_config(batch=BATCH | {"micro_batch_size": 12})
    batches = Counting(config, 30)  # of 12: the last 6 are not a step
    loader = MicroBatchLoader(batches, config, groups_of(ParallelLayout(1), 0))
    loader.step(0, 1.0)
    end = time.monotonic() + 60.0
    while len(batches.asked) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert batches.asked == [0, 12]
    loader.step(1, 1.0)
    assert batches.asked == [0, 12]
    whole = torch.from_numpy(batches.batch(0, 12)[:, :-1])
    assert torch.equal(loader.step(0, 0.0).load(0).tokens, whole), (
        "back, as an evaluation that starts over"
    )
    loader.close()


@pytest.fixture
def prefix(tmp_path):
    write_dataset(tmp_path / "data", documents(), token_dtype(101))
    return str(tmp_path / "data")


def open_for(data, model=GPT, **options):
    config = run_config(model, data=data, train={"steps": 2, "eval_batches": 2})
    return open_loader(config, make_groups(ParallelLayout(1), 0, torch.device("cpu")), **options)


def tokens_of(loader):
    load = loader.step(0, 1.0).load
    loader.close()
    return load(0).tokens


def test_validation_holds_other_documents_than_training(prefix):
    both = {"train": [prefix], "split": "50,50,0"}
    train, valid = open_for(both), open_for(both, validation=True)
    assert not torch.equal(tokens_of(train), tokens_of(valid))


def test_validation_data_of_its_own_is_used_whole(prefix, tmp_path):
    write_dataset(tmp_path / "one", [[5] * 60], token_dtype(101))
    both = {"train": [prefix], "valid": [str(tmp_path / "one")], "split": "100,0,0"}
    assert (tokens_of(open_for(both, validation=True)) == 5).all()
    only_two = {"train": [str(tmp_path / "one")], "valid": [prefix], "split": "0,100,0"}
    assert (tokens_of(open_for(only_two)) == 5).all(), "nothing is held back from training"


def test_no_data_is_an_error_that_names_the_field():
    with pytest.raises(MtcliError) as caught:
        open_for({})
    (problem,) = caught.value.problems
    assert problem.message == "there is no training data"
    assert problem.field == "data.train" and "mtcli preprocess" in problem.hint
    assert caught.value.code == 2


def test_an_id_beyond_the_vocabulary_is_an_error_with_both_numbers(prefix, tmp_path):
    (tmp_path / "data.json").write_text(json.dumps({"max_token_id": 101}))
    with pytest.raises(MtcliError) as caught:
        open_for({"train": [prefix]})
    (problem,) = caught.value.problems
    message = f"{prefix}: the largest token id is 101, and vocab_size=101 takes 0 to 100"
    assert problem.message == message
    assert "model.vocab_size=102" in problem.hint and problem.field == "model.vocab_size"
    assert open_for({"train": [prefix]}, GPT | {"vocab_size": 102}).close() is None


def test_a_rank_without_blocks_is_given_no_rotation():
    rope = {"position": "rope", "num_layers": 2}
    config = run_config(GPT | rope, batch=BATCH, parallel={"pp": 2, "stage_layers": (0, 2)})
    layout = ParallelLayout(2, pp=2)
    turns = [bool(rows_of(config, layout, rank, 0)[0].rotations) for rank in range(2)]
    assert turns == [False, True]
