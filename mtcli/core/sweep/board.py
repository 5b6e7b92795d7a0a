"""Shows a sweep while it runs: a table of its models on a terminal, elsewhere a line."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from mtcli.core.config.errors import visible
from mtcli.core.plan.hardware import gib
from mtcli.core.runtime.progress import progress_bar, write_line
from mtcli.core.sweep.record import TrialRecord

if TYPE_CHECKING:
    from mtcli.core.sweep.live import LiveArray

MOST_ROWS = 24  # of the table on a terminal


class Board:
    """Shows a sweep's progress on stderr, on the first rank only. Use it as a context."""

    def __init__(
        self, records: Sequence[TrialRecord], output: Path, steps: int, speaks: bool
    ) -> None:
        """`steps` are those of all trials together."""
        self.records, self.output, self.steps, self.speaks = records, output, steps, speaks
        self.bar: Any = None
        self.live: Live | None = None
        self.rate = 0.0

    def __enter__(self) -> "Board":
        if not self.speaks:
            return self
        console = Console(stderr=True)
        done = sum(len(record.losses) for record in self.records)
        if console.is_terminal:
            self.live = Live(console=console, refresh_per_second=4, get_renderable=self._table)
            self.live.start()
        else:
            self.bar = progress_bar("sweep", self.steps, "step", done)
        return self

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.live.stop()
        if self.bar is not None:
            self.bar.close()

    def say(self, text: str) -> None:
        """Writes a line above what is shown."""
        if not self.speaks:
            return
        if self.live:
            self.live.console.print(visible(text), markup=False, highlight=False)
        else:
            write_line(text)

    def begin(self, live: "LiveArray", world: int) -> None:
        """Says what an array is about to do, in numbers."""
        if not self.speaks:
            return
        count, shape = len(live.running), live.config
        ranks = f" on {world} ranks" if world > 1 else ""
        text = f"array of {count} model{'s' * (count > 1)}{ranks}, from step {live.array.step} of "
        text += f"{shape.train.steps}: {count} x {shape.batch.tokens_per_step:,} tokens a step, "
        text += f"{gib(live.state_bytes)} of weights, gradients and optimizer a rank"
        self.say(text)

    def stepped(self, running: Sequence[TrialRecord], tokens_per_second: float) -> None:
        """Shows a step of an array."""
        self.rate = tokens_per_second
        if self.bar is None:
            return
        losses = sorted(r.losses[-1] for r in running if math.isfinite(r.losses[-1]))
        if losses:
            line = f"loss {losses[0]:.4f} to {losses[-1]:.4f} of {len(running)} models"
            self.bar.set_postfix_str(f"{line} tokens/s {tokens_per_second:.0f}")
        self.bar.update(len(running))

    def _table(self) -> Table:
        """The models by their order, the best first."""
        title = f"{self.output}: {self.rate:,.0f} tokens/s of the array"
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for name in ("trial", "step", "loss", "valid", "lr", "status"):
            table.add_column(name, justify="left" if name in ("trial", "status") else "right")
        shown = sorted(self.records, key=lambda record: record.order)
        for record in shown[:MOST_ROWS]:
            valid = "" if record.valid_loss is None else f"{record.valid_loss:.4f}"
            last = f"{record.losses[-1]:.4f}" if record.losses else ""
            lr = f"{record.lr:.2e}" if record.losses else ""
            table.add_row(record.name, str(len(record.losses)), last, valid, lr, record.status)
        if len(shown) > MOST_ROWS:
            table.add_row(f"and {len(shown) - MOST_ROWS} more", "", "", "", "", "")
        return table


def rows(records: Sequence[TrialRecord]) -> list[list[str]]:
    """Lists the rows of the table of results, in the order of `TrialRecord.order`."""
    table = []
    for record in sorted(records, key=lambda trial: trial.order):
        valid = "" if record.valid_loss is None else f"{record.valid_loss:.4f}"
        loss = f"{record.loss:.4f}" if math.isfinite(record.loss) else "none"
        steps = f"{len(record.losses)} of {record.trial.config.train.steps}"
        status = "stopped early" if record.status == "stopped" else record.status
        table.append([record.name, loss, valid, steps, status])
    return table
