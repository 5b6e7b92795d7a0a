"""Files and folders appear whole or not at all."""

import os
import threading
from pathlib import Path

import pytest

from mtcli.core.config.errors import MtcliError
from mtcli.core.runtime import atomic_writes
from mtcli.core.runtime.atomic_writes import aside, atomic_folder, folder_of, write_text


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path):
    taken = tmp_path / "metrics.jsonl"
    taken.mkdir()
    for write in (lambda: write_text(taken, "{}"), lambda: taken.open("w")):
        expected = f"train.output: {taken} is a folder, and a file is written there"
        with pytest.raises(MtcliError, match=expected), folder_of("train.output", tmp_path):
            write()


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "page.html"
    target.write_text("before")
    with pytest.raises(ZeroDivisionError), aside(str(target)) as path:
        path.write_text("half")
        raise ZeroDivisionError
    assert target.read_text() == "before"
    assert list(tmp_path.iterdir()) == [target]
    with aside(str(target)) as path:
        path.write_text("after")
    assert target.read_text() == "after"
    assert list(tmp_path.iterdir()) == [target]


def test_a_disk_that_refuses_is_told(tmp_path):
    full = pytest.raises(MtcliError, match="cannot be written: No space left")
    with full as caught, aside(str(tmp_path / "a.json")):
        raise OSError(28, "No space left on device")
    assert caught.value.code == 1


def test_a_link_and_a_pipe_stay_what_they_are(tmp_path):
    (tmp_path / "file").write_text("before")
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(tmp_path / "file")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for target in (link, pipe):
        with aside(target) as path:
            path.write_text("after")
    assert link.is_symlink() and link.read_text() == "after"
    assert pipe.is_fifo() and os.read(reader, 9) == b"after"
    os.close(reader)


def test_a_name_that_is_too_long_is_refused(tmp_path):
    with pytest.raises(MtcliError, match="cannot be written: File name too long"), aside("a" * 300):
        raise AssertionError("there is nothing to write to")


def test_a_folder_is_replaced_without_a_moment_in_which_there_is_none(tmp_path):
    final, missing, done = tmp_path / "folder", [], threading.Event()

    def watch():
        while not done.is_set():
            missing.extend([1] if not final.exists() else [])

    watcher = threading.Thread(target=watch)
    for number in range(200):
        with atomic_folder(final, 0) as made:
            (made / "number").write_text(str(number))
        if not number:
            watcher.start()
    done.set()
    watcher.join()
    assert not missing and [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert (final / "number").read_text() == "199"


def test_where_names_cannot_be_swapped_a_folder_is_replaced_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic_writes, "_swap", lambda *_: False)
    for number in range(2):
        with atomic_folder(tmp_path / "folder", 0) as made:
            (made / "number").write_text(str(number))
    assert (tmp_path / "folder" / "number").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_file_is_durable_before_it_has_its_name(tmp_path, monkeypatch):
    synced, replace = [], Path.replace
    monkeypatch.setattr(os, "fsync", lambda n: synced.append(os.readlink(f"/proc/self/fd/{n}")))

    def checked(path, target):
        assert str(path) in synced
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", checked)
    write_text(tmp_path / "a.txt", "text")
    assert (tmp_path / "a.txt").read_text() == "text"


def test_a_temporary_name_cannot_be_guessed_and_follows_no_link(tmp_path, monkeypatch):
    target, mine = tmp_path / "facts.json", tmp_path / "mine"
    mine.write_text("mine")
    names = []
    for _ in range(2):
        with atomic_writes.atomic_file(target) as path:
            path.write_text("{}")
            names.append(path.name)
    assert names[0] != names[1] and str(os.getpid()) not in names
    assert target.stat().st_mode & 0o777 == 0o666 & ~_umask()
    monkeypatch.setattr(atomic_writes.secrets, "token_hex", lambda n: "0")
    (tmp_path / ".facts.0.json").symlink_to(mine)
    with pytest.raises(FileExistsError), atomic_writes.atomic_file(target):
        raise AssertionError("there is nothing to write to")
    assert mine.read_text() == "mine"


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask
