"""Files of the network as streams: by a server on loopback that drops connections, by fsspec's
memory, and by a stand-in for the hub. What is read is the file, byte for byte."""

import random
import sys

import pytest
from hub_stub import COMMIT, Hub, serving
from web_stub import Web, served

from mtcli.core.config.errors import MtcliError
from mtcli.core.runtime import remote
from mtcli.core.runtime.process_pool import ProcessPool
from mtcli.core.runtime.remote import list_remote, local_copy, open_input

DATA = random.Random(7).randbytes(300_001)


@pytest.fixture(autouse=True)
def at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def opened(address):
    ((address, size, _),) = list_remote(address)
    return open_input(address, size)


def refused(code, words):
    caught = pytest.raises(MtcliError, match=words)

    class Check:
        def __enter__(self):
            self.info = caught.__enter__()

        def __exit__(self, *kinds):
            caught.__exit__(*kinds)
            assert self.info.value.code == code
            assert all(problem.hint for problem in self.info.value.problems)
            return True

    return Check()


def test_a_stream_goes_on_at_the_byte_where_its_connection_dropped():
    web = Web({"a": DATA}, most=100_000)
    with served(web) as address, opened(f"{address}/a") as file:
        assert file.read() == DATA
        starts = [first for _, first in web.ranges]
        assert starts == [0, 0, 100_000, 200_000, 300_000]  # the first asks for the size
        file.seek(-7, 2)
        assert file.read(3) == DATA[-7:-4]
        file.seek(12_345)
        assert file.read(5) == DATA[12_345:12_350]


def test_one_connection_streams_a_file_that_is_read_in_order():
    web = Web({"a": DATA})
    with served(web) as address, opened(f"{address}/a") as file:
        while file.read(1000):
            pass
    assert len(web.ranges) == 2


def test_tries_without_a_byte_end_with_the_place():
    web = Web({"a": DATA}, most=1000)
    with served(web) as address:
        file = opened(f"{address}/a")
        web.lost_after = 3
        with refused(1, "broke off at byte 2,000 of 300,001, and 6 tries gave no more"):
            file.read()
        assert len(web.ranges) == 3 + remote.TRIES - 1  # the first is on the dropped one


def test_a_file_that_changed_or_went_is_an_error_at_once():
    web = Web({"a": DATA}, most=1000)
    with served(web) as address:
        file = opened(f"{address}/a")
        file.read(1500)
        web.files["a"] = DATA + b"."
        with refused(1, "has changed: it has 300,002 bytes, and had 300,001"):
            file.read()
        web.files.clear()
        with refused(1, "is gone: HTTP Error 404"):
            open_input(f"{address}/a", len(DATA)).read()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ftp://host/a.jsonl", "'ftp://host/a.jsonl' is no address of an input"),
        ("simplecache::https://host/a.jsonl", "is no address of an input"),
        ("file:///etc/passwd", "is no address of an input"),
        ("memory://none/a.jsonl", "there is no memory://none/a.jsonl"),
        ("memory://none/*.jsonl", "no file matches memory://none/"),
        ("http://no.such.host.invalid/a", "http://no.such.host.invalid/a cannot be read"),
        ("http://127.0.0.1:1/a", "cannot be read: .*refused"),
        ("http://127.0.0.1:1/a b", "cannot be read"),
        ("hub:x", "'hub:x' is no dataset of the hub"),
        ("hub:a/b@c d/e", "is no dataset of the hub"),
    ],
)
def test_names_of_nothing_are_refused(name, words):
    with refused(2, words):
        list_remote(name)


def test_answers_of_a_server_that_give_no_file_are_refused():
    web = Web({"secret": 403, "login": 401, "broken": 500})
    with served(web) as address:
        for name, words in [
            ("none", "there is no .*/none"),
            ("secret", "may not be read: HTTP Error 403"),
            ("login", "may not be read: HTTP Error 401"),
            ("broken", "cannot be read: HTTP Error 500"),
        ]:
            with refused(2, words):
                list_remote(f"{address}/{name}")
    with served(Web({"a": DATA}, ranged=False)) as address, refused(2, "no.* by ranges of bytes"):
        list_remote(f"{address}/a")


def test_a_redirect_is_followed():
    web = Web({"b": DATA})
    web.redirects["a"] = "/b"
    with served(web) as address, opened(f"{address}/a") as file:
        assert file.read() == DATA


def test_an_empty_file_has_no_bytes():
    with served(Web({"a": b""})) as address, opened(f"{address}/a") as file:
        assert file.read() == b""


def test_a_missing_package_is_named(monkeypatch):
    for package in ("s3fs", "gcsfs"):
        monkeypatch.setitem(sys.modules, package, None)
    for name, package in (("s3://b/a", "s3fs"), ("gs://b/a", "gcsfs")):
        with refused(2, f"{name} needs the package {package}"):
            list_remote(name)


