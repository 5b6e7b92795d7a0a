"""Which checkpoints stay: the newest, multiples of a step, and those that somebody reads."""

import errno
import fcntl
import gc
import os
import pickle
import shutil

import pytest
import torch
from saving import save_halves

from mtcli.core.checkpoint import retention
from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.checkpoint.retention import prune, steps_to_remove
from mtcli.core.config.errors import MtcliError


@pytest.mark.parametrize(
    ("keep", "every", "kept"),
    [
        (0, 0, [10, 15, 20, 25, 30, 35]),
        (0, 10, [10, 15, 20, 25, 30, 35]),
        (1, 0, [35]),
        (2, 0, [30, 35]),
        (2, 20, [20, 30, 35]),
        (2, 10, [10, 20, 30, 35]),
        (9, 7, [10, 15, 20, 25, 30, 35]),
    ],
)
def test_the_newest_and_the_multiples_are_kept(keep, every, kept):
    steps = [35, 10, 20, 15, 30, 25]
    assert sorted(set(steps) - set(steps_to_remove(steps, keep, every))) == kept


def steps_in(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir())


def test_saves_leave_the_multiples_besides_the_newest(tmp_path):
    for step in range(1, 8):
        save_halves(tmp_path, step, keep=2, keep_every=3)
    assert steps_in(tmp_path) == [3, 6, 7]


def test_a_checkpoint_that_is_read_stays_until_it_is_read_no_more(tmp_path):
    for step in (1, 2):
        save_halves(tmp_path, step)
    reader = open_checkpoint(tmp_path / "step-00000001")
    save_halves(tmp_path, 3, keep=1)
    assert steps_in(tmp_path) == [1, 3]
    assert reader.read("final_norm.weight").shape == (12,)
    del reader
    gc.collect()
    save_halves(tmp_path, 4, keep=1)
    assert steps_in(tmp_path) == [4]


def test_a_checkpoint_can_be_handed_to_another_process(tmp_path):
    save_halves(tmp_path, 1)
    reader = open_checkpoint(tmp_path)
    copy = pickle.loads(pickle.dumps(reader))
    name = "final_norm.weight"
    assert torch.equal(copy.read(name), reader.read(name))
    del reader
    gc.collect()
    for step in (2, 3):
        save_halves(tmp_path, step, keep=1)
    assert steps_in(tmp_path) == [3], "a copy holds no lock"


def test_a_checkpoint_that_goes_while_it_is_opened_says_so(tmp_path, monkeypatch):
    for step in (1, 2):
        save_halves(tmp_path, step)
    open_checkpoint(tmp_path / "step-00000001")
    gc.collect()
    asked = []

    def meanwhile(*_):
        asked.append(1)
        if len(asked) == 1:
            prune(tmp_path, 1, 0, tmp_path / "step-00000002")

    monkeypatch.setattr(retention.fcntl, "flock", meanwhile)
    with pytest.raises(MtcliError, match="step-00000001 is being removed by its run"):
        open_checkpoint(tmp_path / "step-00000001")


def nfs_lock(file, operation):
    """flock as NFS emulates it: an exclusive lock needs a file that is open to be written."""
    if operation & fcntl.LOCK_EX and "+" not in file.mode:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def no_lock(file, operation):
    """flock of a Lustre that was mounted without it."""
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def test_a_file_system_that_locks_what_can_be_written_alone_is_pruned(tmp_path, monkeypatch):
    monkeypatch.setattr(retention.fcntl, "flock", nfs_lock)
    told = []
    for step in (1, 2, 3):
        save_halves(tmp_path, step, keep=1, warn=told.append)
    assert steps_in(tmp_path) == [3] and not told


def test_no_file_of_a_checkpoint_is_open_here_when_it_is_removed(tmp_path, monkeypatch):
    removed, remove = [], shutil.rmtree

    def watched(folder, **options):
        links = (os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                 if os.path.exists(f"/proc/self/fd/{fd}"))  # fmt: skip
        removed.append([link for link in links if str(tmp_path) in link])
        remove(folder, **options)

    for step in (1, 2):
        save_halves(tmp_path, step)
    monkeypatch.setattr(retention.shutil, "rmtree", watched)
    prune(tmp_path, 1, 0, tmp_path / "step-00000002")
    assert removed == [[]] and steps_in(tmp_path) == [2]


def test_without_locks_old_checkpoints_go_and_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(retention.fcntl, "flock", no_lock)
    told = []
    for step in (1, 2, 3):
        save_halves(tmp_path, step, keep=1, warn=told.append)
    assert steps_in(tmp_path) == [3]
    assert len(set(told)) == 1 and "without locks (Function not implemented)" in told[0]


def test_what_cannot_be_removed_stays_and_that_is_said(tmp_path, monkeypatch):
    def refuse(folder):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    told = []
    save_halves(tmp_path, 1)
    monkeypatch.setattr(retention, "open_to_lock", refuse)
    save_halves(tmp_path, 2, keep=1, warn=told.append)
    assert steps_in(tmp_path) == [1, 2]
    assert told == [f"old checkpoints in {tmp_path} stay, and it fills: Permission denied"]
