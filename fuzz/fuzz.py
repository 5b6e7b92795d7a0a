"""Fuzzes a reader with atheris, guided by coverage: `python fuzz/fuzz.py READER [OPTION]...`.

Options are libFuzzer's, such as -runs=1000000 or -max_total_time=600; without any it runs for 60 s.
The readers and the oracles that hold them are those of the property tests (tests/readers.py). What
breaks one is written as `crash-...` in the working folder; put it into a test first, then mend it.
Needs the `fuzz` extra. Without a reader it lists them.
"""

import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

with atheris.instrument_imports(include=["mtcli", "json", "tomllib"]):
    from readers import READERS, attempt


def main() -> None:
    """Runs libFuzzer on one reader, from its valid files."""
    name, *options = sys.argv[1:] or [""]
    if name not in READERS:
        sys.exit(f"error: no reader {name!r}\n\nhint: one of {', '.join(READERS)}")
    folder, corpus = Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp())
    check, seeds = READERS[name](folder)
    for number, seed in enumerate(seeds):
        (corpus / str(number)).write_bytes(seed)
    limits = ["-max_len=20000", "-timeout=20", "-rss_limit_mb=4096"]
    options = [*limits, *(options or ["-max_total_time=60"]), str(corpus)]
    atheris.Setup([sys.argv[0], *options], lambda data: attempt(check, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
