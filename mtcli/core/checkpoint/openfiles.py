"""Files that stay open between reads: the kernel reads ahead in an open file, and forgets where it
was in one that is closed. A checkpoint of 16 MiB tensors loads a fifth faster."""

from collections import OrderedDict
from io import FileIO
from pathlib import Path

from mtcli.core.checkpoint.tensorfile import damaged
from mtcli.core.spec.untrusted import open_untrusted

# Far from a process's limit, and more than the files that hold one tensor's pieces.
MAX_OPEN = 32


def open_file(path: Path) -> FileIO:
    """A file to read at any place. Raises MtcliError where it cannot be opened."""
    try:
        return open_untrusted(path, 0)
    except OSError as error:
        raise damaged(path, f"it cannot be opened ({error.strerror})") from None


class OpenFiles:
    """The files that were read last, at most MAX_OPEN of them, closed with this object."""

    def __init__(self) -> None:
        self._files: OrderedDict[Path, FileIO] = OrderedDict()

    def get(self, path: Path) -> FileIO:
        """A file, opened unless it still is. Raises MtcliError where it cannot be."""
        if path not in self._files:
            self._files[path] = open_file(path)
            if len(self._files) > MAX_OPEN:
                self._files.popitem(last=False)[1].close()
        self._files.move_to_end(path)
        return self._files[path]

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return OpenFiles, ()  # another process opens its own

    def __del__(self) -> None:
        for file in self._files.values():
            file.close()
