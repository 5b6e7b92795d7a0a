"""Packed rows: every example in one row, near the fewest rows, and each once per epoch."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from chats import REWRITING, sums, talks, tokenizer, write_lines
from hypothesis import given
from hypothesis import strategies as st
from tiny import LLAMA, run_config

from mtcli.core.config.errors import MtcliError
from mtcli.core.config.schema import TrainConfig
from mtcli.core.data.best_fit import open_conversations, pack
from mtcli.core.data.epochs import with_steps
from mtcli.core.data.tokenize import load_tokenizer


@given(st.lists(st.integers(1, 64), min_size=1, max_size=80))
def test_every_example_is_in_one_row_and_no_two_rows_fit_in_one(lengths):
    lengths = np.array(lengths)
    rows = pack(lengths, 64)
    assert sorted(rows.order.tolist()) == list(range(len(lengths)))
    filled = np.add.reduceat(lengths[rows.order], rows.bounds[:-1])
    assert filled.max() <= 64 and (np.diff(rows.bounds) > 0).all()
    if len(filled) > 1:
        assert np.partition(filled, 1)[:2].sum() > 64


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60))
def test_rows_are_those_of_best_fit_by_brute_force(lengths):
    room, rows = 40, []
    for length in sorted(lengths, reverse=True):
        fits = [row for row in rows if row >= length]
        best = rows.index(min(fits)) if fits else len(rows)
        rows[best : best + 1] = [rows[best] - length if fits else room - length]
    packed = pack(np.array(lengths), room)
    left = room - np.add.reduceat(np.array(lengths)[packed.order], packed.bounds[:-1])
    assert sorted(left.tolist()) == sorted(rows)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packing")
    tokenizer().save_pretrained(folder / "tokenizer")
    write_lines(folder / "a.jsonl", sums(40))
    write_lines(folder / "b.jsonl", talks(15))
    return folder


def config(home, *names, seq_len=128, **data):
    names = [str(home / name) for name in names or ("a.jsonl", "b.jsonl")]
    sizes = LLAMA | {"vocab_size": 300, "max_seq_len": seq_len}
    return run_config(
        sizes,
        batch={"seq_len": seq_len, "global_batch_size": 4},
        data={"train": names, "tokenizer": str(home / "tokenizer")} | data,
        optimizer={"warmup_steps": 0},
    )


def test_an_epoch_has_every_example_once_and_its_labels_are_its_own(home):
    run = config(home)
    data = open_conversations(run, None)
    per_epoch = data.epochs.steps_per_epoch * 4
    data.num_samples = 3 * per_epoch
    decoder = load_tokenizer(home / "tokenizer")
    epochs = []
    for epoch in range(3):
        seen, order = Counter(), []
        for number in range(epoch * per_epoch, (epoch + 1) * per_epoch):
            (row,), (documents,) = data.batch(number, 1), data.documents(number, 1)
            (weights,) = data.loss_weights(number, 1)
            for document in range(documents.max() + 1):
                at = documents == document
                if not weights[at[1:]].any():
                    continue  # padding
                said = decoder.decode(row[1:][(weights > 0) & at[1:]])
                seen[decoder.decode(row[at]), said] += 1
                order.append(said)
        assert sum(seen.values()) == 55
        epochs.append((seen, order))
    assert epochs[0][0] == epochs[1][0] == epochs[2][0]
    assert epochs[0][1] != epochs[1][1]
    told = {line["completion"] + "<|im_end|>" for line in sums(40)}
    assert told <= {said for _, said in epochs[0][0]}


def test_the_last_batch_of_an_epoch_is_filled_up_with_rows_without_weight(home):
    data = open_conversations(config(home), None)
    rows, per_epoch = len(data.rows), data.epochs.steps_per_epoch * 4
    assert rows % 4, "the case needs a last batch that is not full"
    data.num_samples = per_epoch
    assert not data.loss_weights(rows, per_epoch - rows).any()
    assert (data.batch(rows, per_epoch - rows) == data.pad_id).all()
    assert sum(data.drawn(0, per_epoch)) == rows
    assert data.sample_ids(0, 1)[0].prefix.endswith(".jsonl")


def test_any_part_of_a_batch_is_the_same_however_it_is_asked_for(home):
    data = open_conversations(config(home), None)
    data.num_samples = 24
    for read in (data.batch, data.documents, data.loss_weights):
        together = read(0, 24)
        assert all(np.array_equal(read(i, 1)[0], together[i]) for i in reversed(range(24)))


def test_steps_are_those_of_the_epochs_and_a_longer_warm_up_is_refused(home):
    run = config(home)
    per_epoch = open_conversations(run, None).epochs.steps_per_epoch
    assert with_steps(run, None).train.steps == 20  # no epochs are set
    for epochs, steps in ((1.0, per_epoch), (2.5, -(-5 * per_epoch // 2)), (0.001, 1)):
        train = TrainConfig(epochs=epochs, eval_every=run.train.eval_every)
        assert with_steps(run.model_copy(update={"train": train}), None).train.steps == steps
    slow = run.optimizer.model_copy(update={"warmup_steps": 99})
    with pytest.raises(MtcliError, match=r"warmup_steps=99 is above the 1 steps of 0.001 epochs"):
        with_steps(run.model_copy(update={"train": train, "optimizer": slow}), None)
    both = run.train.model_copy(update={"epochs": 0.001})
    with pytest.raises(MtcliError, match=r"epochs=0.001 are 1 steps of this data, .*steps=20"):
        with_steps(run.model_copy(update={"train": both}), None)


def test_validation_is_of_its_own_files_or_of_a_share(home):
    own = config(home, "a.jsonl", valid=[str(home / "b.jsonl")])
    assert len(open_conversations(own, None, "valid").number) == 15
    assert len(open_conversations(own, None).number) == 40
    share = config(home, "a.jsonl", split="90,10,0")
    counts = [len(open_conversations(share, None, which).number) for which in ("train", "valid")]
    assert counts == [36, 4]
    with pytest.raises(MtcliError, match='split "1,0,0" of 40 conversations gives valid none'):
        open_conversations(config(home, "a.jsonl"), None, "valid")


def test_a_tokenizer_is_needed_and_the_starting_weights_may_bring_it(home):
    bare = config(home, tokenizer=None)
    with pytest.raises(MtcliError, match="data.tokenizer: conversations are read by a tokenizer"):
        open_conversations(bare, None)
    given = open_conversations(bare, home / "tokenizer")
    assert np.array_equal(given.batch(0, 1), open_conversations(config(home), None).batch(0, 1))
    plain = config(home, "a.jsonl", chat_template=False)
    assert len(open_conversations(plain, None).lengths) == 40
    assert open_conversations(plain, None).lengths.sum() < given.lengths[:40].sum()


def test_words_say_how_much_there_is(home):
    told = open_conversations(config(home), None).describe()
    assert told["data"].startswith("55 examples, ") and "steps an epoch" in told["packed"]
    assert "turns" not in told


@pytest.fixture(scope="module")
def unrolling(tmp_path_factory):
    """Two files of 12 talks, 6 of which have two turns, and a template that unrolls these."""
    folder = tmp_path_factory.mktemp("unrolling")
    tokenizer(REWRITING["Phi-3"]).save_pretrained(folder / "tokenizer")
    for seed, name in enumerate(("a.jsonl", "b.jsonl")):
        write_lines(folder / name, talks(12, seed))
    return folder


def test_words_count_what_unrolled_talks_repeat_once(unrolling):
    data = open_conversations(config(unrolling, seq_len=192), None)
    spelt = [
        [tuple(read.tokens[a:b]) for a, b in pairwise([0, *read.ends])] for read in data.examples
    ]
    again = sum(
        next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
        for file, read in zip(spelt, data.examples, strict=True)
        for (one, line), (other, before) in pairwise(zip(file, read.lines, strict=True))
        if line == before
    )
    tokens = sum(map(len, spelt[0] + spelt[1]))
    learned = sum(int((read.weights > 0).sum()) for read in data.examples)
    told = data.describe()
    assert again > 0 and told["data"] == (
        f"36 examples of 24 conversations, {tokens - again:,} tokens, "
        f"{learned:,} of them with a loss"
    )
    assert told["turns"] == (
        "12 conversations are 24 examples, one a turn, as the chat template shows turns otherwise "
        f"once others follow; they read {again:,} tokens again"
    )
    assert f"{tokens / (len(data.rows) * 193):.0%} full" in told["packed"]
    last = open_conversations(config(unrolling, seq_len=192, loss_on="last"), None).describe()
    assert last["data"].startswith("24 examples, ") and "turns" not in last


def test_talks_of_two_files_are_two_though_their_lines_have_one_number(unrolling):
    for name in ("c.jsonl", "d.jsonl"):
        write_lines(unrolling / name, [list(talks(2))[1]])
    told = open_conversations(config(unrolling, "c.jsonl", "d.jsonl", seq_len=192), None).describe()
    assert told["data"].startswith("4 examples of 2 conversations, ")


def test_no_talk_is_trained_on_in_part_and_validated_on_in_part(unrolling):
    lines = []
    for which, wanted in (("train", 9), ("valid", 3)):
        share = open_conversations(
            config(unrolling, "a.jsonl", seq_len=192, split="75,25,0"), None, which
        )
        lines.append(set(share.lines.tolist()))
        assert len(lines[-1]) == wanted < len(share.lengths)
    assert not lines[0] & lines[1]
