"""Outputs that a user names are checked before the work."""

import os
import subprocess

import pytest

from mtcli.core.config.errors import MtcliError
from mtcli.core.runtime.outputs import (
    require_apart,
    require_extra,
    require_no_link,
    require_writable,
)


def test_a_suffix_that_cannot_be_written_is_refused():
    with pytest.raises(MtcliError, match=r"it does not write \.gif") as caught:
        require_writable("a.gif", "--plot", (".png", ".svg"))
    assert "ends in .png or .svg" in str(caught.value)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(MtcliError, match="there is no folder"):
        require_writable(str(tmp_path / "no" / "a.png"), "--plot", (".png",))
    (tmp_path / "file").touch()
    with pytest.raises(MtcliError, match="file is a file, and no folder"):
        require_writable(str(tmp_path / "file" / "a.png"), "--plot", (".png",))


def test_a_folder_is_no_file(tmp_path):
    (tmp_path / "a.html").mkdir()
    with pytest.raises(MtcliError, match="is a folder"):
        require_writable(str(tmp_path / "a.html"), "--report", (".html",))


def test_a_folder_that_takes_no_files_is_refused_before_the_work(tmp_path):
    folder = tmp_path / "read-only"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", str(folder)], check=False)
    if mounted.returncode:
        pytest.skip("mounting a read-only disk takes root")
    try:
        with pytest.raises(MtcliError, match="--output: .*read-only cannot be written") as caught:
            require_writable(str(folder / "a.json"), "--output")
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    assert caught.value.code == 2
    os.symlink(tmp_path / "elsewhere.json", tmp_path / "link.json")
    for takes in ("link.json", "new.json"):
        require_writable(str(tmp_path / takes), "--output")
    require_writable("/dev/null", "--output")


def test_a_missing_extra_says_how_to_install_it():
    with pytest.raises(MtcliError, match="--plot needs no_such_module") as caught:
        require_extra("no_such_module", "--plot")
    assert "mtcli[report]" in str(caught.value)


def test_an_input_is_no_output_by_any_name(tmp_path):
    (tmp_path / "a.json").touch()
    (tmp_path / "folder" / "in").mkdir(parents=True)
    (tmp_path / "folder" / "in" / "x").touch()
    (tmp_path / "link").symlink_to(tmp_path / "a.json")
    os.link(tmp_path / "a.json", tmp_path / "second name")
    outputs = [tmp_path / "a.json", tmp_path / "folder"]
    for name in ("a.json", "link", "second name", "folder/in/x", "folder/../a.json", "folder"):
        with pytest.raises(MtcliError, match="--output: the input .* would be replaced"):
            require_apart([tmp_path / name], outputs, "--output")
    (tmp_path / "b.json").touch()
    require_apart([tmp_path / "b.json", tmp_path / "folder 2", "no\0name"], outputs, "--output")


def test_a_derived_name_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "x.items.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(MtcliError, match=r"--json: .*x\.items\.jsonl is a link"):
        require_no_link(tmp_path / "x.items.jsonl", "--json")
    require_no_link(tmp_path / "y.items.jsonl", "--json")
