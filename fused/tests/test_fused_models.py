"""The paper's kinds of model end to end, and the benchmark that measures them."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from alone import assert_same_gradients, assert_same_state, made
from torch.func import vmap
from torch.utils._pytree import tree_map

import mtcli_fused as fused

FOLDER = Path(__file__).parents[1]
B, STEPS = 3, 4
LRS = [0.1, 0.02, 0.05]


@pytest.fixture
def cases(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER / "benchmarks"))
    from fused_cases import TINY

    return TINY


def batches(case):
    torch.manual_seed(1)
    for _ in range(STEPS):
        stacked = tree_map(lambda *xs: torch.stack(xs), *[case.batch() for _ in range(B)])
        yield tree_map(lambda x: x.double() if x.is_floating_point() else x, stacked)


@pytest.mark.parametrize("name", ["pointnet", "dcgan", "resnet", "transformer", "bert"])
def test_a_model_of_the_paper_trains_and_evaluates_as_it_does_alone(cases, name):
    case = cases[name]
    models = made(case.model)
    array = fused.fuse(models, positions=case.positions)
    optimizer = fused.SGD(array, lr=LRS, momentum=0.9)
    losses = []
    for inputs, targets in batches(case):
        optimizer.zero_grad()
        each = vmap(case.loss)(array(*inputs), targets)
        each.sum().backward()
        fused.clip_grad_norm_(array, 1.0)
        optimizer.step()
        losses.append(each.detach())
    outputs = array.eval()(*inputs)
    for b, model in enumerate(models):
        alone = torch.optim.SGD(model.parameters(), lr=LRS[b], momentum=0.9)
        for step, (inputs, targets) in enumerate(batches(case)):
            alone.zero_grad()
            loss = case.loss(model(*(x[b] for x in inputs)), targets[b])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            alone.step()
            torch.testing.assert_close(losses[step][b], loss.detach(), rtol=1e-9, atol=1e-9)
        expected = model.eval()(*(x[b] for x in inputs))
        found = tree_map(lambda y, b=b: y[b], outputs)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
    assert_same_gradients(array, models, rtol=1e-8, atol=1e-8)
    for one, model in zip(fused.unfuse(array.train()), models, strict=True):
        assert_same_state(one, model.train())


def test_the_example_of_the_page_runs_and_ends_with_its_models():
    page = (FOLDER.parent / "docs" / "concepts" / "fused.md").read_text()
    names = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    assert len(names["nets"]) == 4 and type(names["nets"][0][0]) is torch.nn.Conv2d
    assert names["optimizer"].counts == [5] * 4 and names["losses"].shape == (4,)


@pytest.mark.parametrize(
    ("flags", "rows"),
    [
        ([], 5 * 3),
        pytest.param(
            ["--only", "bert", "--sizes", "2", "--compiled", "2", "--plot"],
            5,
            marks=pytest.mark.slow("two traces of 2 s and a picture"),
        ),
    ],
    ids=["as make bench-gpu starts it", "compiled, with a picture"],
)
def test_the_benchmark_runs_on_a_cpu_and_the_losses_of_all_contenders_agree(
    cases, tmp_path, monkeypatch, flags, rows
):
    """A compiled contender is traced as always, and run as it is written."""
    import bench_fused_models

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    picture = tmp_path / "fused.png"
    small = ["--device", "cpu", "--tiny", "--repeats", "1", "--output", str(tmp_path)]
    words = [*small, "--budget", "300", *flags, *([str(picture)] if "--plot" in flags else [])]
    monkeypatch.setattr(sys, "argv", ["bench_fused_models.py", *words])
    bench_fused_models.main()
    found = json.loads((tmp_path / "fused-tiny-cpu.json").read_text())["rows"]
    assert len(found) == rows
    assert all(row["agrees"] and row["per_s"] > 0 and row["peak_mib"] >= 0 for row in found)
    assert "--plot" not in flags or picture.stat().st_size > 10_000
