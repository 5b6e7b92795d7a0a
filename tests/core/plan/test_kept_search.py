"""What a search has found is kept, and is that of the same question alone."""

import json

import pytest

from mtcli.core.config.loading import load_config
from mtcli.core.plan import kept_search as kept
from mtcli.core.plan.hardware import GPUS
from mtcli.core.plan.search import as_estimated, search

CONFIG = load_config("gpt2-1.5b", ["batch.global_batch_size=64", "train.precision=bf16"])
H100, FROM = GPUS["h100"], frozenset({"parallel.tp"})


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "mtcli" / "searches"


@pytest.fixture
def searched(monkeypatch):
    """The counts of layouts that searches were asked for."""
    tops = []

    def counting(config, world, device, top, *rest):
        tops.append(top)
        return search(config, world, device, top, *rest)

    monkeypatch.setattr(kept, "search", counting)
    return tops


def test_what_a_search_found_is_found_again_without_it(searched, folder):
    found = kept.kept_search(CONFIG, 8, H100, 4)
    again = kept.kept_search(CONFIG, 8, H100, 4)
    assert searched == [4] and len(list(folder.iterdir())) == 1
    assert again == found == search(CONFIG, 8, H100, 4) and len(found.best) == 4


@pytest.mark.parametrize(
    "question",
    [(CONFIG, 4, H100, 4), (CONFIG, 8, GPUS["h200"], 4), (CONFIG, 8, H100, 3)]
    + [(CONFIG, 8, H100, 4, FROM), (load_config("gpt2-1.5b"), 8, H100, 4)],
    ids=["world", "device", "top", "pins", "config"],
)
def test_another_question_is_searched(searched, question):
    kept.kept_search(CONFIG, 8, H100, 4)
    assert kept.kept_search(*question) == search(*question)
    assert len(searched) == 2


@pytest.mark.parametrize(
    "damage", ["[[0, 999999], 0]", "[[0], null]", '{"a": 1, "b": 2}', "[", "3"]
)
def test_a_damaged_file_is_searched_again_and_replaced(searched, folder, damage):
    found = kept.kept_search(CONFIG, 8, H100, 2)
    (file,) = folder.iterdir()
    right = json.loads(file.read_text())
    file.write_text(damage)
    assert kept.kept_search(CONFIG, 8, H100, 2) == found
    assert searched == [2, 2] and json.loads(file.read_text()) == right


def test_processes_are_started_ahead_of_a_search_and_not_for_what_is_kept():
    counts = []

    def rehearse(plans):
        counts.append(len(plans))
        return as_estimated(plans)

    for _ in range(2):
        kept.kept_search(CONFIG, 8, H100, 2, rehearse=rehearse)
    assert counts == [0, 2, 2]


def test_a_search_that_finds_nothing_is_not_kept(searched, folder):
    large = load_config("llama-3.1-405b")
    for _ in range(2):
        result = kept.kept_search(large, 8, H100, 1)
        assert not result.best and result.nearest
    assert searched == [1, 1] and not folder.exists()
