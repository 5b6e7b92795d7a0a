"""Replaces the standard streams, so that a full disk, a reader that left or a closed descriptor
ends no work."""

import os
import sys
from contextlib import suppress
from typing import Any, TextIO

from mtcli.core.config.errors import failed

SPACE = "free space where it leads"


def hold_streams() -> None:
    """Drops what cannot be written to stderr, and raises an error for what cannot be written to
    stdout.

    A closed file descriptor, as by `2>&-`, becomes /dev/null: otherwise the next file that is
    opened would get its number, and the stream's output.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = _Stdout(sys.stdout or open(os.devnull, "w"))  # type: ignore[assignment]  # noqa: SIM115
    sys.stderr = _Stderr(sys.stderr or open(os.devnull, "w"))  # type: ignore[assignment]  # noqa: SIM115


class _Stream:
    """A text stream with the attributes of another."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Stderr(_Stream):
    """A stream that survives a full disk and a reader that has left."""

    def write(self, text: str) -> int:
        """Writes text, or drops it where that fails."""
        with suppress(OSError, ValueError):  # ValueError: it was closed
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flushes the buffer, or drops it where that fails."""
        with suppress(OSError, ValueError):
            self._stream.flush()


class _Stdout(_Stream):
    """A stream whose failure is an error of the command."""

    def write(self, text: str) -> int:
        """Writes text. Raises MtcliError (exit 1) where that fails, and BrokenPipeError where the
        reader has left."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise failed(f"stdout cannot be written: {error.strerror}", SPACE) from None

    def flush(self) -> None:
        """Flushes the buffer; raises as `write`."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise failed(f"stdout cannot be written: {error.strerror}", SPACE) from None
