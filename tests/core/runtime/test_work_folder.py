"""A work folder is ours by its mark, one run at a time has it, and nobody else's is touched."""

import os
import shutil

import pytest

from mtcli.core.config.errors import MtcliError
from mtcli.core.runtime import work_folder
from mtcli.core.runtime.work_folder import MARK, WorkFolder


def in_another_process(work):
    """Whether another process is refused what `work` does: a process may lock a file twice."""
    pid = os.fork()
    if not pid:
        try:
            work()
        except MtcliError as error:
            os._exit(3 if "another run is writing" in str(error) else 4)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3


def test_one_run_at_a_time_has_the_folder_and_a_later_one_finds_what_is_in_it(tmp_path):
    path = tmp_path / "deep" / "out.partial"
    work = WorkFolder(path, tmp_path / "out")
    (path / "half").write_text("half")
    assert in_another_process(lambda: WorkFolder(path, tmp_path / "out"))
    work.close()
    assert not in_another_process(lambda: WorkFolder(path, tmp_path / "out"))
    work = WorkFolder(path, tmp_path / "out")
    assert (path / "half").read_text() == "half"
    work.clear()
    assert os.listdir(path) == [MARK]
    work.remove()
    assert not path.exists() and path.parent.exists()


@pytest.mark.parametrize("name", ["notes.txt", MARK])
def test_a_folder_of_someone_else_is_named_and_not_touched(name, tmp_path):
    path = tmp_path / "out.partial"
    path.mkdir()
    WorkFolder(path, tmp_path / "out").close()  # an empty one holds nothing to lose
    shutil.rmtree(path)
    path.mkdir()
    (tmp_path / "mine").write_text("mine")
    (path / name).symlink_to(tmp_path / "mine")
    with pytest.raises(MtcliError, match=f"out.partial was not made by mtcli, and holds {name}"):
        WorkFolder(path, tmp_path / "out")
    assert os.listdir(path) == [name] and (path / name).read_text() == "mine"


def test_a_link_and_a_file_in_its_place_are_refused(tmp_path):
    home = tmp_path / "home"
    WorkFolder(home, tmp_path / "x").close()
    (home / "thesis").touch()
    (tmp_path / "out.partial").symlink_to(home)
    (tmp_path / "file.partial").touch()
    for name, what in (("out", "is a link"), ("file", "is a file")):
        with pytest.raises(MtcliError, match=f"{name}.partial {what}"):
            WorkFolder(tmp_path / f"{name}.partial", tmp_path / name)
    assert (home / "thesis").exists()


def test_links_in_a_folder_that_is_cleared_are_removed_and_not_followed(tmp_path):
    work = WorkFolder(tmp_path / "out.partial", tmp_path / "out")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis").touch()
    (work.path / "link").symlink_to(tmp_path / "home")
    work.remove()
    assert (tmp_path / "home" / "thesis").exists() and not work.path.exists()


def test_a_lock_that_its_holder_removes_while_it_is_waited_for_is_taken_anew(tmp_path, monkeypatch):
    path, take, opened = tmp_path / "x.lock", work_folder.append_untrusted, []

    def overtaken(name):
        file = take(name)
        opened.append(file)
        if len(opened) == 1:
            path.unlink()  # by the run that had it, as it ends
        return file

    monkeypatch.setattr(work_folder, "append_untrusted", overtaken)
    lock = work_folder.lock_output(path, path)
    assert lock is opened[1] and opened[0].closed
    assert os.path.samestat(os.fstat(lock.fileno()), path.stat())
    lock.close()
