"""What a run says of its progress: lines where there is no terminal, a bar where there is one."""

import re
from types import MappingProxyType

import pytest
import torch
from tiny import LLAMA, run_config
from torch._subclasses.fake_tensor import FakeTensorMode

from mtcli.core.runtime.launch import Runtime
from mtcli.core.training import metrics, run_log
from mtcli.core.training.metrics import StepFacts
from mtcli.core.training.run_log import RunLog
from mtcli.core.training.step import Step
from mtcli.core.training.validation_sets import SetLosses
from mtcli.kernels import autotune

ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))
ONE_SET, NO_TASKS = MappingProxyType({"": 3.25}), MappingProxyType({})
LINE = re.compile(r"step (\d+)/20( [a-z_/]+ [\d.:e%+-]+)+")


@pytest.fixture
def told(tmp_path, monkeypatch, capsys):
    """Makes 20 steps of 2 seconds by a clock, and gives what is said on stderr."""

    def steps(log_every=1, is_terminal=False, validated=(), sets=ONE_SET, tasks=NO_TASKS):
        clock = [100.0]
        monkeypatch.setattr(run_log, "monotonic", lambda: clock[0])
        monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
        monkeypatch.setattr(metrics, "run_peak_flops", lambda *_: 1e8)
        train = {"steps": 20, "log_every": log_every, "output": str(tmp_path / "run")}
        log = RunLog(run_config(train=train), True, 0)
        log.begin(ALONE, {})
        for number in range(1, 21):
            clock[0] += 2.0
            valid = SetLosses(sets, {}, None) if number in validated else None
            facts = StepFacts(4 * number, valid, 0, None, tasks=tasks.get(number, {}))
            step = Step(number, 2.0 / number, 1e-3, 0.5, 0.1, 1.0, "updated", tokens=32)
            log.step(step, facts)
        log.close()
        return capsys.readouterr().err

    return steps


def test_without_a_terminal_there_is_a_line_now_and_then_and_at_the_end(told):
    lines = told().splitlines()
    assert all(LINE.fullmatch(line) for line in lines)
    numbers = [int(LINE.fullmatch(line)[1]) for line in lines]
    assert numbers == [1, 4, 7, 10, 13, 16, 19, 20], "every 5 s of steps of 2 s, and the last"
    assert (
        "loss 0.1053 grad_norm 0.5 tokens/s 320 mfu " in lines[-2] and "left 0:00:02" in lines[-2]
    )


def test_lines_are_of_steps_that_are_logged_and_of_validations(told):
    lines = told(log_every=10, validated=(3,)).splitlines()
    assert [int(LINE.fullmatch(line)[1]) for line in lines] == [3, 10, 20]
    assert "loss 0.6667 valid 3.2500 grad_norm" in lines[0]


def test_a_line_has_each_validation_set_and_the_first_figure_of_each_task(told):
    figures = {"eval/race/accuracy": 0.25, "eval/race/high": 0.5, "eval/wic/accuracy": 0.75}
    tasks = {3: figures, 7: figures}
    lines = told(log_every=20, validated=(3,), sets={"wiki": 3.0, "code": 2.0}, tasks=tasks)
    lines = lines.splitlines()
    assert [int(LINE.fullmatch(line)[1]) for line in lines] == [3, 7, 20]
    assert "valid 2.5000 wiki 3.0000 code 2.0000 race 0.2500 wic 0.7500 grad_norm" in lines[0]
    assert "valid" not in lines[1] and "loss 0.2857 race 0.2500 wic 0.7500 grad_norm" in lines[1]


def test_on_a_terminal_80_columns_show_what_matters_first(told, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = told(is_terminal=True, validated=(20,)).split("\r")[-1]
    assert re.search(r"100% 20/20 .* loss 0.1000 valid 3.2500 grad_norm 0.5", shown), shown
    assert "step 20/20" not in shown


CUDA = torch.device("cuda")
HEADED = LLAMA | {"hidden_size": 64, "num_heads": 4}


@pytest.mark.parametrize(
    ("model", "sections", "line"),
    [
        (HEADED, {}, "cuDNN"),
        (HEADED, {"data": {"document_mask": True}}, "FlashAttention of packed documents"),
        (HEADED, {"data": {"document_mask": True}, "train": {"compile": True}},
         "mtcli's kernel for documents"),
        (HEADED | {"attention_softcap": 9.0}, {"data": {"document_mask": True}},
         "mtcli's kernel for documents, a soft cap"),
        (HEADED | {"window": 4}, {}, "cuDNN, mtcli's kernel for windows"),
        (HEADED | {"attention_softcap": 9.0}, {}, "mtcli's kernel for a soft cap"),
        (HEADED | {"attention_dropout": 0.1}, {},
         "mtcli's masked softmax, with dropout of probabilities"),
        (HEADED, {"parallel": {"cp": 2}}, "cuDNN"),
    ],
)  # fmt: skip
def test_a_run_on_a_gpu_says_what_computes_attention(monkeypatch, model, sections, line):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(autotune, "device_facts", lambda device: None)
    monkeypatch.setattr(autotune, "device_name", lambda device: "a GPU that is not there")
    autotune._measured.cache_clear()
    asked = []

    def choose(q, k, v, **options):
        asked.append((q.shape, k.shape, options))
        return torch._C._get_sdp_priority_order()[0]

    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    train = {"precision": "bf16", "device": "cuda"} | sections.get("train", {})
    config = run_config(model, **sections | {"train": train})
    with FakeTensorMode():
        assert run_log.describe_attention(config, CUDA) == {"sdpa": line}
    for q, k, options in asked:
        assert (q[1], k[1], options["enable_gqa"]) == (4, 2, True)


def test_on_a_cpu_nothing_is_said_of_attention():
    assert run_log.describe_attention(run_config(), torch.device("cpu")) == {}
