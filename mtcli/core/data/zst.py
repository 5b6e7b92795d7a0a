"""Zstandard files read whole or not at all: the package's own reader takes a cut one as ended."""

import io

from mtcli.core.spec.errors import wrong
from mtcli.core.spec.untrusted import open_untrusted

FED_BYTES = 1 << 16  # compressed bytes decoded at a time


class ZstFile(io.RawIOBase):
    """The decompressed bytes of a `.zst` file of any number of frames.

    Raises EOFError where the file ends inside a frame, OSError where it is damaged.
    """

    def __init__(self, path: str) -> None:
        try:
            import zstandard
        except ModuleNotFoundError:
            raise wrong(
                f"{path} needs the package zstandard", "pip install 'mtcli[data]'"
            ) from None
        self._package = zstandard
        self._file = open_untrusted(path)
        self._frame = None
        self._fed, self._out = b"", b""

    def close(self) -> None:
        """Close the file too."""
        self._file.close()
        super().close()

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: memoryview) -> int:
        """Fill as much of `buffer` as one read of the file gives; 0 at the end."""
        while not self._out and self._more():
            pass
        count = min(len(buffer), len(self._out))
        buffer[:count] = self._out[:count]
        self._out = self._out[count:]
        return count

    def _more(self) -> bool:
        """Decode what the next bytes hold; False at the end of the file."""
        self._fed = self._fed or self._file.read(FED_BYTES)
        if not self._fed:
            if self._frame is not None:
                raise EOFError("it ends inside a frame")
            return False
        if self._frame is None:
            self._frame = self._package.ZstdDecompressor().decompressobj()
        try:
            self._out = self._frame.decompress(self._fed)
        except self._package.ZstdError as error:
            raise OSError(str(error)) from None
        self._fed = b""
        if self._frame.eof:
            self._fed, self._frame = self._frame.unused_data, None
        return True
