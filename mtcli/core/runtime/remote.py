"""Reads files of the network as streams: https://, s3://, gs:// and hub:, the hub's datasets.

A stream that breaks off is opened again at the byte where it stopped, so what is read is the file's
bytes or an error. https:// needs the standard library alone; the others are file systems of
`fsspec`. A worker opens its own, as no connection outlives a fork.
"""

import errno
import fcntl
import hashlib
import io
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from mtcli.core.config.errors import MtcliError, failed, wrong
from mtcli.core.config.untrusted import open_untrusted, shown
from mtcli.core.runtime.hub import dataset_address, endpoint, is_hub

PROTOCOLS = ("https", "http", "s3", "gs", "hf", "memory")
TRIES = 6  # without a byte in between
FIRST_WAIT_S = 0.5  # before the second try, doubled for each more: 15 s in all
TIMEOUT_S = 60  # without a byte of an answer
BUFFER_BYTES = 64 << 10
GONE = (FileNotFoundError, PermissionError, IsADirectoryError)  # no further try helps
REFUSED = range(400, 500)  # answers of HTTP that no further try changes, but for these:
PASSING = (408, 425, 429)
TOTAL = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+)")  # Content-Range of RFC 9110, section 14.4
# What a file system says of a file's version.
VERSIONS = ("ETag", "etag", "md5Hash", "blob_id", "created", "last_modified", "LastModified")
HINT = "inputs of the network are https://, s3://, gs:// or hub:owner/name, a dataset of the hub"


class RemoteInput(NamedTuple):
    """A file of the network: its address, its bytes, and what changes with its contents."""

    address: str
    size: int
    version: str


def is_remote(name: str | Path) -> bool:
    """Says whether an input's name is an address of the network."""
    return "://" in str(name) or is_hub(name)


def path_of(name: str) -> Path:
    """Returns the path of a file or an address, whose suffixes say what the file is."""
    return Path(urlsplit(name).path if name.startswith("http") else name)


def list_remote(name: str) -> list[RemoteInput]:
    """Finds the files that an address, a glob or a folder of it names, sorted by address.

    Raises MtcliError where there are none, or the network gives none.
    """
    address = dataset_address(name) if is_hub(name) else name
    system = _system(address)
    with _explained(name):
        if any(letter in address for letter in "*?[") and not isinstance(system, _Http):
            files = system.glob(address, detail=True)
        elif system.isdir(address):
            files = system.find(address, detail=True)
        else:
            files = {address: system.info(address)}
        found = [
            _input(system.unstrip_protocol(path), facts)
            for path, facts in sorted(files.items())
            if facts.get("type") != "directory"
        ]
    if not found:
        raise wrong(f"no file matches {name}", HINT)
    return found


def open_input(path: str | Path, size: int) -> IO[bytes]:
    """Opens a regular file, or a file of the network of `size` bytes, to be read.

    Raises OSError for a local file, and MtcliError, also while it is read, for one of the network.
    """
    if not is_remote(path):
        return open_untrusted(path)
    return io.BufferedReader(_RemoteFile(str(path), size), BUFFER_BYTES)


