"""The state that a run captures and restores: bit for bit on its layout, through other layouts and
precisions, or refused. That the curve goes on on another layout is the parity table's claim."""

from dataclasses import replace

import pytest
import torch
from marks import slow, slow_cases
from ranks import run_ranks
from tiny import BIASED, DROPPING, GPT, LLAMA, MOE, run_config
from trained import checkpoint_of, save_to, train_and_save

from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.config.errors import MtcliError
from mtcli.core.config.loading import config_of as config_from
from mtcli.core.convert.layout import parse_layout
from mtcli.core.convert.to_mtcli import WriteOptions, to_mtcli
from mtcli.core.mesh.parameters import parameters
from mtcli.core.runtime.launch import Runtime
from mtcli.core.training.state import load_weights, require_same_run, resume
from mtcli.core.training.step import Trainer

TALL = {"micro_batch_size": 2}
STEPS, STOP = 8, 4
ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))
FROM = (2, {"tp": 2}, TALL)
GRID = (4, {"tp": 4, "tp_mode": "2d"}, TALL)
CHAINS = {  # by model: layouts that take a checkpoint over in turn
    "llama": (
        LLAMA,
        [
            GRID,
            (4, {"tp": 2, "zero": 3}, TALL),
            (4, {"tp": 4}, TALL),  # two ranks share each key-value head
            (4, {"pp": 2, "stage_layers": [1, 3], "zero": 1}, {}),
            (1, {}, {}),
        ],
    ),
    "experts": (
        BIASED,
        [
            (4, {"tp": 2, "pp": 2}, TALL),
            (4, {"cp": 2, "ep": 2, "etp": 2, "zero": 1}, {}),
            (4, {"ep": 4, "zero": 3}, {}),
            (2, {"etp": 2}, {}),
            (4, {"tp": 4, "tp_mode": "2d", "ep": 2}, TALL),
        ],
    ),
}


def config_of(model, layout, precision="fp32"):
    _, parallel, batch = layout
    train = {"steps": STEPS, "precision": precision, "matmul": "strict"}
    return run_config(model, parallel=parallel, batch=batch, train=train)


def train(*arguments):
    """The loss of each step of `train_and_save`."""
    return [step.loss for step in train_and_save(*arguments)]


