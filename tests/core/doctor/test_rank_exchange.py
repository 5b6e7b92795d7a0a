"""The exchange of ranks: sums that are right, sums that are not, processes that do not answer."""

import json
import sys
from pathlib import Path

import pytest
from ranks import run_ranks

from mtcli.core.config.errors import MtcliError
from mtcli.core.doctor import rank_exchange
from mtcli.core.doctor.rank_exchange import exchange_among, exchange_of_new_ranks


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_sum_what_all_of_them_have(ranks):
    found = run_ranks(ranks, exchange_among)
    assert [one.state for one in found] == ["ok"] * ranks and len({one.found for one in found}) == 1
    if ranks > 1:
        assert found[0].found.startswith(f"{ranks} ranks by shared memory sum 4,09")
        moved = [count for count, seconds in found[0].numbers["all_reduce"] if 1e-7 < seconds < 60]
        assert moved == [size // 4 // ranks * ranks * 4 for size in (2**12, 2**20, 2**23)]


def _exchange_with_a_fault(runtime):
    exact = rank_exchange.all_reduce

    def wrong(x, axis, *rest):
        total = exact(x, axis, *rest)
        if x.numel() > 1 and runtime.rank == 1:
            total[7] *= 1.01
        return total

    rank_exchange.all_reduce = wrong
    with pytest.raises(MtcliError) as caught:
        exchange_among(runtime)
    return str(caught.value), caught.value.code


def test_a_wrong_sum_of_one_rank_is_an_error_of_all():
    for text, code in run_ranks(2, _exchange_with_a_fault):
        assert text.startswith("error: 1 of 200,006 sums of 2 ranks are wrong") and code == 1


@pytest.fixture
def instead(tmp_path, monkeypatch):
    """Has a program stand for Python, which would start ranks."""

    def planted(body):
        program = Path(tmp_path / "python")
        program.write_text(f"#!{sys.executable}\nimport json, os, sys, time\n{body}\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))

    return planted


def test_the_diagnosis_is_what_the_new_ranks_answer(instead, monkeypatch):
    line = {"name": "exchange", "state": "ok", "found": "3 ranks", "numbers": {"ranks": 3}}
    answer = {"ok": True, "problems": [], "checks": [line | {"fix": ""}]}
    instead(f"open('words', 'w').write(json.dumps(sys.argv[1:])); print({json.dumps(answer)!r})")
    monkeypatch.chdir(Path(sys.executable).parent)
    assert exchange_of_new_ranks(3, 0, "auto") == ("ok", "3 ranks", {"ranks": 3}, "")
    words = "-m mtcli doctor --only exchange --nproc 3 --device cpu --json -"
    assert json.loads(Path("words").read_text()) == words.split()


@pytest.mark.parametrize(
    ("gpus", "device", "chosen"),
    [(2, "auto", "auto"), (1, "auto", "cpu"), (8, "cpu", "cpu"), (0, "cuda", "cuda")],
)
def test_ranks_compute_where_each_has_a_device(gpus, device, chosen, instead):
    instead("sys.exit(sys.argv[9])")
    assert exchange_of_new_ranks(2, gpus, device).found == f"2 ranks ended: {chosen}"


@pytest.mark.parametrize(
    ("body", "found", "fix"),
    [
        (
            "print(json.dumps({'ok': False, 'problems': [{'message': 'no', 'hint': 'do'}]}))",
            "no",
            "do",
        ),
        (
            "print(json.dumps({'ok': False, 'problems': [{'message': 'no', 'hint': ''}]}))",
            "no",
            "mtcli doctor --only exchange --nproc 2 --device cpu",
        ),
        ("sys.exit('killed')", "2 ranks ended: killed", "mtcli doctor --only exchange"),
        ("sys.exit(1)", "2 ranks ended: without a word", "mtcli doctor --only exchange"),
        (
            "print({name for name in os.environ if 'RANK' in name or 'SLURM' in name})\n"
            "sys.exit(os.environ.get('RANK', 'by hand'))",
            "2 ranks ended: by hand",
            "mtcli doctor",
        ),
    ],
)
def test_what_the_new_ranks_end_with_is_the_line(body, found, fix, instead, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    instead(body)
    diagnosis = exchange_of_new_ranks(2, 0, "auto")
    assert (diagnosis.state, diagnosis.found) == ("broken", found) and fix in diagnosis.fix


def test_ranks_that_do_not_end_are_ended(instead, monkeypatch):
    monkeypatch.setattr(rank_exchange, "LIMIT", 1.0)
    instead("time.sleep(1000)")
    diagnosis = exchange_of_new_ranks(2, 0, "auto")
    assert diagnosis.state == "broken" and diagnosis.found == "2 ranks did not end within 1 s"
