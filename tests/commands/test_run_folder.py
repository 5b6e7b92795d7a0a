"""A run folder belongs to one run, and all its ranks start from the same checkpoint and data."""

import json
import os
import shutil
import signal
import time
from functools import partial

import pytest
from command_line import launched, mtcli, start
from drills import STEPS, Drill
from indexed_dataset import write_dataset
from marks import slow, slow_cases
from tiny import documents, metrics

from mtcli.core.data.indexed import token_dtype


@pytest.fixture
def drill(tmp_path):
    return Drill(tmp_path, timeout=120.0)  # a run waits here while others are tried


def paused(rank, step, go):
    """Rank 0 waits in a step, until there is the file `go`."""
    from mtcli.core.training.step import Trainer

    real = Trainer.forward_backward

    def faulty(self, *arguments, **settings):
        while rank == 0 and self.step + 1 == step and not go.exists():
            time.sleep(0.01)
        return real(self, *arguments, **settings)

    Trainer.forward_backward = faulty


def until(condition):
    end = time.monotonic() + 120.0
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.01)


def rows(drill):
    path = drill.output / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("nproc", [1, *slow_cases("five commands of two ranks", 2)])
def test_beside_a_live_run_that_has_saved_nothing_no_other_starts(drill, nproc):
    """Its folder stays as it is, by the byte, whoever asks; then it goes on and ends well."""
    fault = partial(paused, step=2, go=drill.folder / "go")
    words = ["train", drill.config, "--nproc", nproc]
    live = start(*words, fault=fault)
    until(lambda: len(rows(drill)) == 1)
    before = contents(drill.output)
    held = f"error: train.output: {drill.output} is held by another run (process "
    holder = f"{held}{live.ranks[0].pid} on {os.uname().nodename}, since "
    for more in (["--resume"], [], ["--set", "train.steps=1"], ["--init", str(drill.output)]):
        other = mtcli(*words, *more)
        assert other.codes == [2] * nproc, other.errors
        assert [said.count(holder) for said in other.errors] == [1] * nproc, "\n".join(other.errors)
        assert contents(drill.output) == before
    (drill.folder / "go").touch()
    assert live.ended().codes == [0] * nproc
    assert [json.loads(row)["step"] for row in rows(drill)] == list(range(1, STEPS + 1))
    assert not (drill.output / "run.lock").exists()


def test_a_killed_run_that_had_saved_nothing_begins_anew_with_one_line_about_it(drill):
    live = start("train", drill.config, fault=partial(paused, step=2, go=drill.folder / "go"))
    until(lambda: len(rows(drill)) == 1)
    os.kill(live.ranks[0].pid, signal.SIGKILL)
    assert live.ended().codes == [-signal.SIGKILL]
    again = launched("train", drill.config)
    assert again.returncode == 2 and f"{drill.output} holds a run that has come" in again.stderr
    resumed = drill.train("--start-over")
    assert resumed.codes == [0]
    said = f"note: took over {drill.output} from process {live.ranks[0].pid} on "
    assert resumed.stderr.count(said) == 1
    assert list(drill.losses()) == list(range(1, STEPS + 1)) and len(rows(drill)) == STEPS


def test_runs_without_a_folder_of_their_own_share_none(drill):
    """Of two that name no output, the second is refused."""
    text = drill.config.read_text()
    drill.config.write_text(text.replace(f'output = "{drill.output}"\n', ""))
    first = mtcli("train", drill.config, folder=drill.folder)
    assert first.codes == [0], first.errors
    before = contents(drill.folder / "runs")
    second = mtcli("train", drill.config, "--set", "seed=8", folder=drill.folder)
    assert second.codes == [2] and "train.output: runs/run already holds a run" in second.stderr
    assert contents(drill.folder / "runs") == before


