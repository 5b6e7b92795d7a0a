"""Standard streams that end no work: a log on a full disk, a reader that left, a closed file."""

import os
import sys
from contextlib import suppress
from typing import Any, TextIO

from mtcli.core.config.errors import failed

SPACE = "free space where it leads"


def hold_streams() -> None:
    """Drops what cannot be written to stderr, and makes an error of what cannot to stdout.

    A file descriptor that was closed, as by `2>&-`, leads nowhere: the next file that is opened
    would have its number, and be written to.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = _Stdout(sys.stdout or open(os.devnull, "w"))  # type: ignore[assignment]  # noqa: SIM115
    sys.stderr = _Stderr(sys.stderr or open(os.devnull, "w"))  # type: ignore[assignment]  # noqa: SIM115


class _Stream:
    """A text stream that shows the attributes of another."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Stderr(_Stream):
    """A stream that neither a full disk nor a reader that has left can stop."""

    def write(self, text: str) -> int:
        """Writes text, or drops it where that fails."""
        with suppress(OSError, ValueError):  # ValueError: it was closed
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Writes what is buffered, or drops it where that fails."""
        with suppress(OSError, ValueError):
            self._stream.flush()


class _Stdout(_Stream):
    """A stream whose failure is an error of the command."""

    def write(self, text: str) -> int:
        """Writes text. Raises MtcliError (exit 1) where that fails, but BrokenPipeError where the
        reader has left."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise failed(f"stdout cannot be written: {error.strerror}", SPACE) from None

    def flush(self) -> None:
        """Writes what is buffered; raises as `write`."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise failed(f"stdout cannot be written: {error.strerror}", SPACE) from None
