"""Our step and another's, in turns on one device, and the row that comes of it.

Both stay in memory where their weights and optimizers leave enough of it to activations; else, and
where one of them had no room beside the other, each has the device to itself, ours first.
"""

from collections.abc import Callable
from math import isfinite, sqrt
from statistics import mean, median, pstdev
from time import monotonic
from typing import Any

from cases import OURS, Case, missing
from turns import Answer, Child

from mtcli.core.config.errors import MtcliError
from mtcli.core.config.schema import RunConfig
from mtcli.core.mesh.parameters import count_active, count_parameters
from mtcli.core.plan.hardware import GPUS
from mtcli.core.plan.predict import CAUSAL, MODEL
from mtcli.core.runtime.peak_flops import board_name

STATE_BYTES = 18 + 20  # a parameter's: ours, and the most that a rival keeps
TOGETHER = 0.65  # of the memory: what two states may take
# How far the first losses may be apart, as a part of their spread, and the next ones, as a part of
# them. bfloat16 rounds to 1/256 and dozens of such roundings meet; other weights are 1.4 apart.
BOUNDS = {"fp32": (1e-3, 1e-4), "bf16": (0.1, 1e-2), "fp8": (0.5, 3e-2)}


class Pair:
    """Measures pairs, one at a time; keeps our process while the case stays the same."""

    def __init__(self, spawn: Callable[..., Child], args: Any, limits: dict[str, Any]) -> None:
        self.spawn, self.args, self.limits = spawn, args, limits
        self.ours: tuple[str, Child, Answer] | None = None  # case, process, how it began

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_: object) -> None:
        self._end_ours()

    def measure(
        self, case: Case, name: str, settings: tuple[str, ...] | None, deadline: float
    ) -> dict[str, Any]:
        """The row of a case beside a contender; `settings` are those of a variant of ours."""
        begin = monotonic()
        row: dict[str, Any] = {"case": case.name, "contender": name}
        tiny = self.args.tiny
        if why := missing(name) or self._too_large(case) or refused(case, settings, self.args):
            return row | {"skipped": why}
        config = case.config(tiny=tiny)
        row |= described(case, config) | {"settings": settings, "repeats": self.args.repeats}
        row["other_tokens"] = tokens_of(case.config(settings or (), tiny))
        words = (case.name, name, *(settings or ()))
        found = None
        if self._fit_together(config):
            found = self._in_turns(case, words, deadline)
            row["in_turns"] = True
        if found is None or any(answer.get("memory") for answer in found.values()):
            found = self._one_after_the_other(case, words, deadline)
            row["in_turns"] = False
        bad = [(who, answer) for who, answer in found.items() if answer.keys() & {"failed", "late"}]
        if "skipped" in found.get("other", {}):
            return row | {"skipped": found["other"]["skipped"]}
        if bad:
            who, answer = bad[-1]
            return (
                row | answer | {"failed": f"{name if who == 'other' else OURS}: {answer['failed']}"}
            )
        return row | self._figures(row, config, found) | {"wall_s": monotonic() - begin}

    def _in_turns(self, case: Case, words: tuple[str, ...], deadline: float) -> dict[str, Answer]:
        ours, first = self._our_child(case, deadline)
        if "failed" in first:
            self._end_ours()
            return {"mtcli": first}
        other = self.spawn(*words)
        try:
            begun = other.hear(deadline)
            if "failed" not in begun:
                self._take_turns(case, {"mtcli": (ours, first), "other": (other, begun)}, deadline)
        finally:
            other.end()
        if "failed" in first or begun.get("memory"):
            self._end_ours()  # it makes room, or is made anew
        return {"mtcli": first, "other": begun}

    def _one_after_the_other(
        self, case: Case, words: tuple[str, ...], deadline: float
    ) -> dict[str, Answer]:
        found = {}
        self._end_ours()
        for who, command in (("mtcli", (case.name, OURS)), ("other", words)):
            child = self.spawn(*command)
            try:
                found[who] = begun = child.hear(deadline)
                if "failed" in begun:
                    break
                self._take_turns(case, {who: (child, begun)}, deadline)
            finally:
                child.end()
        return found

    def _take_turns(
        self, case: Case, children: dict[str, tuple[Child, Answer]], deadline: float
    ) -> None:
        """Adds `turns` to what each child answered when it began, or `failed`."""
        steps = 1 if self.args.tiny else case.steps
        for begun in (answer for _, answer in children.values()):
            begun["turns"] = []
        for number in range(self.args.repeats):
            order = list(children.values())
            for child, begun in order[:: -1 if number % 2 else 1]:
                answer = child.ask(deadline, turn=steps)
                if "failed" in answer:
                    begun.update(answer)
                    return
                begun["turns"].append(answer)
        for child, begun in children.values():
            begun.update(child.ask(deadline, phases=True))

    def _our_child(self, case: Case, deadline: float) -> tuple[Child, Answer]:
        if self.ours is None or self.ours[0] != case.name:
            self._end_ours()
            child = self.spawn(case.name, OURS)
            self.ours = (case.name, child, child.hear(deadline))
        return self.ours[1:]

    def _end_ours(self) -> None:
        if self.ours is not None:
            self.ours[1].end()
            self.ours = None

    def _too_large(self, case: Case) -> str | None:
        gib = self.limits.get("memory_bytes", float("inf")) / 2**30
        return f"it needs {case.gib:.0f} GiB of memory, not {gib:.0f}" if gib < case.gib else None

    def _fit_together(self, config: RunConfig) -> bool:
        room = self.limits.get("memory_bytes", float("inf"))
        return STATE_BYTES * count_parameters(config.model) < TOGETHER * room

    def _figures(
        self, row: dict[str, Any], config: RunConfig, found: dict[str, Answer]
    ) -> dict[str, Any]:
        tokens = {"mtcli": row["tokens"], "other": row["other_tokens"]}
        figures = {who: self._speed(row, tokens[who], answer) for who, answer in found.items()}
        ours, other = figures["mtcli"], figures["other"]
        peaks = [figures[who]["peak_bytes"] for who in ("mtcli", "other")]
        apart = spread_apart(found["mtcli"]["first"], found["other"]["first"])
        same = row["tokens"] == row["other_tokens"]  # else batches have other texts
        gap = largest_gap(found["mtcli"]["losses"], found["other"]["losses"]) if same else 0.0
        precision = found["other"]["facts"].get("precision", config.train.precision)
        bounds = BOUNDS.get(precision, BOUNDS["bf16"])
        return figures | {
            "ratio": ours["tokens_per_s"] / other["tokens_per_s"],
            "memory_ratio": peaks[0] / peaks[1] if all(peaks) else None,
            "apart": apart,
            "loss_gap": gap,
            "agrees": apart < bounds[0] and gap < bounds[1],
        }

    def _speed(self, row: dict[str, Any], tokens: int, answer: Answer) -> dict[str, Any]:
        seconds = [turn["seconds"] for turn in answer["turns"]]
        rate = tokens / median(seconds)
        causal = rate * row["causal_flops_per_token"]
        peaks = [turn["peak_bytes"] for turn in answer["turns"]]
        return {
            "seconds": seconds,
            "median_s": median(seconds),
            "tokens_per_s": rate,
            "mfu": rate * row["flops_per_token"] / self._peak_flops(),
            "causal_flop_per_s": causal,
            "of_product": causal / self.limits["flop_per_s"],
            "peak_bytes": max(peaks) if all(peaks) else None,
            "first_step_s": answer["first_step"],
            "phases": answer.get("phases"),
            "losses": answer["losses"],
            "facts": answer["facts"],
        }

    def _peak_flops(self) -> float:
        """The datasheet's bfloat16 rate; of a device that is not listed, the measured one's."""
        board = board_name(self.limits["device"])
        return GPUS[board].peak("bf16") if board else float(self.limits["flop_per_s"])


