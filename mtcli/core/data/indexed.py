"""Reads and writes Megatron's indexed datasets: tokens in `PREFIX.bin`, bounds in `PREFIX.idx`.

`.idx`, little-endian: magic (9 bytes), uint64 version 1, uint8 dtype code, uint64 S sequences,
uint64 D = documents + 1, then int32 lengths [S] in tokens, int64 pointers [S] in bytes and int64
document boundaries [D] in sequences, from 0 to S. `.bin` is the sequences back to back, no header.

`PREFIX.json`: what preprocess says of the tokens it wrote.
"""

import os
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np

from mtcli.core.config.errors import MtcliError, failed, wrong
from mtcli.core.config.nameable import CHAT_FILE, near_path
from mtcli.core.config.untrusted import listed, load_json, open_untrusted

MAGIC = b"MMIDIDX\0\0"
OLD_MAGIC = b"TNTIDX\0\0"  # fairseq's first format
HEADER = struct.Struct("<9sQBQQ")  # 34 bytes
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
CODES = {np.dtype(name): code for code, name in DTYPES.items()}
CHUNK = 1 << 16  # sequences looked at or written at a time: 1.5 MB
MAX_FACTS_BYTES = 16 << 20
AGAIN = "write it again with mtcli preprocess"


class Indexed:
    """A dataset on disk, memory-mapped, with every number in its index checked.

    `tokens` [num_tokens] in the file's dtype; `lengths` int32 [S] in tokens; `pointers` int64 [S]
    in bytes; `documents` int64 [D]. Raises MtcliError for a missing file and for any index that
    does not describe its `.bin` exactly.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        self.idx, self.bin = with_suffix(prefix, ".idx"), with_suffix(prefix, ".bin")
        for path in (self.idx, self.bin):
            _require_file(path, self.prefix)
        self.dtype, num_sequences, num_boundaries = self._header()
        at, count = HEADER.size, num_sequences
        self.lengths = _map(self.idx, np.dtype("<i4"), at, count)
        self.pointers = _map(self.idx, np.dtype("<i8"), at + 4 * count, count)
        self.documents = _map(self.idx, np.dtype("<i8"), at + 12 * count, num_boundaries)
        self.num_tokens = self._check()
        self.tokens = _map(self.bin, self.dtype, 0, self.num_tokens)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, sequence: int) -> np.ndarray:
        """Returns the tokens of one sequence [length], a view of the file."""
        start = int(self.pointers[sequence]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[sequence])]

    def tokens_of(self, sequences: range) -> int:
        """Counts the tokens of a range of sequences."""
        return int(self.lengths[sequences.start : sequences.stop].sum(dtype=np.int64))

    def require_whole(self) -> None:
        """Raises MtcliError where the .bin has been truncated since it was opened: reading beyond
        its end would kill the process by SIGBUS, without a message."""
        with suppress(FileNotFoundError):  # what was mapped stays, under no name
            size, mapped = self.bin.stat().st_size, self.tokens.nbytes
            if size < mapped:
                message = f"{self.bin} is {size} bytes now, and was {mapped} when it was opened"
                raise failed(message, "copy or write the pair again, then --resume")

    def _header(self) -> tuple[np.dtype, int, int]:
        """Reads the dtype, S and D; checks that the file has the size they imply."""
        size = self.idx.stat().st_size
        with open_untrusted(self.idx) as file:
            head = file.read(HEADER.size)
        if head.startswith(OLD_MAGIC):
            raise self._refuse("is fairseq's old format (magic TNTIDX), not Megatron's MMIDIDX")
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            raise self._refuse(f"does not start with Megatron's header of {HEADER.size} bytes")
        _, version, code, num_sequences, num_boundaries = HEADER.unpack(head)
        if version != 1:
            raise self._refuse(f"has version {version}, not 1")
        dtype = np.dtype(DTYPES.get(code, "V1"))
        if dtype.kind not in "iu":
            kind = "no number that we know" if dtype.kind == "V" else f"{dtype}, which no token is"
            raise self._refuse(f"has dtype code {code}: {kind}")
        expected = HEADER.size + 12 * num_sequences + 8 * num_boundaries
        if size == expected + num_sequences > expected:
            raise self._refuse("has a mode for every sequence: multimodal data, which is not text")
        if size != expected:
            raise self._refuse(
                f"is {size} bytes, and {num_sequences} sequences and {num_boundaries} boundaries "
                f"take {expected}"
            )
        return dtype, num_sequences, num_boundaries

    def _check(self) -> int:
        """Checks every length, pointer and boundary; returns the number of tokens."""
        total, itemsize = 0, self.dtype.itemsize
        for at in range(0, len(self.lengths), CHUNK):
            lengths = self.lengths[at : at + CHUNK].astype(np.int64)
            if lengths.min() < 0:
                raise self._refuse(f"has a sequence of {lengths.min()} tokens")
            ends = total + np.cumsum(lengths)
            if not np.array_equal(self.pointers[at : at + CHUNK], (ends - lengths) * itemsize):
                raise self._refuse("has pointers that are not the sum of the lengths before them")
            total = int(ends[-1])
        size = self.bin.stat().st_size
        if size != total * itemsize:
            fits = [n for n in (1, 2, 4, 8) if total and size == n * total]
            guess = f": {fits[0]} bytes each, from a tool with another dtype table" if fits else ""
            raise wrong(
                f"{self.bin} is {size} bytes, and its index says {total} tokens of {itemsize} "
                f"bytes = {total * itemsize}{guess}",
                "copy or write the pair again",
            )
        bounds, count = self.documents, len(self.lengths)
        if len(bounds) == 0 or bounds[0] != 0 or bounds[-1] != count:
            raise self._refuse(f"has document boundaries that do not run from 0 to {count}")
        for at in range(0, len(bounds), CHUNK):
            part = bounds[at : at + CHUNK + 1]
            if (part[1:] < part[:-1]).any():  # no differences, which could pass 2**63
                raise self._refuse("has document boundaries that go backwards")
        return total

    def _refuse(self, why: str) -> MtcliError:
        return wrong(f"{self.idx} {why}", AGAIN)


def with_suffix(prefix: str | Path, suffix: str) -> Path:
    """Appends `suffix` to `prefix`; unlike Path.with_suffix it keeps dots in the prefix."""
    return Path(f"{prefix}{suffix}")


def token_dtype(vocab_size: int) -> np.dtype:
    """Chooses the dtype as Megatron does: uint16 below 65500 ids, else int32."""
    return np.dtype("<u2" if vocab_size < 65500 else "<i4")


def write_index(
    path: Path, dtype: np.dtype, lengths: np.ndarray, sequences: np.ndarray | None = None
) -> None:
    """Writes an `.idx` in bounded memory, and syncs it.

    `lengths` int32 [S] may be memory-mapped, and so may `sequences` int32, each document's number
    of sequences; None where that is 1.
    """
    count = len(lengths)
    documents = count if sequences is None else len(sequences)
    with open(path, "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, CODES[np.dtype(dtype)], count, documents + 1))
        for at in range(0, count, CHUNK):
            file.write(np.asarray(lengths[at : at + CHUNK], "<i4").tobytes())
        total = 0
        for at in range(0, count, CHUNK):
            part = lengths[at : at + CHUNK].astype("<i8")
            ends = total + np.cumsum(part)
            file.write(((ends - part) * np.dtype(dtype).itemsize).tobytes())
            total = int(ends[-1])
        file.write(bytes(8))
        bound = 0
        for at in range(0, documents, CHUNK):
            size = min(CHUNK, documents - at)
            part = np.ones(size, "<i8") if sequences is None else sequences[at : at + size]
            ends = bound + np.cumsum(part, dtype="<i8")
            file.write(ends.tobytes())
            bound = int(ends[-1])
        file.flush()
        os.fsync(file.fileno())


def _map(path: Path, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
    if count == 0:  # mmap refuses to map nothing
        return np.empty(0, dtype)
    with open_untrusted(path) as file:
        return np.memmap(file, dtype, "r", offset, (count,)).view(np.ndarray)


def _require_file(path: Path, prefix: Path) -> None:
    """Raises MtcliError where a file of the dataset is missing or unreadable."""
    try:
        open_untrusted(path).close()
    except FileNotFoundError:
        raise wrong(*_not_there(path, prefix)) from None
    except OSError as error:
        raise wrong(f"{path} cannot be read: {error.strerror}", "use another copy") from None


def _not_there(path: Path, prefix: Path) -> tuple[str, str]:
    """Words the likely cause of a missing file, and the cure."""
    if prefix.suffix in (".bin", ".idx", ".json") and prefix.with_suffix(".idx").exists():
        return f"no file {path}", f"name the prefix of the pair: {prefix.with_suffix('')}"
    if CHAT_FILE.search(prefix.name) and prefix.is_file():
        hint = 'conversations in it are read with data.format = "conversations"; for its texts, '
        return f"{prefix} is no data set of tokens", f"{hint}{_preprocess(prefix)}"
    if pairs := pairs_in(prefix):
        hint = f"name the prefix of a pair: {listed(pairs)}"
        return f"{prefix} is a folder of data sets, and none itself", hint
    if prefix.is_dir() or prefix.is_file():
        return f"{prefix} is no data set yet", _preprocess(prefix)
    hint = "data paths name the prefix of a .bin and .idx pair, as preprocess writes them"
    where = "" if path.is_absolute() else f"; a relative one begins at {Path.cwd()}"
    return f"no file {path}", hint + (near_path(str(path)) or where)


def pairs_in(folder: str | Path) -> list[str]:
    """Lists the prefixes of the pairs of .bin and .idx in a folder; none where it is no folder."""
    indices = sorted(Path(folder).glob("*.idx"))
    return [str(path.with_suffix("")) for path in indices if path.with_suffix(".bin").exists()]


def _preprocess(path: Path) -> str:
    return f"`mtcli preprocess {path} --output DATA --tokenizer train:8192`, then name DATA"


def describe(prefix: str | Path) -> dict[str, object] | None:
    """Reads `PREFIX.json`; None where there is none (data from another tool).

    Raises MtcliError where it is not what preprocess writes.
    """
    path = with_suffix(prefix, ".json")
    if not path.exists():
        return None
    facts = load_json(path, AGAIN, AGAIN, MAX_FACTS_BYTES)
    if not isinstance(facts, dict):
        raise wrong(f"{path} holds no object", AGAIN)
    return facts


def max_token_id(prefix: str | Path) -> int | None:
    """Returns the largest token id in the data at `prefix`, where `PREFIX.json` has it."""
    value = (describe(prefix) or {}).get("max_token_id")
    return value if type(value) is int else None


def stated_token_bytes(prefix: str | Path) -> float | None:
    """Returns the mean bytes of text of a token in the data at `prefix`, where `PREFIX.json` has
    both numbers."""
    facts = describe(prefix) or {}
    tokens, text = facts.get("tokens"), facts.get("text_bytes")
    if not isinstance(tokens, int) or not isinstance(text, int) or min(tokens, text) <= 0:
        return None
    return text / tokens


def tokenizer_size(prefix: str | Path) -> int | None:
    """Returns the vocabulary size of the tokenizer that wrote the data at `prefix`, where
    `PREFIX.json` has it."""
    tokenizer = (describe(prefix) or {}).get("tokenizer")
    value = tokenizer.get("vocab_size") if isinstance(tokenizer, dict) else None
    return value if type(value) is int and value > 0 else None


def tokenizer_folder(prefix: str | Path) -> Path | None:
    """Returns the folder of the tokenizer that wrote the data at `prefix`, where it exists."""
    folder = with_suffix(prefix, ".tokenizer")
    return folder if (folder / "tokenizer.json").is_file() else None


def stated_hash(prefix: str | Path) -> str:
    """Returns the SHA-256 of the .bin that `PREFIX.json` states; empty where there is none."""
    hashes = (describe(prefix) or {}).get("sha256")
    sha256 = hashes.get("bin") if isinstance(hashes, dict) else None
    return sha256 if isinstance(sha256, str) else ""
