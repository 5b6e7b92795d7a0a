"""Which shingles tell near copies from texts of one form? Recall of copies of prose, and how
alike unrelated texts are, by size of shingle and threshold.

Prose is WikiText-103, in documents of 3,000 characters; each has a near copy of each kind, and the
recall is the share of copies whose Jaccard similarity with their original is at the threshold or
above. No two of the originals are copies, nor two texts of code (the standard library's modules of
3 kB and more under one licence header, by themselves and joined by tens) or of random data (CSV of
whole numbers, assembly, bytes in hexadecimal): where the largest similarity of two is at the
threshold, one of them is lost. Blanks are CSV with blanks for commas. Words are what whitespace
separates.

    python benchmarks/bench_fuzzy_shingles.py --prose /data/wikitext-103 [--json FILE]
"""

import random
import re
import sys
import sysconfig
from itertools import combinations
from pathlib import Path

import numpy as np
from arguments import Arguments, data_folder, write_rows
from progress import each

from mtcli.core.curate.hashing import jaccard
from mtcli.core.curate.shingles import shingle_set

CANDIDATES = [  # unit, shingle, threshold
    *(("characters", 5, 0.8), ("characters", 5, 0.7)),
    *(("characters", 9, 0.8), ("characters", 9, 0.7)),
    *(("characters", 12, 0.8), ("characters", 12, 0.7)),
    *(("characters", 16, 0.7), ("characters", 25, 0.7)),
    *(("words", 3, 0.7), ("words", 5, 0.7), ("words", 13, 0.7)),
]
BOILERPLATE = (
    "Home Login Search Share this page with friends . All rights reserved . Read the terms"
)
LICENCE = "".join(f"# {line}\n" for line in re.findall(".{1,90}", BOILERPLATE * 18))
DOCUMENTS, DRAWN = 200, 4  # of prose, and of each kind of random data
COLUMNS = 8  # of a table
OPCODES = ["mov", "add", "sub", "xor", "and", "or", "cmp", "test", "lea", "imul"]
REGISTERS = ["rax", "rbx", "rcx", "rdx", "rsi", "rdi", *(f"r{n}" for n in range(8, 16))]


def prose(folder: Path, source: random.Random, characters: int = 3000) -> list[str]:
    """Documents of paragraphs, each of about so many characters."""
    found, held = [], ""
    for name in ("test", "valid"):
        for line in (folder / f"wiki.{name}.tokens").read_text().splitlines():
            held += f"{line.strip()}\n" if len(line) > 200 else ""
            if len(held) > characters:
                found.append(held)
                held = ""
    return source.sample(found, DOCUMENTS)


