"""The sample ledger: counted by sample, the same on every layout, held against the data."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from hostile import write_manifest
from indexed_dataset import write_dataset
from marks import slow
from ranks import run_ranks
from tiny import GPT, documents, run_config

from mtcli.core.checkpoint.blocks import sampled_hash
from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.checkpoint.run_progress import RunProgress, SampleRecord
from mtcli.core.config.errors import MtcliError
from mtcli.core.config.phases import phases_of
from mtcli.core.convert.inspect import progress_rows
from mtcli.core.data.indexed import token_dtype
from mtcli.core.data.loader import Batches
from mtcli.core.parallel.groups import world_axis
from mtcli.core.training import consumed_samples
from mtcli.core.training.consumed_samples import ConsumedSamples, data_hashes, source_hashes
from mtcli.core.training.loop import train
from mtcli.core.training.step import Trainer

STEPS = 6


def sampled(prefix):
    return sampled_hash([Path(f"{prefix}.bin"), Path(f"{prefix}.idx")])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with the data sets a (64 documents) and b (16)."""
    folder = tmp_path_factory.mktemp("ledger")
    write_dataset(folder / "a", documents(), token_dtype(101))
    write_dataset(folder / "b", documents(16, seed=1), token_dtype(101))
    return folder


def blend(folder, *weights):
    return [str(weights[0]), str(folder / "a"), str(weights[1]), str(folder / "b")]


def ledger_of(words, split="80,20,0", **sections):
    config = run_config(data={"train": words, "split": split}, **sections)
    batches = Batches(words, split, "train", 80, config.batch.seq_len, config.seed)
    return ConsumedSamples(config, batches, source_hashes(batches))


def read_once(runtime, local_ranks, folder):
    """The files that a rank opens to hash the data, and the hashes that it takes."""
    opened, real = [], consumed_samples.sampled_hash
    consumed_samples.sampled_hash = lambda paths: opened.append(len(list(paths))) or real(paths)
    batches = ledger_of(blend(folder, 0.7, 0.3)).batches
    opened.clear()
    axis = world_axis(runtime.rank, runtime.world, runtime.recorder)
    return opened, data_hashes(batches, local_ranks[runtime.rank], axis)


def test_one_rank_of_a_machine_hashes_the_data_and_the_others_take_rank_0s(data):
    ranks = run_ranks(4, read_once, (0, 1, 0, 1), data)
    assert [opened for opened, _ in ranks] == [[2, 2], [], [2, 2], []]
    expected = [("", sampled(data / name)) for name in "ab"]
    assert [hashes for _, hashes in ranks] == [expected] * 4


def stored(record):
    """A record as it comes back from a manifest."""
    return SampleRecord.model_validate(json.loads(record.model_dump_json()))