def tensors(folder, step):
    checkpoint = checkpoint_of(folder, step)
    return {name: checkpoint.read(name) for name in checkpoint.names()}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(model, folder with a tp=2 run's step 4, the losses of the 8 steps, the final tensors)."""
    model, folder = GPT | DROPPING, tmp_path_factory.mktemp("run")
    whole = tmp_path_factory.mktemp("whole")
    losses = run_ranks(2, train, config_of(model, FROM), whole, 0, STEPS)[0]
    run_ranks(2, train, config_of(model, FROM), folder, 0, STOP)
    return model, folder, losses, tensors(whole, STEPS)


def test_a_checkpoint_holds_weights_and_moments_whole_and_without_padding(run):
    model, folder, _, _ = run
    table = parameters(run_config(model).model)
    found = {name: tuple(tensor.shape) for name, tensor in tensors(folder, STOP).items()}
    expected = {}
    for name, parameter in table.items():
        for key in ("", "optimizer.exp_avg/", "optimizer.exp_avg_sq/"):
            expected[key + name] = parameter.shape
    assert found == expected


def test_the_same_layout_goes_on_bit_for_bit(run, tmp_path):
    model, folder, losses, final = run
    again = run_ranks(2, train, config_of(model, FROM), folder, STOP, STEPS)[0]
    assert again == losses[STOP:]
    for name, tensor in tensors(folder, STEPS).items():
        assert torch.equal(tensor, final[name]), name


@slow("four runs of 4 ranks, 6 s")
def test_a_grid_in_bfloat16_has_float32_s_curve_to_rounding_and_goes_on_bit_for_bit(tmp_path):
    config = config_of(LLAMA, GRID, "bf16")
    whole = run_ranks(4, train, config, None, 0, STEPS)[0]
    run_ranks(4, train, config, tmp_path, 0, STOP)
    assert run_ranks(4, train, config, tmp_path, STOP, STEPS)[0] == whole[STOP:]
    exact = run_ranks(1, train, config_of(LLAMA, (1, {}, {})), None, 0, STEPS)[0]
    assert whole == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("name", ["experts", *slow_cases("3 s", "llama")])
def test_a_state_that_layouts_take_over_in_turn_keeps_every_bit(name, tmp_path):
    model, layouts = CHAINS[name]
    run_ranks(2, train, config_of(model, FROM), tmp_path / "0", 0, STOP)
    before = tensors(tmp_path / "0", STOP)
    assert any(name.startswith("optimizer.exp_avg_sq/") for name in before)
    for number, layout in enumerate(layouts):
        places = tmp_path / str(number), tmp_path / str(number + 1)
        run_ranks(layout[0], copy, config_of(model, layout), *places)
        after = tensors(places[1], STOP)
        assert before.keys() == after.keys()
        assert [n for n, x in before.items() if not torch.equal(x, after[n])] == [], layout


def copy(runtime, config, folder, to):
    trainer = Trainer(config, runtime)
    resume(trainer, checkpoint_of(folder, STOP))
    save_to(to, trainer)


@pytest.mark.parametrize("zero", [0, 3])
def test_sharded_masters_are_the_same_in_a_checkpoint_as_masters_beside_weights(zero, tmp_path):
    first, second = (config_of(LLAMA, (2, {"zero": z}, {}), "bf16") for z in (1, zero))
    run_ranks(2, train, first, tmp_path / "one", 0, STOP)
    run_ranks(2, copy, second, tmp_path / "one", tmp_path / "two")
    before, after = (tensors(tmp_path / name, STOP) for name in ("one", "two"))
    assert before.keys() == after.keys() and "optimizer.master/final_norm.weight" in after
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name


def test_bf16_goes_on_from_its_float32_masters_and_fp32_weights_become_masters(tmp_path):
    config = config_of(GPT, (1, {}, {}), "bf16")
    whole = run_ranks(1, train, config, tmp_path, 0, STEPS)[0]
    run_ranks(1, train, config, tmp_path, 0, STOP)
    saved = tensors(tmp_path, STOP)
    master = saved["optimizer.master/blocks.0.mlp.up.weight"]
    weight = saved["blocks.0.mlp.up.weight"]
    assert (master.dtype, weight.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(master.bfloat16(), weight) and not torch.equal(master, weight.float())
    assert run_ranks(1, train, config, tmp_path, STOP, STEPS)[0] == whole[STOP:]
    plain = config_of(GPT, (1, {}, {}))
    losses = run_ranks(1, train, plain, tmp_path / "plain", 0, STOP)[0]
    more = run_ranks(1, train, config, tmp_path / "plain", STOP, STEPS)[0]
    assert len(losses + more) == STEPS and more[-1] < losses[0]


@pytest.mark.parametrize(
    ("precision", "layout"), [("bf16", (2, {"zero": 3}, {})), ("fp16", FROM)], ids=str
)
def test_a_wider_precision_between_loses_nothing_of_a_narrow_run(precision, layout, tmp_path):
    """16 bits -> float32 -> 16 bits: float32 weights are the masters, which then come back."""
    narrow = config_of(MOE, layout, precision)
    run_ranks(layout[0], train, narrow, tmp_path / "a", 0, STOP)
    run_ranks(layout[0], copy, config_of(MOE, layout), tmp_path / "a", tmp_path / "b")
    alone = config_of(MOE, (1, {}, {}), precision)
    run_ranks(1, copy, alone, tmp_path / "b", tmp_path / "c")
    first, wide, last = (tensors(tmp_path / name, STOP) for name in "abc")
    masters = [name for name in first if name.startswith("optimizer.master/")]
    assert len(masters) == len(parameters(narrow.model)) and masters[0] not in wide
    for master in masters:
        weight = master.removeprefix("optimizer.master/")
        assert torch.equal(wide[weight], first[master]), weight
    assert first.keys() == last.keys()
    assert all(torch.equal(first[name], last[name]) for name in first)


def test_another_narrow_precision_rounds_the_masters_once(tmp_path):
    """A weight that bfloat16 holds may be two roundings from its master where one would do."""
    run_ranks(1, train, config_of(GPT, (1, {}, {}), "bf16"), tmp_path / "a", 0, STOP)
    run_ranks(1, copy, config_of(GPT, (1, {}, {}), "fp16"), tmp_path / "a", tmp_path / "b")
    first, last = tensors(tmp_path / "a", STOP), tensors(tmp_path / "b", STOP)
    for name in parameters(run_config(GPT).model):
        assert torch.equal(last[name], first[f"optimizer.master/{name}"].half()), name


@pytest.fixture(scope="module")
def biased(tmp_path_factory):
    """A folder with step 4 of a run with biases of experts."""
    folder = tmp_path_factory.mktemp("biased")
    run_ranks(1, train, config_of(BIASED, (1, {}, {})), folder, 0, STOP)
    names = tensors(folder, STOP)
    assert not [n for n in names if n.startswith("optimizer.") and "router.bias" in n]
    return folder


def test_the_rate_of_biases_may_change_and_not_whether_there_are_any(biased):
    checkpoint = checkpoint_of(biased, STOP)
    require_same_run(run_config(BIASED | {"router_bias_update_rate": 1e-9}), checkpoint)
    message = "model.router_bias_update_rate: it is 0.0, and the run was trained with 0.01"
    with pytest.raises(MtcliError, match=message):
        require_same_run(run_config(BIASED | {"router_bias_update_rate": 0.0}), checkpoint)


def test_a_model_without_biases_starts_one_with_them_at_zero_and_not_the_other_way(
    biased, tmp_path
):
    plain = BIASED | {"router_bias_update_rate": 0.0}
    run_ranks(1, train, config_of(plain, (1, {}, {})), tmp_path, 0, STOP)
    checkpoint = checkpoint_of(tmp_path, STOP)
    trainer = Trainer(config_of(BIASED, (1, {}, {})), ALONE)
    load_weights(trainer, checkpoint)
    for name, (_, tensor, _) in trainer.strategy.shards.items():
        stored = checkpoint.read(name) if trainer.table[name].trained else torch.zeros(8)
        stored = stored.flatten(0, -2) if stored.dim() > 1 else stored
        assert torch.equal(tensor[: len(stored)], stored), name
    with pytest.raises(MtcliError, match="has the tensor blocks.0.mlp.router.bias, and the model"):
        load_weights(Trainer(config_of(plain, (1, {}, {})), ALONE), checkpoint_of(biased, STOP))


CHANGES = [
    ({"seed": 8}, "seed: it is 8, and the run was trained with 7"),
    ({"optimizer": {"name": "lamb"}}, "optimizer.name: it is lamb, and the run was .* adamw"),
    ({"batch": {"seq_len": 4}}, "batch.seq_len: it is 4, and the run was trained with 8"),
    (
        {"batch": {"global_batch_size": 8}},
        "batch.global_batch_size: it is 8, and .* with 4",
    ),
    ({"data": {"document_mask": True}}, "data.document_mask: it is True, and the run .* False"),
    ({"data": {"document_positions": True}}, "data.document_positions: it is True, .* with False"),
    ({"data": {"loss_on": "last"}}, "data.loss_on: it is last, and the run was .* assistant"),
    ({"model": {"init_std": 0.5}}, "model.init_std: it is 0.5, and the run was trained with 0.02"),
]


def test_a_resumed_run_keeps_its_model_and_data_order(run):
    checkpoint = checkpoint_of(run[1], STOP)
    free = {"parallel": {"pp": 2}, "train": {"precision": "bf16"}, "optimizer": {"lr": 0.1}}
    require_same_run(run_config(run[0], **free), checkpoint)
    for change, message in CHANGES:
        table = run_config(run[0]).model_dump(exclude_none=True)
        for name, value in change.items():
            table[name] = table[name] | value if isinstance(value, dict) else value
        with pytest.raises(MtcliError, match=message) as caught:
            require_same_run(config_from(table), checkpoint)
        assert "--init, and another train.output" in str(caught.value)


def test_adamw_goes_on_as_muon_from_its_mean_and_muon_as_adamw_afresh(run, tmp_path, capsys):
    muon = {"optimizer": {"name": "muon", "lr": 3e-3}}
    config, checkpoint = run_config(run[0], **muon), checkpoint_of(run[1], STOP)
    require_same_run(config, checkpoint)
    trainer = Trainer(config, ALONE)
    resume(trainer, checkpoint)
    assert "muon's momentum begins from exp_avg" in capsys.readouterr().err
    assert trainer.optimizer.updates == STOP
    means = {name for name, p in trainer.table.items() if p.matrices}
    assert means and not means & {*trainer.optimizer.moments["exp_avg_sq"]}
    for name in means:
        stored = checkpoint.read(f"optimizer.exp_avg/{name}")
        momentum = trainer.optimizer.moments["exp_avg"][name]
        assert torch.equal(momentum, stored.view_as(momentum)), name
        assert stored.any()
    run_ranks(1, train, config, tmp_path, 0, STOP)
    checkpoint = checkpoint_of(tmp_path, STOP)
    trainer = Trainer(config_of(run[0], (1, {}, {})), ALONE)
    resume(trainer, checkpoint)
    assert "adamw's moments begin at zero" in capsys.readouterr().err
    assert trainer.optimizer.updates == 0
    assert not any(x.any() for kind in trainer.optimizer.moments.values() for x in kind.values())


def test_a_change_of_muons_steps_is_told(run, tmp_path, capsys):
    config = run_config(run[0], optimizer={"name": "muon"})
    run_ranks(1, train, config, tmp_path, 0, STOP)
    other = run_config(run[0], optimizer={"name": "muon", "scale": "spectral"})
    resume(Trainer(other, ALONE), checkpoint_of(tmp_path, STOP))
    told = "optimizer.scale was 'match_adamw' and is 'spectral': steps have another size"
    assert told in capsys.readouterr().err


def test_counters_that_make_no_sense_are_a_damaged_checkpoint(run):
    trainer = Trainer(config_of(run[0], (1, {}, {})), ALONE)
    for extra, message in (
        ({"updates": -1}, "extra.updates: Input should be greater than or equal to 0"),
        ({"loss_scale": {"scale": 0.5, "good_steps": 0, "patience": 1}}, "extra.loss_scale.scale"),
        ({"loss_scale": {"scale": 2.0}}, "extra.loss_scale.good_steps: Field required"),
    ):
        checkpoint = replace(checkpoint_of(run[1], STOP), extra=extra)
        with pytest.raises(MtcliError, match="is damaged: ") as caught:
            resume(trainer, checkpoint)
        assert message in str(caught.value)


def test_updates_are_those_the_checkpoint_counts_or_its_steps(run):
    checkpoint = checkpoint_of(run[1], STOP)
    trainer = Trainer(config_of(run[0], (1, {}, {})), ALONE)
    resume(trainer, replace(checkpoint, extra={}))  # as by older versions
    assert trainer.optimizer.updates == STOP
    resume(trainer, replace(checkpoint, extra={"updates": 3, "of a later version": 1}))
    assert (trainer.optimizer.updates, trainer.step) == (3, STOP)


@pytest.mark.parametrize(
    ("model", "world", "text"),
    [
        (LLAMA, 4, "pp=2,dp=2,zero=1"),
        (BIASED, 4, "cp=2,dp=2,ep=2,etp=2,zero=1"),
        (BIASED, 2, "dp=2,zero=0"),
        (LLAMA, 8, "tp=4,tp_rows=2,dp=2,zero=1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_conversion_cuts_as_a_run_of_that_layout_does(tmp_path, model, world, text):
    sizes = {axis: int(size) for axis, size in (item.split("=") for item in text.split(","))}
    sizes.pop("dp", None)
    sizes |= {"tp_mode": "2d"} if "tp_rows" in sizes else {}
    batch = {"micro_batch_size": sizes.get("tp_rows", 2), "global_batch_size": 8}
    config = config_of(model, (world, sizes, batch))
    run_ranks(world, train, config, tmp_path, 0, 0)
    saved = checkpoint_of(tmp_path, 0)
    to_mtcli(saved, tmp_path / "whole", *parse_layout("zero=0"), WriteOptions())
    to_mtcli(
        open_checkpoint(tmp_path / "whole"), tmp_path / "cut", *parse_layout(text), WriteOptions()
    )
    cut = open_checkpoint(tmp_path / "cut")
    assert regions(cut) == regions(saved)
    assert any(len(found) > 1 for found in regions(cut).values()) == (
        sizes.get("zero", 0) > 0 or sizes.get("tp_rows", 1) > 1
    )


def regions(checkpoint):
    return {
        name: sorted((box.file, box.box) for box in stored.boxes)
        for name, stored in checkpoint.tensors.items()
    }
