"""Progress on a terminal and elsewhere, by a clock of the test's."""

import sys

import pytest

from mtcli.core.runtime.progress import ProgressLines, progress_bar, write_line


@pytest.fixture
def clock():
    """A clock that a test sets, in seconds."""

    class Clock:
        now = 100.0

        def __call__(self):
            return self.now

    return Clock()


def test_a_line_comes_at_most_every_five_seconds_and_has_names_and_values(clock, capsys):
    lines = ProgressLines("encode", 2000, "B", 400, clock)
    for _ in range(16):
        clock.now += 1.0
        lines.update(50)
    lines.close()
    assert capsys.readouterr().err.splitlines() == [
        "encode 650/2000 percent 32.5 B/s 50 left 0:00:27",
        "encode 900/2000 percent 45.0 B/s 50 left 0:00:22",
        "encode 1150/2000 percent 57.5 B/s 50 left 0:00:17",
        "encode 1200/2000 percent 60.0 B/s 50 left 0:00:16",
    ]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [((4.9, 0.0), []), ((4.9, 0.1), ["x 3/3 percent 100.0 it/s 0.6 left 0:00:00"])],
)
def test_the_last_line_is_of_work_that_took_five_seconds(clock, capsys, seconds, expected):
    with ProgressLines("x", 3, "it", 0, clock) as lines:
        clock.now += seconds[0]
        lines.update(3)
        clock.now += seconds[1]
    assert capsys.readouterr().err.splitlines() == expected


def test_a_line_is_written_once_though_the_end_comes_later(clock, capsys):
    with ProgressLines("x", 3, "it", 0, clock) as lines:
        clock.now += 6.0
        lines.update(3)
        clock.now += 6.0
    assert capsys.readouterr().err == "x 3/3 percent 100.0 it/s 0.5 left 0:00:00\n"


def test_a_total_that_is_unknown_leaves_the_shares_out_and_a_rate_of_zero_the_time(clock, capsys):
    lines = ProgressLines("pipe\x1b", None, "B", 0, clock)
    lines.set_postfix_str("tokens/s 7")
    clock.now += 5.0
    lines.update(10)
    still = ProgressLines("still", 8, "it", 0, clock)
    clock.now += 5.0
    still.update(0)
    expected = "pipe\\x1b 10 B/s 2 tokens/s 7\nstill 0/8 percent 0.0 it/s 0\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("leave", [True, False])
def test_a_terminal_has_a_bar_and_quiet_nothing(monkeypatch, capsys, leave):
    assert isinstance(progress_bar("x", 4), ProgressLines)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_bar("shown", 4, unit="step", done=1, leave=leave) as bar:
        assert (bar.leave, bar.delay) == (leave, 0.0 if leave else 0.5)
        bar.start_t -= 1.0  # as if it had been open for a second
        bar.last_print_t -= 1.0
        bar.update(3)
    assert "shown: 100%" in (shown := capsys.readouterr().err) and "4/4" in shown
    with progress_bar("quiet", 4, quiet=True) as bar:
        bar.update(4)
    write_line("said")
    assert capsys.readouterr().err == "said\n"