def test_samples_are_counted_by_source_as_they_were_drawn(data):
    ledger = ledger_of(blend(data, 0.7, 0.3))
    for consumed in (0, 5, 77):
        record = ledger.record(consumed)
        by_prefix = Counter(sample.prefix for sample in ledger.batches.sample_ids(0, consumed))
        assert {s.prefix: s.samples for s in record.sources if s.samples} == by_prefix
        assert record.tokens == consumed * 8
    # 16 documents of 60 tokens, of which 80 % are the 13 first; 23 samples of 8 tokens
    small = record.sources[1]
    assert (small.samples, small.epoch) == (by_prefix[small.prefix], small.samples * 8 // (13 * 60))
    assert [source.weight for source in record.sources] == [0.7, 0.3]


def test_passes_are_whole_ones(data):
    ledger = ledger_of([str(data / "b")], split="1,0,0")
    of = 16 * 60
    assert [ledger.record(n).sources[0].epoch for n in (79, 80)] == [79 * 8 // of, 80 * 8 // of]
    ledger.samples = [2 * of // 8 - 1]
    assert ledger.record(80).sources[0].epoch == 1
    ledger.samples = [2 * of // 8]
    assert ledger.record(80).sources[0].epoch == 2


def test_batches_without_an_update_are_listed_and_not_counted_as_trained(data):
    ledger = ledger_of([str(data / "a")])
    ledger.skip(2, "overflow")
    ledger.skip(5, "fault")
    record = stored(ledger.record(20))
    assert [tuple(batch.model_dump().values()) for batch in record.skipped] == [
        (2, 4, 7, "overflow"),
        (5, 16, 19, "fault"),
    ]
    assert record.tokens == (20 - 8) * 8
    again = ledger_of([str(data / "a")])
    again.resume(record, 20)
    assert again.record(20) == record and again.record(24).tokens == (24 - 8) * 8


def test_a_checkpoint_without_a_ledger_counts_from_the_first_sample(data):
    ledger = ledger_of(blend(data, 0.5, 0.5))
    ledger.resume(None, 40)
    assert sum(ledger.samples) == 40 and ledger.record(40) == ledger_of(
        blend(data, 0.5, 0.5)
    ).record(40)


def test_data_that_has_moved_is_the_same_data(data, tmp_path):
    record = ledger_of(blend(data, 0.7, 0.3)).record(12)
    for path in data.glob("[ab].*"):
        shutil.copy(path, tmp_path)
    moved = ledger_of(blend(tmp_path, 0.7, 0.3))
    moved.resume(stored(record), 12)
    assert [s.samples for s in moved.record(12).sources] == [s.samples for s in record.sources]


def other_token(folder):
    path = folder / "a.bin"
    tokens = bytearray(path.read_bytes())
    tokens[1000] ^= 1
    path.write_bytes(tokens)


def other_hash(folder):
    (folder / "a.json").write_text(json.dumps({"sha256": {"bin": "22" * 32}}))


@pytest.mark.parametrize(
    ("change", "words", "split", "expected"),
    [
        (other_token, (0.7, 0.3), "80,20,0", ["a has the hash ", ", and the run was trained on "]),
        (other_hash, (0.7, 0.3), "80,20,0", ["a has the sha256 " + "22" * 32, "on " + "11" * 32]),
        (None, (0.3, 0.7), "80,20,0", ["a has the share 0.3, and the run was trained with 0.7"]),
        (None, (0.3, 0.7), "80,20,0", ["b has the share 0.7, and the run was trained with 0.3"]),
        (None, (0.7, 0.3), "90,10,0", ["data.split: the shares are (0.9, 0.1, 0.0), and"]),
        (None, (), "80,20,0", ["there are 1 data sources (", " on 2 ("]),
    ],
)  # fmt: skip
def test_other_data_is_refused_with_both_of_what_differs(
    data, tmp_path, change, words, split, expected
):
    for path in data.glob("[ab].*"):
        shutil.copy(path, tmp_path)
    (tmp_path / "a.json").write_text(json.dumps({"sha256": {"bin": "11" * 32}}))
    record = stored(ledger_of(blend(tmp_path, 0.7, 0.3)).record(12))
    if change:
        change(tmp_path)
    other = ledger_of(blend(tmp_path, *words) if words else [str(tmp_path / "a")], split)
    with pytest.raises(MtcliError) as caught:
        other.resume(record, 12)
    assert all(part in str(caught.value) for part in expected), str(caught.value)
    assert "--init into another output" in str(caught.value) and caught.value.code == 2


def test_a_hash_of_blocks_sees_length_order_and_both_ends_of_large_files(tmp_path):
    prefix = str(tmp_path / "x")
    tokens = bytearray(5 << 20)
    (tmp_path / "x.idx").write_bytes(b"index")
    found = set()
    for at in (None, 0, len(tokens) - 1):
        if at is not None:
            tokens[at] ^= 1
        (tmp_path / "x.bin").write_bytes(tokens)
        found.add(sampled(prefix))
    (tmp_path / "x.bin").write_bytes(tokens + b"\0")
    found.add(sampled(prefix))
    (tmp_path / "x.idx").write_bytes(b"indeX")
    found.add(sampled(prefix))
    assert len(found) == 5


def run(runtime, config, resume):
    """The error of a run, or what its newest checkpoint says of its progress, and in words."""
    try:
        train(config, runtime, resume=resume)
    except MtcliError as error:
        return str(error), int(error.code)
    checkpoint = open_checkpoint(Path(config.train.output))
    return checkpoint.extra, progress_rows(checkpoint)


def config_of(data, output, steps, weights=(0.7, 0.3), **sections):
    settings = {"steps": steps, "output": str(output), "precision": "fp16"}
    settings |= {"initial_loss_scale": 1.4 * 2.0**20, "loss_scale_hysteresis": 1, "save_every": 4}
    sources = {"train": blend(data, *weights), "split": "80,20,0"}
    return run_config(GPT, data=sources, train=settings, **sections)


def test_the_ledger_goes_on_exactly_on_any_layout_and_other_data_is_refused(data, tmp_path):
    ((whole, rows),) = run_ranks(1, run, config_of(data, tmp_path / "one", STEPS), False)
    two = {"parallel": {"zero": 1}, "batch": {"micro_batch_size": 2}}
    run_ranks(2, run, config_of(data, tmp_path / "two", STEPS, **two), False)
    shutil.rmtree(tmp_path / "two" / "checkpoints" / f"step-{STEPS:08d}")
    (parted, _) = run_ranks(1, run, config_of(data, tmp_path / "two", STEPS), True)[0]
    assert parted["samples"] == whole["samples"] and parted["random"] == whole["random"]
    done = RunProgress.model_validate(whole)
    assert done.random.model_dump() == {"kind": "counter", "seed": 7, "step": STEPS}
    steps = [batch.step for batch in done.samples.skipped]
    assert steps and steps == list(range(1, len(steps) + 1)), "the loss scale begins too large"
    assert done.updates == STEPS - len(steps) > 0
    assert rows["trained tokens"] == str(32 * done.updates)
    assert rows["random state"] == f"counters of seed 7, step {STEPS}"
    assert rows["skipped batches"].startswith(f"{len(steps)} (steps 1, ")
    assert f"hash {sampled(str(data / 'a'))}" in rows[f"data {data / 'a'}"]
    other = config_of(data, tmp_path / "two", 8, (0.3, 0.7))
    ((message, code),) = run_ranks(1, run, other, True)
    assert code == 2 and "a has the share 0.3, and the run was trained with 0.7" in message


def read(runtime, config, resume):
    """The samples of each step that a run makes, and its ledger's plan."""
    rows, real = {}, Trainer.train_step

    def noted(self, loader):
        size = config.batch.global_batch_size
        rows[self.step + 1] = loader.batches.sample_ids(self.step * size, size)
        return real(self, loader)

    Trainer.train_step = noted
    extra, _ = run(runtime, config, resume)
    return rows, extra["samples"]["planned"]


def short(data, output, steps, save_every=100, **sections):
    """A run on data of 119 samples an epoch: of 40 in 10 steps."""
    train = {"steps": steps, "output": str(output), "save_every": save_every, "keep": 0}
    sources = {"train": [str(data / "b")], "split": "1,0,0"}
    return run_config(GPT, data=sources, train=train, **sections)


@slow("three runs of 62 steps, 3 s")
@pytest.mark.parametrize("known", [True, False])
def test_a_run_made_longer_across_an_epoch_keeps_its_samples(data, tmp_path, known):
    """Once, twice, on other layouts; and where a checkpoint's ledger does not say its plan."""
    ((first, plan),) = run_ranks(1, read, short(data, tmp_path / "run", 10, save_every=4), False)
    assert plan == 40 and len(first) == 10
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000010")
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000008")
    if not known:
        forget_plan(tmp_path / "run/checkpoints/step-00000004")
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    ((once, plan),) = run_ranks(1, read, short(data, tmp_path / "run", 62), True)
    assert plan == 40 and list(once) == list(range(5, 63))
    assert all(once[step] == first[step] for step in range(5, 11))
    epoch = [sample for step in range(1, 30) for sample in (first | once)[step]]
    assert len(set(epoch)) == len(epoch), "no sample comes twice in the first epoch"
    two = {"parallel": {"zero": 1}, "batch": {"micro_batch_size": 2}}
    run_ranks(2, read, short(data, tmp_path / "other", 34, **two), True)
    ((twice, plan),) = run_ranks(1, read, short(data, tmp_path / "other", 62), True)
    assert plan == 40 and min(twice) == 35
    assert all(twice[step] == once[step] for step in twice)


def forget_plan(folder):
    """The checkpoint as it was written before ledgers had plans."""
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["extra"]["samples"]["planned"]
    write_manifest(folder / "manifest.json", manifest)


def test_faults_are_counted_from_the_last_update_or_overflow_on():
    samples = ConsumedSamples.__new__(ConsumedSamples)
    samples.span, samples.skipped = phases_of(run_config(GPT))[0], []
    samples.skipped_tokens = 0
    counts = {}
    for step, why in enumerate(["fault", "fault", None, "fault", "overflow", "fault", "fault"], 1):
        if why:
            samples.skip(step, why)
        counts[step] = samples.faults_in_a_row(step)
    assert counts == {1: 1, 2: 2, 3: 0, 4: 1, 5: 0, 6: 1, 7: 2}
    assert samples.skipped_tokens == 6 * 32