def test_a_resume_with_nothing_to_do_says_so_and_writes_nothing(drill):
    assert drill.train().codes == [0]
    before = contents(drill.output)
    for steps in (STEPS, STEPS - 2):
        done = drill.train("--resume", settings=[f"train.steps={steps}"])
        assert done.codes == [0]
        said = f"nothing to do: step {STEPS} of train.steps={steps} is done; "
        assert said in done.stdout and str(drill.checkpoint(STEPS)) in done.stdout
        assert contents(drill.output) == before


def test_a_run_folder_that_was_moved_goes_on_where_it_is(drill):
    """Its config.toml names the folder that it was in; from there it would begin at the seed."""
    assert drill.train().codes == [0]
    moved = drill.output.rename(drill.folder / 'mo"ved')
    done = mtcli(
        "train", moved.name, "--resume", "--set", f"train.steps={STEPS + 1}", folder=drill.folder
    )
    assert done.codes == [0] and f"checkpoints/step-{STEPS:08d}, step {STEPS}" in done.stdout
    assert [row["step"] for row in metrics(moved)] == list(range(1, STEPS + 2))
    assert not drill.output.exists()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run of STEPS steps in run/, and one with that of another seed."""
    folders = []
    for seed in (7, 8):
        drill = Drill(tmp_path_factory.mktemp(f"seed-{seed}"))
        text = drill.config.read_text().replace(f'output = "{drill.output}"', 'output = "run"')
        drill.config.write_text(text)
        done = mtcli("train", drill.config, "--set", f"seed={seed}", folder=drill.folder)
        assert done.codes == [0], done.errors
        folders.append(drill.folder)
    return folders


@pytest.fixture
def machines(runs, tmp_path):
    """Two folders, each a machine's own, with the same run in run/; and a drill."""
    drill = Drill(tmp_path / "first")
    for name in ("first", "second"):
        shutil.copytree(runs[0], tmp_path / name, dirs_exist_ok=True)
    return drill, tmp_path / "second"


def with_another_run(folder, runs):
    """Puts the run of another seed in the place of a folder's."""
    shutil.rmtree(folder / "run")
    shutil.copytree(runs[1] / "run", folder / "run")


def elsewhere(rank, folder):
    """Rank 1 is on another machine, which has other files under the same names."""
    if rank == 1:
        os.chdir(folder)
        os.environ["LOCAL_RANK"] = "0"


def go_on(drill, fault, *words):
    """Two ranks that would go on to step 12: which they are told, and what rank 0 has then."""
    words = ["train", drill.config, "--set", "train.steps=12", "--nproc", 2, *words]
    return mtcli(*words, folder=drill.folder, fault=fault)


def newest(folder):
    return folder / "run" / "checkpoints" / f"step-{STEPS:08d}"


def refused(done, said):
    assert done.codes == [2, 2], done.errors
    # After what torch may say of a store whose rank has ended before.
    own = [error[error.index("error: ") :] for error in done.errors]
    assert own[0] == own[1], "one error, on every rank"
    assert said in done.errors[0] and "where all machines see the same files" in done.errors[0]


def test_a_rank_that_lacks_the_newest_checkpoint_ends_the_run_before_it_starts(machines):
    drill, second = machines
    shutil.rmtree(newest(second))
    before = contents(drill.output)
    done = go_on(drill, partial(elsewhere, folder=second), "--resume")
    refused(done, f"rank 1 on {os.uname().nodename}: run/checkpoints/step-0000")
    assert contents(drill.output) == before


@pytest.mark.parametrize("left", ["older", *slow_cases("1 s", "none")])
def test_rank_0_does_not_begin_behind_a_checkpoint_that_another_sees(machines, left):
    drill, second = machines
    shutil.rmtree(newest(drill.folder) if left == "older" else drill.output)
    done = go_on(drill, partial(elsewhere, folder=second), "--resume")
    name = "run/checkpoints/step-"
    refused(done, f"sees the checkpoint {name}{STEPS:08d}, and rank 0 on {os.uname().nodename} ")
    assert ("sees none" if left == "none" else f"sees {name}00000006") in done.errors[0]


