"""Regular files are opened, and nothing else: by what was opened, not by what the name led to."""

import os
import socket

import pytest

from mtcli.core.config.untrusted import append_untrusted, open_untrusted, read_untrusted


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


@pytest.mark.parametrize("take", [open_untrusted, read_untrusted, append_untrusted])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "it is a named pipe|No such device"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a device|symbolic links"),
        (lambda path: path.symlink_to("/dev/full"), "it is a device|symbolic links"),
        (os.mkdir, "it is a folder|Is a directory"),
        (make_socket, "No such device"),
    ],
)
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, monkeypatch, take, make, message):
    monkeypatch.chdir(tmp_path)  # a socket's path has at most 108 characters
    make(tmp_path / "x") if make is not make_socket else make("x")
    handles = len(os.listdir("/dev/fd"))
    with pytest.raises(OSError, match=message) as error:
        take(tmp_path / "x")
    assert error.value.strerror and error.value.filename
    assert len(os.listdir("/dev/fd")) == handles


def test_a_link_is_followed_to_read_and_not_to_write(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("x")
    assert read_untrusted(tmp_path / "link", 3) == b"abc"
    with pytest.raises(OSError, match="symbolic links"):
        append_untrusted(tmp_path / "link")
    with append_untrusted(tmp_path / "x") as file:
        file.write(b"d")
    assert (tmp_path / "x").read_bytes() == b"abcd"


def test_a_file_of_terabytes_is_refused_and_not_read(tmp_path):
    with open(tmp_path / "x", "wb") as file:
        file.truncate(1 << 42)  # a hole: it takes no room
    with pytest.raises(OSError, match="it has more than 1000 bytes"):
        read_untrusted(tmp_path / "x", 1000)
