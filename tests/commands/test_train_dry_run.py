"""`mtcli train --dry-run` and `--json`: what a run would do, without a file; and what one did."""

import json

import numpy as np
import pytest
from command_line import launched, mtcli
from tiny import metrics, write_run

from mtcli.core.data import conversations
from mtcli.core.data.loader import Batches

SEQ_LEN, BATCH, STEPS = 8, 4, 3
LARGE = 100  # sequences of a batch that is read in parts


@pytest.fixture
def home(tmp_path):
    """A folder with data and run.toml, whose caches are in it too."""
    write_run(tmp_path, data={"split": "80,20,0"}, train={"steps": STEPS, "output": "run"})
    return tmp_path


def train(home, *words, **options):
    where = {"XDG_CACHE_HOME": str(home / "cache"), "TMPDIR": str(home / "tmp")}
    (home / "tmp").mkdir(exist_ok=True)
    return mtcli("train", *words, folder=home, **where, **options)


def answered(done, code=0):
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def files(folder):
    """The files and folders under a folder, with their contents' sizes and times; without those of
    temporary folders that are not mtcli's, such as one that torch makes as it is imported."""
    paths = [path for path in folder.rglob("*") if path.relative_to(folder).parts[0] != "tmp"]
    stats = {path: path.stat() for path in (*paths, *(folder / "tmp").glob("mtcli-*"))}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


def keeping_all(rank):
    conversations.WORTH_KEEPING = 0


