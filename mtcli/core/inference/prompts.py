"""Reads files of prompts, and writes the texts that end to a file, which a killed run continues."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from mtcli.core.config.errors import MtcliError, Problem, failed, wrong
from mtcli.core.config.nameable import near_path
from mtcli.core.config.untrusted import MAX_LISTED, is_text, parse_json, read_untrusted
from mtcli.core.runtime.outputs import require_writable
from mtcli.core.runtime.work_folder import lock_output

SUFFIXES = (".txt", ".jsonl")
PROMPT = "prompt"
# The keys of an output line beside the input's fields.
WRITTEN = ("text", "num_tokens", "finish_reason", "index", "sample", "logprobs")

Fields = Mapping[str, Any]
Finished = Collection[tuple[int, int]]  # (number of a prompt, of its sample)


class Prompt(NamedTuple):
    """A prompt, and the fields of its input line, which its output lines have too."""

    text: str
    fields: Fields


def read_prompts(name: str) -> list[Prompt]:
    """Reads prompts: lines of .txt that are not blank, or the field `prompt` of .jsonl's objects.

    Raises MtcliError for other files, and with the first bad lines.
    """
    path = Path(name)
    if path.suffix not in SUFFIXES:
        message = f"{name} is not a file of prompts that is known by its suffix"
        raise wrong(message, ".txt, a prompt a line, or .jsonl, with a field prompt", "--prompts")
    try:
        text = read_untrusted(path).decode()
    except OSError as error:
        hint = f"a .txt or .jsonl file of prompts{near_path(name)}"
        raise wrong(f"{name} cannot be read: {error.strerror}", hint, "--prompts") from None
    except UnicodeDecodeError as error:
        raise wrong(f"{name} is not UTF-8: {error}", "save it as UTF-8", "--prompts") from None
    lines = [(number, ln) for number, ln in enumerate(text.split("\n"), 1) if ln.strip()]
    if path.suffix == ".txt":
        lines = [(number, line.removesuffix("\r")) for number, line in lines]
        prompts = [Prompt(line, {PROMPT: line}) for _, line in lines]
    else:
        prompts, problems = [], []
        for number, line in lines:
            try:
                prompts.append(_parsed(line))
            except ValueError as error:
                hint = f'{{"{PROMPT}": "text"}}, and any other fields but {", ".join(WRITTEN)}'
                problems.append(Problem(f"{name}: line {number} {error}", hint, "--prompts"))
        if problems:
            raise MtcliError(*problems[:MAX_LISTED])
    if not prompts:
        raise wrong(f"{name} has 0 prompts", "a prompt a line", "--prompts")
    return prompts


def _parsed(line: str) -> Prompt:
    fields = parse_json(line)
    if not isinstance(fields, dict):
        raise ValueError("is no JSON object")
    if not is_text(fields.get(PROMPT)):
        raise ValueError(f"has no text as its {PROMPT}")
    if taken := [name for name in WRITTEN if name in fields]:
        raise ValueError(f"has a field {taken[0]}, which the output has for what is generated")
    return Prompt(fields[PROMPT], fields)


def finished(name: str, prompts: Sequence[Prompt], samples: int, resume: bool) -> Finished:
    """Reads which texts an output file has already.

    Raises MtcliError where the file cannot be written; where it has lines and `resume` is false;
    and where a line is of another prompt.
    """
    require_writable(name, "--output", (".jsonl",))
    path = Path(name)
    done: set[tuple[int, int]] = set()
    if not path.exists() or not path.stat().st_size:
        return done
    if not resume:
        message = f"{name} exists, with {path.stat().st_size} bytes"
        raise wrong(message, "--resume goes on with it; or name another file", "--output")
    for number, line in enumerate(_whole_lines(path), 1):
        try:
            fields = parse_json(line)
            at = fields["index"], fields.get("sample", 0)
            same = {k: v for k, v in fields.items() if k not in WRITTEN} == prompts[at[0]].fields
            if min(at) < 0 or at[1] >= samples or not same or at in done:
                raise ValueError("it is of another prompt or sample")
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            message = f"{name}: line {number} is not of these prompts: {error}"
            hint = "resume with the command that wrote it, or write to another file"
            raise wrong(message, hint, "--output") from None
        done.add(at)
    return done


def _whole_lines(path: Path) -> Iterator[bytes]:
    """Yields lines, without the last one of a killed run, if it is half-written."""
    data = read_untrusted(path)
    yield from data[: data.rfind(b"\n") + 1].splitlines()


class TextsFile:
    """The output file, open to append; locked until `close`."""

    def __init__(self, name: str) -> None:
        """Opens the file, and removes a half-written last line. Raises MtcliError where another run
        has it."""
        self.name = name
        try:
            self._file: IO[bytes] = lock_output(Path(name), Path(name))
            # by this handle: closing another one of the same file would unlock it (fcntl(2))
            self._file.seek(0)
            self._file.truncate(self._file.read().rfind(b"\n") + 1)
        except OSError as error:
            message = f"{name} cannot be written: {error.strerror}"
            raise wrong(message, "another file", "--output") from None

    def add(self, record: Mapping[str, Any]) -> None:
        """Writes a line, which outlives this process. Raises MtcliError (exit 1)."""
        try:
            self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise failed(f"{self.name} cannot be written: {error.strerror}") from None

    def close(self) -> None:
        """Unlocks the file."""
        self._file.close()
