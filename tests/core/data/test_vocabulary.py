"""A preset's vocabulary is a default that the data's tokenizer overrides; others are kept."""

import json

import numpy as np
import pytest
from indexed_dataset import write_dataset
from tiny import GPT, run_config

from mtcli.core.checkpoint.fine_tuning import starting_tokenizer
from mtcli.core.config.loading import load_config, preset_names, read_table
from mtcli.core.data.vocabulary import describe_vocabulary, vocabulary_notes, with_vocabulary


@pytest.fixture
def dataset(tmp_path):
    """A function from a name, the size of a tokenizer and the largest id to a prefix; without
    either nothing is said of it."""

    def make(name, size=None, largest=None):
        write_dataset(tmp_path / name, [np.arange(9)], np.dtype("<u2"))
        facts = {"tokenizer": {"vocab_size": size}, "max_token_id": largest}
        (tmp_path / f"{name}.json").write_text(json.dumps(facts))
        if size is None:
            (tmp_path / f"{name}.json").unlink()
        return str(tmp_path / name)

    return make


def size_of(source, *overrides):
    return load_config(
        source, with_vocabulary(source, list(overrides), starting_tokenizer)
    ).model.vocab_size


def test_a_preset_takes_the_vocabulary_of_its_data_s_tokenizers(dataset):
    small, large = dataset("small", 2000, 900), dataset("large", 60000, 7)
    assert size_of("tiny", f"data.train={small}") == 2000
    assert size_of("gpt2-345m", f"data.train={large}") == 60000
    both = json.dumps(["0.3", small, "0.7", large])
    assert size_of("tiny", f"data.train={both}") == 60000
    assert size_of("tiny", f"data.train={small}", f"data.valid={large}") == 60000
    table = {"model": {"preset": "tiny"}, "data": {"train": [small]}}
    assert size_of(table) == 2000
    assert size_of({"data": {"train": [small]}}, "model.preset=tiny") == 2000


def test_what_a_config_or_the_command_says_is_kept(dataset, tmp_path):
    small, silent = dataset("small", 2000), dataset("silent")
    assert size_of("tiny", f"data.train={small}", "model.vocab_size=4000") == 4000
    table = {"model": {"preset": "tiny", "vocab_size": 4000}, "data": {"train": [small]}}
    assert size_of(table) == 4000
    (tmp_path / "run.toml").write_text(f'[model]\npreset = "tiny"\nvocab_size = 8192\n[data]\n'
                                       f'train = ["{small}"]\n')  # fmt: skip
    assert size_of(str(tmp_path / "run.toml")) == 8192
    assert size_of("tiny", f"data.train={json.dumps([small, silent])}") == 8192
    assert size_of("tiny", f"data.train={small}", "train.init=weights") == 8192
    assert size_of("tiny") == 8192 and size_of("tiny", "data.train=chats.jsonl") == 8192


def test_facts_that_are_damaged_are_left_to_what_reads_the_data(dataset, tmp_path):
    prefix = dataset("bad", 2000)
    for text in ("{", "[]", '{"tokenizer": 3}', '{"tokenizer": {"vocab_size": -1}}'):
        (tmp_path / "bad.json").write_text(text)
        assert size_of("tiny", f"data.train={prefix}") == 8192
    assert with_vocabulary("no such preset", ["a.b=1"], starting_tokenizer) == ["a.b=1"]


@pytest.mark.parametrize(
    ("size", "largest", "note"),
    [
        (50, 49, "warning: model.vocab_size=101, and the data has ids up to 49: 51 rows of the "
         "embedding are never used; --set model.vocab_size=50"),
        (101, 20, "warning: model.vocab_size=101, and the data has ids up to 20: 80 rows of the "
         "embedding are never used; preprocess --tokenizer train:N"),
        (51, 50, None),
        (None, None, None),
    ],
)  # fmt: skip
def test_a_vocabulary_of_which_the_data_uses_half_or_less_is_told(dataset, size, largest, note):
    config = run_config(GPT, data={"train": [dataset("data", size, largest)]})
    assert vocabulary_notes(config) == ([note] if note else [])


def test_the_header_has_the_model_s_vocabulary_beside_the_data_s(dataset):
    config = run_config(GPT, data={"train": [dataset("data", 50)]})
    assert describe_vocabulary(config) == {"vocab": "101 ids, the data's tokenizer 50"}
    config = run_config(GPT, data={"train": [dataset("same", 101)]})
    assert describe_vocabulary(config) == {"vocab": "101 ids, as many as the data's tokenizer"}
    assert describe_vocabulary(run_config(GPT, data={"train": [dataset("silent")]})) == {}


def test_every_preset_warms_up():
    names = [name for name in preset_names() if "train" in (table := read_table(name))
             or "optimizer" in table]  # fmt: skip
    assert [n for n in names if not load_config(n).optimizer.warmup_steps] == []