def near_copies(texts: list[str], source: random.Random) -> dict[str, list[str]]:
    """A copy of each text, by how it was made."""
    vocabulary = " ".join(texts).split(" ")

    def changed(text: str, share: float) -> str:
        words = text.split(" ")
        return " ".join(source.choice(vocabulary) if source.random() < share else w for w in words)

    def moved(text: str) -> str:
        sentences = sentences_of(text)
        for _ in range(max(1, len(sentences) // 10)):
            sentence = sentences.pop(source.randrange(len(sentences)))
            sentences.insert(source.randrange(len(sentences) + 1), sentence)
        return "".join(sentences)

    return {
        "2 % of words": [changed(text, 0.02) for text in texts],
        "5 % of words": [changed(text, 0.05) for text in texts],
        "10 % of words": [changed(text, 0.1) for text in texts],
        "a tenth of sentences dropped": [
            "".join(part for part in sentences_of(text) if source.random() > 0.1) for text in texts
        ],
        "a tenth of sentences moved": [moved(text) for text in texts],
        "boilerplate": [f"{BOILERPLATE} {text} {BOILERPLATE}" for text in texts],
    }


def sentences_of(text: str) -> list[str]:
    return re.split(r"(?<= \. )", text)


def unrelated(texts: list[str], source: random.Random) -> dict[str, list[str]]:
    """Texts of which no two are copies, by kind."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    modules = [file.read_text(errors="replace") for file in files if file.stat().st_size > 3000]
    found = {"prose": texts, "code": [LICENCE + module for module in modules]}
    source.shuffle(modules)
    tens = [modules[start : start + 10] for start in range(0, len(modules) - 9, 10)]
    found["ten modules"] = [LICENCE + "".join(ten) for ten in tens]
    for rows in (2_000, 20_000):
        made = {
            "CSV below 10": lambda: table(10, source, ","),
            "CSV below 1,000": lambda: table(1000, source, ","),
            "blanks below 10": lambda: table(10, source, " "),
            "assembly": lambda: assembly(source),
            "hexadecimal": lambda: ", ".join(f"0x{source.randrange(256):02x}" for _ in range(12)),
        }
        for name, line in made.items():
            texts = ["\n".join(line() for _ in range(rows)) for _ in range(DRAWN)]
            found[f"{name}, {rows:,} lines"] = texts
    return found


def table(top: int, source: random.Random, separator: str) -> str:
    return separator.join(str(source.randrange(top)) for _ in range(COLUMNS))


def assembly(source: random.Random) -> str:
    one, other = source.choices(REGISTERS, k=2)
    return f"\t{source.choice(OPCODES)}\t%{one}, {source.randrange(256)}(%{other})"


def shingles(text: str, unit: str, size: int, numbers: dict[str, int]) -> np.ndarray:
    """The hashes of a text's shingles; a word becomes a character by its number."""
    if unit == "words":
        text = "".join(chr(numbers.setdefault(word, len(numbers))) for word in text.split())
    return shingle_set(text, size)


def measure(unit, size, threshold, copies, kinds) -> dict[str, object]:
    """The recall of each kind of copy, and the largest similarity of two unrelated texts."""
    numbers: dict[str, int] = {}

    def sets_of(texts):
        return [shingles(text, unit, size, numbers) for text in texts]

    originals = sets_of(kinds["prose"])
    recall = {}
    for name, made in copies.items():
        pairs = zip(originals, sets_of(made), strict=True)
        recall[name] = float(np.mean([jaccard(*pair) >= threshold for pair in pairs]))
    largest = {
        name: max(jaccard(*pair) for pair in combinations(sets_of(some), 2))
        for name, some in kinds.items()
    }
    about = {"unit": unit, "shingle": size, "threshold": threshold}
    return about | {"recall": recall, "largest": largest}


def report(rows: list[dict]) -> None:
    """Prints Markdown: recall, and the largest similarity of unrelated texts."""
    for part in ("recall", "largest"):
        names = list(rows[0][part])
        print(f"\n| {part} | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}")
        for row in rows:
            values = [f"{value:.2f}" for value in row[part].values()]
            name = f"{row['shingle']} {row['unit']}, {row['threshold']}"
            print(f"| {name} | {' | '.join(values)} |")


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--prose", type=Path, help="[MTCLI_TEST_DATA/wikitext-103]")
    options = parser.parse_args()
    source = random.Random(0)
    test_data = data_folder("wikitext-103/wiki.test.tokens")
    folder = options.prose or (test_data and test_data / "wikitext-103")
    if folder is None:
        why = "neither --prose nor MTCLI_TEST_DATA names a folder of wiki.*.tokens"
        print(why)
        return write_rows(options.json, {"skipped": why})
    texts = prose(folder, source)
    if options.tiny:
        texts = texts[:8]
        kinds, candidates = {"prose": texts}, CANDIDATES[:1]
    else:
        kinds, candidates = unrelated(texts, source), CANDIDATES
    copies = near_copies(texts, source)
    rows = [measure(*candidate, copies, kinds) for candidate in each(candidates)]
    report(rows)
    write_rows(options.json, rows)


if __name__ == "__main__":
    sys.exit(main())