def in_memory(files):
    import fsspec

    memory = fsspec.filesystem("memory")
    for name, data in files.items():
        memory.pipe_file(f"/{name}", data)


def test_folders_and_globs_of_a_file_system_are_listed():
    in_memory({"b/x/1.jsonl": DATA, "b/x/y/2.jsonl": DATA[:9], "b/README": b"."})
    names = ["memory:///b/x/1.jsonl", "memory:///b/x/y/2.jsonl"]
    assert [one.address for one in list_remote("memory://b/x")] == names
    assert [one[:2] for one in list_remote("memory://b/x/*")] == [(names[0], len(DATA))]
    assert [one.address for one in list_remote("memory://b/**/*.jsonl")] == names


def test_a_stream_of_a_file_system_that_breaks_is_opened_again(monkeypatch):
    in_memory({"b/a": DATA})
    file_system, opens = remote._FileSystem.stream, []

    class Breaking:
        """A file whose connection is reset after 65,536 bytes."""

        def __init__(self, system, address, start, size):
            opens.append(start)
            self.file, self.end = file_system(system, address, start, size), start + 65_536
            self.seek, self.seekable, self.close = self.file.seek, lambda: True, lambda: None

        def read(self, count):
            if self.file.tell() >= self.end:
                raise ConnectionResetError("reset by peer")
            return self.file.read(min(count, self.end - self.file.tell()))

    stream = lambda *words: Breaking(*words)  # noqa: E731 - a function binds, a class does not
    monkeypatch.setattr(remote._FileSystem, "stream", stream)
    assert opened("memory://b/a").read() == DATA
    assert opens == [0, 65_536, 131_072, 196_608, 262_144]


def test_workers_read_an_asynchronous_file_system_that_their_parent_has_used(monkeypatch):
    """As s3fs and gcsfs are: the loop of the parent's thread is dead in a fork."""
    pytest.importorskip("aiohttp")
    import fsspec

    monkeypatch.setattr(remote, "_system", lambda _: remote._FileSystem(fsspec.filesystem("http")))
    with served(Web({"a": DATA})) as address:
        size = list_remote(f"{address}/a")[0].size
        with ProcessPool(lambda at, _: _bytes_at(f"{address}/a", size, at), 2) as pool:
            assert list(pool.map([0, 1000, 200_000])) == [
                DATA[at : at + 9] for at in (0, 1000, 200_000)
            ]


def _bytes_at(address, size, at):
    with open_input(address, size) as file:
        file.seek(at)
        return file.read(9)


def test_a_copy_that_broke_off_goes_on_at_its_byte(tmp_path):
    web = Web({"a.jsonl": DATA}, most=100_000)
    with served(web) as address:
        web.lost_after = 2
        with refused(1, "broke off at byte 100,000"):
            local_copy(f"{address}/a.jsonl")
        web.lost_after, before = 0, len(web.ranges)
        path = local_copy(f"{address}/a.jsonl")
        assert path.read_bytes() == DATA and path.name == "a.jsonl"
        assert path.is_relative_to(tmp_path / "cache")
        starts = [first for _, first in web.ranges[before:]]
        assert starts == [0, 65_536, 165_536, 265_536]  # a buffer that was not full is lost
        assert local_copy(f"{address}/a.jsonl") == path
        assert len(web.ranges) == before + 5  # its size alone
        web.files["a.jsonl"] = DATA[::-1]
        assert local_copy(f"{address}/a.jsonl").read_bytes() == DATA[::-1]
    assert local_copy("a/b") == remote.Path("a/b")


def test_a_dataset_of_the_hub_is_read_by_its_commit(monkeypatch):
    files = {"data/train-0.parquet": DATA, "data/x.jsonl": b"{}", "README.md": b"#"}
    hub = Hub({"datasets/lab/texts": files}, token="secret")
    with serving(hub) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("HF_TOKEN", "secret")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        found = list_remote("hub:lab/texts")
        root = f"hf://datasets/lab/texts@{COMMIT}"
        assert [one[:2] for one in found] == [
            (f"{root}/{name}", len(files[name])) for name in sorted(files)
        ]
        (one,) = list_remote("hub:lab/texts@main/data/*.parquet")
        with open_input(one.address, one.size) as file:
            assert file.read() == DATA
        with refused(2, "the hub has no lab/none"):
            list_remote("hub:lab/none")
        with refused(2, "lab/texts has no revision .v9."):
            list_remote("hub:lab/texts@v9")
        with refused(2, "there is no hub:lab/texts/data/y.jsonl"):
            list_remote("hub:lab/texts/data/y.jsonl")