def local_copy(name: str) -> Path:
    """Copies a file of the network to the user's cache, from where an earlier copy broke off;
    returns its path, or that of a local file.

    One process at a time copies, under a lock. Raises MtcliError as `open_input` does.
    """
    if not is_remote(name):
        return Path(name)
    inputs = list_remote(name)
    if len(inputs) != 1:
        raise wrong(f"{name} names {len(inputs)} files", "name each of them")
    address, size, version = inputs[0]
    key = hashlib.sha256(f"{address} {size} {version}".encode()).hexdigest()[:32]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mtcli" / "inputs"
    final, partial = root / key / (path_of(address).name or "file"), root / f"{key}.partial"
    final.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(root / f"{key}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not final.exists():
            with open(partial, "ab") as file, open_input(address, size) as source:
                source.seek(file.tell())
                while data := source.read(BUFFER_BYTES):
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(final)
    return final


class _RemoteFile(io.RawIOBase):
    """A file of the network: a stream from where it is read, opened when it is first read."""

    def __init__(self, address: str, size: int) -> None:
        self._address, self._size, self._at = address, size, 0
        self._stream: Any = None  # its next byte is that at _at, unless it can seek

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if place < 0:
            raise OSError(errno.EINVAL, "before the beginning")
        if place != self._at and self._stream is not None and not self._stream.seekable():
            self._drop()
        self._at = place
        return place

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        self._drop()
        super().close()

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        wanted_bytes = min(len(view), self._size - self._at)
        data = self._next(wanted_bytes) if wanted_bytes > 0 else b""
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _next(self, most: int) -> bytes:
        """Reads 1 to `most` bytes, in TRIES tries."""
        for number in range(TRIES):
            if number:
                time.sleep(FIRST_WAIT_S * 2 ** (number - 1))
            try:
                if self._stream is None:
                    system = _system(self._address)
                    self._stream = system.stream(self._address, self._at, self._size)
                if self._stream.seekable():
                    self._stream.seek(self._at)
                if data := self._stream.read(most):
                    return bytes(data)
                reason = "the connection ended"
            except MtcliError:
                raise
            except Exception as error:  # of a network: of many packages
                if isinstance(error, GONE) or _is_refused(error):
                    raise failed(f"{self._address} is gone: {_line(error)}", HINT) from None
                reason = _line(error)
            self._drop()
        message = f"{self._address} broke off at byte {self._at:,} of {self._size:,}"
        hint = "check the network; the same command with --resume goes on where a run ended"
        raise failed(f"{message}, and {TRIES} tries gave no more: {reason}", hint)

    def _drop(self) -> None:
        if self._stream is not None:
            with suppress(Exception):  # of a connection that is broken
                self._stream.close()
        self._stream = None


class _Http:
    """Files of a web server, by ranges of bytes."""

    def isdir(self, _: str) -> bool:
        return False

    def unstrip_protocol(self, address: str) -> str:
        return address

    def info(self, address: str) -> dict[str, Any]:
        try:
            answer, first = self._answer(address, "bytes=0-0"), 0
        except HTTPError as error:
            if error.code != 416:
                raise
            answer, first = error, None  # it has no first byte
        with answer:
            return {"size": _total(address, answer, first), "ETag": answer.headers.get("ETag")}

    def stream(self, address: str, start: int, size: int) -> Any:
        answer = self._answer(address, f"bytes={start}-")
        total = _total(address, answer, start)
        if total != size:
            message = f"{address} has changed: it has {total:,} bytes, and had {size:,}"
            raise failed(message, "begin anew, with --force")
        return answer

    def _answer(self, address: str, ranged: str) -> Any:
        headers = {"Range": ranged, "Accept-Encoding": "identity", "User-Agent": "mtcli"}
        return urlopen(Request(address, headers=headers), timeout=TIMEOUT_S)


class _FileSystem:
    """Files of a file system of fsspec."""

    def __init__(self, system: Any) -> None:
        self.system = system

    def __getattr__(self, name: str) -> Any:
        return getattr(self.system, name)

    def stream(self, address: str, _start: int, _size: int) -> Any:
        return self.system.open(address, "rb")


def _total(address: str, answer: Any, start: int | None) -> int:
    """Returns the bytes of a file, of which an answer gives those from `start` on."""
    found = TOTAL.fullmatch(answer.headers.get("Content-Range", ""))
    first = found and found[1] and int(found[1])
    if not found or first != start:
        message = f"{address} does not come by ranges of bytes, so it cannot be resumed"
        raise wrong(message, "download it, and name the file")
    return int(found[2])


def _system(address: str) -> Any:
    """Opens the file system of an address. Raises MtcliError for a protocol that is none of inputs,
    and where a package is missing."""
    protocol = address.partition("://")[0]
    if protocol not in PROTOCOLS or "::" in address:
        raise wrong(f"{shown(address)} is no address of an input", HINT)
    if protocol.startswith("http"):
        return _Http()
    try:
        import fsspec

        options = {"endpoint": endpoint()} if protocol == "hf" else {}
        return _FileSystem(fsspec.filesystem(protocol, **options))
    except ImportError as error:
        needs = {"s3": "s3fs", "gs": "gcsfs"}.get(protocol, error.name or "fsspec")
        raise wrong(f"{address} needs the package {needs}", "pip install 'mtcli[remote]'") from None


def _input(address: str, facts: Mapping[str, Any]) -> RemoteInput:
    if type(size := facts.get("size")) is not int:
        raise wrong(f"{address} does not say its size", "download it, and name the file")
    versions = [str(facts[name]) for name in VERSIONS if facts.get(name) is not None]
    return RemoteInput(address, size, versions[0] if versions else "")


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Raises MtcliError in place of the errors of a network, which are of many packages."""
    try:
        yield
    except MtcliError:
        raise
    except Exception as error:
        status = error.code if isinstance(error, HTTPError) else 0
        if isinstance(error, FileNotFoundError) or status in (404, 410):
            raise wrong(f"there is no {name}", HINT) from None
        if isinstance(error, PermissionError) or status in (401, 403):
            said = f"{name} may not be read: {_line(error)}"
            raise wrong(said, "are the credentials set, in the variables of its service?") from None
        said = f"{name} cannot be read: {_line(error)}"
        raise wrong(said, "check the network, the name and the credentials") from None


def _is_refused(error: Exception) -> bool:
    return isinstance(error, HTTPError) and error.code in REFUSED and error.code not in PASSING


def _line(error: Exception) -> str:
    """Returns an error's first line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