def test_a_dry_run_says_what_a_run_says_first_and_writes_nothing(home):
    before = files(home)
    dry = train(home, "run.toml", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert files(home) == before
    run = train(home, "run.toml")
    header = run.stdout.splitlines()[:-1]  # without what it wrote
    assert header and dry.stdout.splitlines()[: len(header)] == header
    names = [line.split()[0] for line in dry.stdout.splitlines()[len(header) :]]
    assert names == ["batch", "memory", "time"]


def test_a_dry_run_has_the_memory_and_time_of_a_plan(home):
    found = answered(train(home, "run.toml", "--nproc", "2", "--dry-run", "--json", "-"))
    planned = answered(
        mtcli("plan", "run.toml", "--gpus", "2", "--device", "cpu", "--json", "-", folder=home)
    )
    for key in ("memory_bytes", "step_seconds", "layout", "mfu"):
        assert found["plan"][key] == planned[key]
    assert found["seconds"] == STEPS * planned["step_seconds"]
    assert (found["world"], found["plan"]["layout"]["dp"]) == (2, 2)


def test_a_dry_run_counts_the_batch_that_comes_next(home):
    size = ("--set", f"batch.global_batch_size={LARGE}")
    first = answered(train(home, "run.toml", *size, "--dry-run", "--json", "-"))["batch"]
    assert train(home, "run.toml", *size).returncode == 0
    longer = ("run", "--resume", "--set", f"train.steps={STEPS + 1}", "--dry-run", "--json", "-")
    resumed = answered(train(home, *longer))
    assert (resumed["first_step"], resumed["steps"]) == (STEPS, STEPS + 1)
    assert resumed["from"] == f"run/checkpoints/step-{STEPS:08d}, step {STEPS}"
    args = ([str(home / "data")], "80,20,0", "train")
    for batch, samples, planned in ((first, STEPS, None), (resumed["batch"], STEPS + 1, STEPS)):
        data = Batches(*args, samples * LARGE, SEQ_LEN, 7, planned and planned * LARGE)
        first_sample = (planned or 0) * LARGE
        rows = [data.documents(first_sample + i, 1)[0, :-1].tolist() for i in range(LARGE)]
        documents = sum(len(set(row)) for row in rows)
        assert documents > LARGE  # a row has two
        counts = first_sample, LARGE, LARGE * SEQ_LEN, 0, LARGE * SEQ_LEN, documents, None
        assert tuple(batch.values()) == counts


def test_a_dry_run_plans_each_phase_and_reads_the_batch_of_the_next(home):
    """Steps 1 and 2 of 4 x 8 tokens, and 3 to 5 of 8 x 16, from the source's 64th token on."""
    phase = ("from_tokens=64", "batch.global_batch_size=8", "batch.seq_len=16")
    words = [word for one in phase for word in ("--set", f"phase.0.{one}")]
    dry = ("run.toml", *words, "--set", "train.steps=5")
    found = answered(train(home, *dry, "--dry-run", "--json", "-"))
    planned = answered(mtcli("plan", *dry, "--device", "cpu", "--json", "-", folder=home))
    assert found["phases"] == planned["phases"] and [p["steps"] for p in found["phases"]] == [2, 3]
    assert found["seconds"] == sum(phase["seconds"] for phase in planned["phases"])
    assert found["tokens"] == 2 * 32 + 3 * 128
    assert tuple(found["batch"].values())[:3] == (0, 4, 32)
    assert "phase 1 steps 3 to 5, 384 tokens" in train(home, *dry, "--dry-run").stdout
    stop = ("run.toml", *words, "--set", "train.steps=2")
    assert train(home, *stop, "--set", "train.output=cut").returncode == 0
    on = ("cut", "--resume", "--set", "train.steps=5", "--dry-run", "--json", "-")
    resumed = answered(train(home, *on))
    assert [phase["steps"] for phase in resumed["phases"]] == [3]
    assert resumed["plan"]["step_seconds"] == planned["phases"][1]["step_seconds"]
    data = Batches([str(home / "data")], "80,20,0", "train", 24, 16, 7, None, 8, [4])
    documents = sum(len(set(data.documents(8 + i, 1)[0, :-1].tolist())) for i in range(8))
    assert tuple(resumed["batch"].values()) == (8, 8, 128, 0, 128, documents, None)


def test_the_first_batch_of_conversations_shows_losses_padding_and_text(home):
    lines = [{"prompt": "ab", "completion": "c" * n} for n in (1, 2, 3, 4)]
    (home / "my.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sets = [
        "data.train=my.jsonl",
        "data.format=conversations",
        "data.split=1,0,0",
        "data.tokenizer=bytes",
        "train.steps=1",
    ]
    sets += ["model.vocab_size=257", "batch.seq_len=16", "optimizer.warmup_steps=0"]
    words = [word for one in sets for word in ("--set", one)]
    before = files(home)
    found = answered(train(home, "run.toml", *words, "--dry-run", "--json", "-", fault=keeping_all))
    assert files(home) == before  # no cache of the examples
    # an example is its prompt, its completion and an end of 1 token; a row holds 17 of the 22
    tokens = sum(2 + len(line["completion"]) + 1 for line in lines)
    batch = found["batch"]
    assert batch["labels"] == tokens - 2 * len(lines)
    assert batch["documents"] == len(lines)
    # the last of a row's tokens is predicted alone
    assert batch["tokens"] + batch["padding"] == BATCH * 16 and batch["padding"] > 2 * 16
    assert batch["text"].startswith("ab")


def test_a_dry_run_finds_what_a_run_would(home):
    assert train(home, "run.toml").returncode == 0
    again = answered(train(home, "run.toml", "--dry-run", "--json", "-"), code=2)
    assert not again["ok"] and "already holds a run" in again["problems"][0]["message"]
    tokens = np.memmap(home / "data.bin", np.uint16, "r+")
    tokens[:] = tokens[::-1].copy()
    tokens.flush()
    longer = ("--resume", "--set", f"train.steps={STEPS + 1}")
    done = train(home, "run", *longer, "--dry-run")
    assert done.returncode == 2 and "and the run was trained on" in done.stderr
    few = ("--set", "train.output=new", "--set", "model.vocab_size=50")
    done = train(home, "run.toml", *few, "--dry-run")
    assert done.returncode == 2 and "vocab_size=50 takes 0 to 49" in done.stderr


def test_a_run_answers_in_json_what_it_did(home):
    settings = ("--set", "train.save_every=2", "--nproc", "2")
    done = train(home, "run.toml", *settings, "--json", "-")
    rows = metrics(home / "run")
    found = answered(done)
    assert done.outputs[1] == "" and "layout 2 ranks" in done.errors[0]
    assert (found["ok"], found["dry_run"], found["run"]) == (True, False, "run")
    assert (found["steps"], found["step"], found["world"]) == (STEPS, STEPS, 2)
    assert found["loss"]["last"] == rows[-1]["loss"] != rows[0]["loss"] == found["loss"]["first"]
    assert found["tokens"] == STEPS * BATCH * SEQ_LEN
    assert [save["step"] for save in found["saves"]] == [2, 3]
    assert (home / found["checkpoint"]).name == f"step-{STEPS:08d}"
    assert (home / found["checkpoint"] / "manifest.json").exists()
    shown = json.loads(mtcli("profile", "run", "--json", "-", folder=home).stdout)
    assert {key: shown[key] for key in shown.keys() & found.keys()} == {
        key: found[key] for key in shown.keys() & found.keys()
    }


def test_a_finished_run_and_a_file_have_the_answer_too(home):
    done = train(home, "run.toml", "--json", "did.json")
    assert done.returncode == 0 and done.stdout.startswith("model  gpt")
    first = json.loads((home / "did.json").read_text())
    done = train(home, "run", "--resume", "--json", "-")
    assert "nothing to do" in done.stderr and answered(done) == first


def test_a_fault_of_a_worker_is_answered_once(home):
    few = ("--set", "model.vocab_size=50", "--nproc", "2")
    done = launched("train", "run.toml", *few, "--json", "-", folder=home)
    (problem,) = answered(done, code=2)["problems"]
    assert "vocab_size=50 takes 0 to 49" in problem["message"] and problem["hint"]


def test_a_run_that_is_stopped_answers_too(home):
    done = train(home, "run.toml", "--json", "-", fault=stopped_at_once)
    found = answered(done, code=130)
    assert found["step"] == 1 and found["steps"] == 1 and found["checkpoint"].endswith("0001")


def stopped_at_once(rank):
    from mtcli.core.runtime import launch

    init = launch.StopSignal.__init__

    def told(self):
        init(self)
        self.received = 15

    launch.StopSignal.__init__ = told