@slow("two runs, 1 s")
def test_checkpoints_of_one_name_and_other_bytes_are_not_mixed(machines, runs):
    drill, second = machines
    with_another_run(second, runs)
    done = go_on(drill, partial(elsewhere, folder=second), "--resume")
    refused(done, f"rank 1 on {os.uname().nodename} has opened run/checkpoints/step-{STEPS:08d} of")


def stale(rank):
    """Rank 1's list of checkpoints is an old one, though it can open the new one by its name."""
    from mtcli.core.checkpoint import opening

    if rank == 1:
        real = opening.step_folders
        opening.step_folders = lambda root: real(root)[:-1]


@slow("two runs, 1 s")
def test_a_stale_list_of_checkpoints_does_not_mix_them(machines):
    drill, _ = machines
    alone = drill.folder / "alone"
    shutil.copytree(drill.output, alone)
    settings = ["--set", "train.steps=12", "--resume", "--nproc", 2]
    output = ["--set", f"train.output={alone}"]
    assert mtcli("train", drill.config, *settings, *output).codes == [0, 0]
    assert go_on(drill, stale, "--resume").codes == [0, 0]
    assert rows_of(drill.output) == rows_of(alone)


def rows_of(folder):
    return [(row["step"], row["loss"]) for row in metrics(folder)]


@slow("two runs, 1 s")
@pytest.mark.parametrize("kind", ["ours", "hf"])
def test_ranks_do_not_start_from_different_weights_of_one_name(machines, runs, kind):
    drill, second = machines
    with_another_run(second, runs)
    source = newest(drill.folder).relative_to(drill.folder)
    if kind == "hf":
        for folder in (drill.folder, second):
            assert mtcli("shard", "run", "hf", "--to", "hf", folder=folder).codes == [0]
        source = "hf"
    words = ["--init", source, "--set", "train.output=tuned"]
    done = go_on(drill, partial(elsewhere, folder=second), *words)
    refused(done, f"rank 1 on {os.uname().nodename} has opened {source} of step ")
    assert not (drill.folder / "tuned").exists()


def test_ranks_do_not_train_on_different_data_of_one_name(machines):
    drill, second = machines
    write_dataset(second / "data", documents(seed=1), token_dtype(101))
    words = ["--set", 'data.train=["data"]', "--set", "train.output=new"]
    done = go_on(drill, partial(elsewhere, folder=second), *words)
    refused(done, f"error: data.train: rank 1 on {os.uname().nodename} reads data with the hashes")
    assert not (drill.folder / "new").exists()


@slow("two runs, 1 s")
def test_ranks_do_not_evaluate_different_weights_of_one_name(machines, runs):
    drill, second = machines
    with_another_run(second, runs)
    words = ["generate", "run", "--prompt", "a", "--max-tokens", 1, "--nproc", 2]
    fault = partial(elsewhere, folder=second)
    done = mtcli(*words, folder=drill.folder, fault=fault)
    refused(done, f"rank 1 on {os.uname().nodename} has opened run/checkpoints/step-{STEPS:08d} of")


def test_a_run_that_is_started_again_by_its_launcher_takes_its_own_lock_over(drill, spawn):
    words = ["train", drill.config, "--max-restarts", 1, "--set", "train.steps=100000"]
    run = spawn(*words, "--set", "train.save_every=20")
    until(lambda: any(drill.output.glob("checkpoints/step-*[0-9]")))
    first = holder_of(drill.output)
    os.kill(first, signal.SIGKILL)
    until(lambda: holder_of(drill.output) not in (first, None))
    until(lambda: '"resumed"' in (drill.output / "events.jsonl").read_text())
    run.send_signal(signal.SIGTERM)
    _, errors = run.communicate(timeout=120)
    assert run.returncode == 130, errors
    assert errors.count(f"note: took over {drill.output} from process {first} on ") == 1
    assert holder_of(drill.output) is None


def holder_of(folder):
    """The process that a run folder's lock names; None where there is no lock, or no name yet."""
    try:
        return json.loads((folder / "run.lock").read_text())["pid"]
    except (FileNotFoundError, ValueError):
        return None