def refused(case: Case, settings: tuple[str, ...] | None, args: Any) -> str | None:
    """What the config, or a CPU, says against settings of ours, or None."""
    if args.device == "cpu" and "train.cuda_graphs=true" in (settings or ()):
        return "a CPU has no CUDA graphs"
    try:
        case.config(settings or (), args.tiny)
    except MtcliError as error:
        return "; ".join(problem.message for problem in error.problems)
    return None


def described(case: Case, config: RunConfig) -> dict[str, Any]:
    """What was measured: sizes, and the FLOPs of a token by the conventions that are named."""
    model, seq_len = config.model, config.batch.seq_len
    whole = case.whole().model
    return {
        "parameters": count_parameters(model),
        "active_parameters": count_active(model),
        "layers": model.num_layers,
        "whole_layers": whole.num_layers,
        "seq_len": seq_len,
        "tokens": tokens_of(config),
        "micro_batches": config.batch.global_batch_size // config.batch.micro_batch_size,
        "flops_per_token": MODEL.token_flops(model, seq_len),
        "causal_flops_per_token": CAUSAL.token_flops(model, seq_len),
        "whole_flops_per_token": MODEL.token_flops(whole, seq_len),
        "convention": MODEL.name,
        "goal_mfu": case.goal,
    }


def tokens_of(config: RunConfig) -> int:
    """Tokens of a step."""
    return config.batch.global_batch_size * config.batch.seq_len


def spread_apart(ours: list[float], theirs: list[float]) -> float:
    """The root mean square of the differences, as a part of the spread of ours."""
    if not all(map(isfinite, [*ours, *theirs])):
        return float("inf")
    squares = ((a - b) ** 2 for a, b in zip(ours, theirs, strict=True))
    return sqrt(mean(squares)) / pstdev(ours)


def largest_gap(ours: list[float], theirs: list[float]) -> float:
    """The largest difference of losses step by step, as a part of ours."""
    if not all(map(isfinite, [*ours, *theirs])):
        return float("inf")
    return max(abs(a - b) / a for a, b in zip(ours, theirs, strict=True))
