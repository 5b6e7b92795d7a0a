"""Tables at any width: whole figures, whole words, no line beyond the terminal, none filled up."""

import re
from pathlib import Path

import pytest

from mtcli.__main__ import run
from mtcli.core.runtime.console import print_table, width

COLUMNS = ["", "layout", "step", "memory", "reason"]
ROWS = [
    ["1", "dp=16 micro-batch 8 zero=1 recompute full", "2.143 s", "26.2 GiB", "a gain of 2.4 GiB"],
    ["2", "tp=2 dp=8", "13.07 ms", "512.0 MiB", "does not fit, by 25.6 GiB of [all] it has"],
    ["", "one rank", "9 s", "", "communication takes 3.5 s more than it does without experts"],
]


def printed(capsys, *arguments, **options):
    print_table(*arguments, **options)
    return capsys.readouterr().out.splitlines()


def words(text):
    return sorted(text.split())


@pytest.mark.parametrize("columns", [24, 30, 40, 60, 80, 120, 300, None])
@pytest.mark.parametrize("right", [False, True])
def test_no_width_loses_a_figure_or_breaks_a_word(capsys, monkeypatch, columns, right):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", str(columns))
    lines = printed(capsys, "What was found", COLUMNS, ROWS, right=right)
    assert columns is None or max(map(len, lines)) <= columns
    assert all(line == line.rstrip() for line in lines)
    text = "\n".join(lines)
    cells = " ".join(cell for row in ROWS for cell in row)
    assert set(words(cells)) <= set(words(text))
    for figure in re.findall(r"\d[\d.]* (?:GiB|MiB|ms|s)\b", cells):
        assert figure in text, "a figure stands beside its unit"
    assert "What was found" in " ".join(text.split())


def test_a_pipe_gets_a_line_for_each_row(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = printed(capsys, "", COLUMNS, ROWS)
    assert len(lines) == 1 + len(ROWS)
    assert lines[2].startswith("2") and lines[2].endswith(ROWS[1][-1])
    assert (width(), width(100)) == (100_000, 100)


def test_a_column_without_a_cell_is_left_out(capsys):
    lines = printed(capsys, "", ["a", "b", "c"], [["1", "", "3"], ["4", "", ""]])
    assert [line.split() for line in lines] == [["a", "c"], ["1", "3"], ["4"]]
    assert [line.split() for line in printed(capsys, "", ["a", "b"], [])] == [["a", "b"]]


def test_what_is_too_narrow_for_a_row_shows_a_block_for_each(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    lines = printed(capsys, "", ["a\nb", "c"] + COLUMNS[2:], [["x", "y", *ROWS[0][2:]]] * 2)
    block = ["a b     x", "c       y", "step    2.143 s", "memory  26.2 GiB"]
    assert lines[:5] == [*block, "reason  a gain of 2.4 GiB"]
    assert lines[5] == "" and lines[6:] == lines[:5]


def test_names_and_values_wrap_beside_each_other(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "34")
    lines = printed(capsys, "", ("", ""), [["path", "a/b"], ["what", ROWS[2][-1]]])
    assert lines[0] == "path  a/b"
    assert lines[1] == "what  communication takes 3.5 s"
    assert all(line.startswith("      ") for line in lines[2:])


def test_brackets_and_colons_are_no_markup(capsys):
    assert printed(capsys, "[b]t[/b]", ("", ""), [["[red]x[/red]", ":smile:"]]) == [
        "[b]t[/b]",
        "[red]x[/red]  :smile:",
    ]


@pytest.mark.parametrize("columns", ["60", "120"])
def test_every_table_of_a_plan_is_as_wide_as_the_terminal_at_most(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    assert run(["plan", "mixtral-8x22b", "--gpus", "128", "--device", "h100", "--ranks"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= int(columns)
    assert any(re.search(r"\d GiB$", line) for line in lines)


def test_all_tables_are_printed_here():
    root = Path(__file__).parents[3] / "mtcli"
    found = {path.name for path in root.rglob("*.py") if "from rich" in path.read_text()}
    assert found == {"console.py", "board.py", "watch_screen.py"}, "and what is drawn again"
