"""Files that stay open between reads."""

import os
import pickle

import pytest

from mtcli.core.checkpoint import resharding
from mtcli.core.checkpoint.resharding import OpenFiles
from mtcli.core.config.errors import MtcliError


def test_a_file_is_opened_once_and_the_one_used_longest_ago_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(resharding, "MAX_OPEN", 2)
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_text(path.name)
    files = OpenFiles()
    a, b = files.get(paths[0]), files.get(paths[1])
    assert files.get(paths[0]) is a
    c = files.get(paths[2])
    assert b.closed
    assert (os.pread(a.fileno(), 9, 0), os.pread(c.fileno(), 9, 0)) == (b"a", b"c")
    assert files.get(paths[1]) is not b
    assert a.closed


def test_files_are_closed_with_what_holds_them(tmp_path):
    (tmp_path / "a").touch()
    files = OpenFiles()
    file = files.get(tmp_path / "a")
    del files
    assert file.closed


def test_a_file_that_is_gone_is_named(tmp_path):
    with pytest.raises(MtcliError, match="gone is damaged: it cannot be opened"):
        OpenFiles().get(tmp_path / "gone")


def test_another_process_opens_its_own(tmp_path):
    (tmp_path / "a").touch()
    files = OpenFiles()
    files.get(tmp_path / "a")
    assert not pickle.loads(pickle.dumps(files))._files
