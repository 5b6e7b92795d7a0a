"""Trains a sweep's trials: array after array, in Hyperband's rungs, or as a sampler proposes them.

Hyperband packs the trials of each rung into new arrays. Where one array has all of them, that array
continues without the trials that were stopped.
"""

from collections.abc import Sequence
from contextlib import ExitStack

from mtcli.core.parallel.collectives import gather_values
from mtcli.core.parallel.together import together
from mtcli.core.sweep.live import LiveArray
from mtcli.core.sweep.record import TrialRecord
from mtcli.core.sweep.sampling import Proposals, SamplingPlan
from mtcli.core.sweep.stopping import Hyperband, Rung, below_median, best
from mtcli.core.sweep.sweep import Sweep
from mtcli.core.sweep.trials import name_of, partitions

MOST_ASKED = 8  # trials that a sampler is asked for at once, which know nothing of each other


def train(sweep: Sweep) -> bool:
    """Trains all trials; returns False, after saving, where the sweep was told to stop."""
    plan = sweep.plan
    sweep.clear_stop_file()
    with sweep.board:
        for note in sweep.notes():
            sweep.board.say(note)
        if plan.sampling:
            _sample(sweep, plan.sampling)
        else:
            for group in sweep.partitions():
                if plan.hyperband:
                    _hyperband(sweep, group, plan.hyperband)
                else:
                    _train_group(sweep, group)
    sweep.write()
    sweep.clear_stop_file()
    return not sweep.interrupted


def _sample(sweep: Sweep, sampling: SamplingPlan) -> None:
    """Trains the trials that a sampler proposes, as many at a time as one array takes."""
    first, output = sweep.runtime.rank == 0, sweep.plan.output
    study = together(sweep.world, lambda: Proposals(sampling, output) if first else None)
    shape = sweep.plan.trials[0].config
    size = sweep.plan.request.max_fused or min(sweep.capacity(shape), MOST_ASKED)
    sweep.proposed(gather_values(study.done() if study else None, sweep.world)[0])
    while not sweep.interrupted:
        proposals = study.ask(size) if study else None
        asked = gather_values(proposals, sweep.world)[0]
        if not asked:
            return
        trials = sweep.proposed([values for _, values in asked])
        for group in partitions(trials):
            _train_group(sweep, [sweep.by_name[trial.name] for trial in group])
        for number, values in asked:
            record = sweep.by_name[name_of(values)]
            if study and record.ended:
                study.tell(number, None if record.status == "diverged" else record.score)


def _train_group(sweep: Sweep, group: Sequence[TrialRecord]) -> None:
    """Trains a partition's trials, one array after another."""
    for array in sweep.packed([record for record in group if not record.ended]):
        if sweep.interrupted:
            return
        with sweep.opened(array) as live:
            _to_the_end(sweep, live)


def _to_the_end(sweep: Sweep, live: LiveArray) -> None:
    """Trains to the last step, with the median rule every `median` steps.

    The rule comes before the next step: a sweep that was told to stop resumes with it.
    """
    steps, period = live.config.train.steps, sweep.plan.request.median
    while live.running and not sweep.interrupted and live.array.step < steps:
        step, until = live.array.step, steps
        if period:
            _apply_median(sweep, live, step, period)
            until = min(steps, (step // period + 1) * period)
        sweep.interrupted = not live.train(until)
    sweep.close(live)


def _apply_median(sweep: Sweep, live: LiveArray, step: int, period: int) -> None:
    if step == 0 or step % period:
        return
    losses = {record.name: record.losses for record in sweep.records}
    running = {record.name for record in live.running}
    stopped = [n for n in below_median(losses, step, period) if n in running]
    if stopped:
        live.stop(stopped, f"above the median of the others at step {step}")


def _hyperband(sweep: Sweep, group: Sequence[TrialRecord], rule: Hyperband) -> None:
    """Trains Hyperband's brackets, each on the next trials of the group, until none are left."""
    left = list(group)
    for number, rungs in enumerate(rule.brackets(group[0].trial.config.train.steps)):
        bracket, left = left[: rungs[0].trials], left[rungs[0].trials :]
        if bracket and not sweep.interrupted:
            _bracket(sweep, bracket, rungs, f"bracket {number + 1}")


def _bracket(sweep: Sweep, bracket: list[TrialRecord], rungs: Sequence[Rung], name: str) -> None:
    """Trains a bracket, rung by rung; an array with all of a rung's trials trains the next too."""
    going, done, live = bracket, 0, None
    with ExitStack() as stack:
        for rung, after in zip(rungs, [*rungs[1:], None], strict=True):
            if live is None and _fits_one(sweep, going, rung.step):
                live = stack.enter_context(sweep.opened(going))
            if live:
                sweep.interrupted = not live.train(rung.step)
            else:
                _train_apart(sweep, going, rung.step)
            if sweep.interrupted or after is None:
                break
            count = max(1, len(bracket) * after.trials // rungs[0].trials)
            reason = f"not among the best {count} of {len(going)} at step {rung.step}, {name}"
            going = _keep_best(sweep, going, live, (count, rung.step, done), reason)
            done = rung.step
        if live:
            sweep.close(live)


def _fits_one(sweep: Sweep, going: Sequence[TrialRecord], until: int) -> bool:
    """Whether one array takes all of these trials, which have not got to a step."""
    arrays = sweep.packed([r for r in going if len(r.losses) < until and not r.ended])
    return len(arrays) == 1 and len(arrays[0]) == len(going)


def _train_apart(sweep: Sweep, going: Sequence[TrialRecord], until: int) -> None:
    """Trains the trials that have not got to a step in arrays of their own, and saves them."""
    for array in sweep.packed([r for r in going if len(r.losses) < until and not r.ended]):
        if sweep.interrupted:
            return
        with sweep.opened(array) as live:
            sweep.interrupted = not live.train(until)
            if not sweep.interrupted and until < live.config.train.steps:
                live.save()
            sweep.close(live)


def _keep_best(
    sweep: Sweep,
    going: Sequence[TrialRecord],
    live: LiveArray | None,
    rung: tuple[int, int, int],
    reason: str,
) -> list[TrialRecord]:
    """Stops all but the best `count` at a step, by their losses since `done`."""
    count, step, done = rung
    losses = {r.name: r.losses for r in going if r.status != "diverged"}
    winners = best(losses, step, count, step - done)
    losers = [name for name in losses if name not in winners]
    if live:
        live.stop(losers, reason)
    else:
        for name in losers:
            sweep.by_name[name].end("stopped", reason)
        sweep.write()
    return [sweep.by_name[name] for name in winners]
