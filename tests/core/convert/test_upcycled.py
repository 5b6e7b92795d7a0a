"""Mixtures of experts out of dense checkpoints: transformers and the dense model are the oracles.

The tiny models' MLPs are 20 wide, so that granularities of 2, 4 and 5 cut them.
"""

import subprocess
import sys
from dataclasses import replace
from math import prod

import pytest
import torch
from marks import slow
from safetensors.torch import load_file
from saving import save_halves, values
from tiny import GPT

from mtcli.core.checkpoint.compatibility import require_model
from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.checkpoint.safetensors_file import damaged
from mtcli.core.config.errors import MtcliError
from mtcli.core.config.loading import dump_toml
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import RunConfig
from mtcli.core.convert.layout import parse_layout
from mtcli.core.convert.to_huggingface import to_hf
from mtcli.core.convert.to_mtcli import WriteOptions, to_mtcli
from mtcli.core.convert.upcycle import rounding, upcycled
from mtcli.core.convert.upcycle_recipe import recipe_of
from mtcli.core.convert.verify import differences, logit_difference, tolerance
from mtcli.core.mesh.parameters import parameters
from mtcli.core.mesh.sharding import Box

WHOLE = "num_experts=4,top_k=2"
SLICES = "num_experts=12,top_k=8,granularity=4"
THIRDS = "num_experts=6,top_k=6,granularity=3"
PLAIN = ModelConfig(**GPT | {"num_layers": 2, "ffn_hidden_size": 60}, bias=False)  # GELU


def mixture(folder, text):
    """A dense folder seen as a mixture of experts."""
    dense = open_checkpoint(folder)
    return upcycled(dense, recipe_of(text, dense.model))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A dense checkpoint of ours without biases, with an optimizer, at step 3."""
    tensors = {name: 0.3 * tensor for name, tensor in values(PLAIN).items()}
    config = dump_toml(RunConfig(model=PLAIN))
    root = tmp_path_factory.mktemp("plain")
    return save_halves(root, 3, tensors=tensors, config_toml=config)[0]


@pytest.mark.parametrize(
    ("name", "text"), [("llama", WHOLE), ("llama-tied", SLICES), ("mistral", SLICES)]
)
def test_transformers_mixtral_gives_the_logits_of_the_dense_model(
    hf_folders, hf_models, tmp_path, name, text
):
    from transformers import AutoModelForCausalLM

    to_hf(mixture(hf_folders[name], text), tmp_path / "moe", 10_000, WriteOptions())
    how = {"output_loading_info": True, "experts_implementation": "eager"}  # any width
    model, told = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", **how)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model).__name__ == "MixtralForCausalLM"
    ids = torch.arange(2 * 17).view(2, 17) % 51
    with torch.no_grad():
        expected, found = hf_models[name](ids).logits, model.eval()(ids).logits
    assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())


@pytest.mark.parametrize(
    ("text", "score"), [(WHOLE, "sigmoid"), (SLICES, "softmax"), (THIRDS, "sigmoid")]
)
def test_our_own_forward_gives_the_logits_of_the_dense_model(plain, tmp_path, text, score):
    found = mixture(plain, f"{text},router_score={score}")
    to_mtcli(found, tmp_path / "moe", *parse_layout("tp=2,dp=2,ep=2"), WriteOptions())
    apart, largest = logit_difference(open_checkpoint(plain), open_checkpoint(tmp_path / "moe"))
    assert apart <= tolerance(largest, None, resummed=PLAIN.num_layers) < 1e-5 * largest


def test_experts_are_slices_of_the_mlp_and_a_virtual_group_shares_its_router_row(hf_folders):
    found = mixture(hf_folders["llama"], SLICES)
    dense = load_file(hf_folders["llama"] / "model.safetensors")
    for layer in range(2):
        mlp = {kind: dense[f"model.layers.{layer}.mlp.{kind}_proj.weight"] for kind in KINDS}
        gate_up = found.read(f"blocks.{layer}.mlp.experts.gate_up.weight")
        down = found.read(f"blocks.{layer}.mlp.experts.down.weight")
        router = found.read(f"blocks.{layer}.mlp.router.weight")
        assert (gate_up.shape, down.shape, router.shape) == ((12, 2, 5, 24), (12, 24, 5), (12, 24))
        for expert in range(12):
            part = slice(5 * (expert % 4), 5 * (expert % 4) + 5)
            assert torch.equal(gate_up[expert, 0], mlp["gate"][part])
            assert torch.equal(gate_up[expert, 1], mlp["up"][part])
            assert torch.equal(down[expert], 4 * mlp["down"][:, part])
            assert torch.equal(router[expert], router[expert // 4 * 4])
        assert len(router.unique(dim=0)) == 3


KINDS = ("gate", "up", "down")


def test_the_router_is_the_one_that_a_new_model_of_the_seed_would_have(plain):
    from mtcli.core.runtime.launch import Runtime
    from mtcli.core.training.state import initialise
    from mtcli.core.training.step import Trainer

    found = mixture(plain, f"{WHOLE},seed=9")
    config = RunConfig(seed=9, model=found.model)
    trainer = Trainer(config, Runtime(0, 1, 0, 1, torch.device("cpu")))
    initialise(trainer)
    fresh = dict(trainer.stages[0].named_parameters())
    names = [name for name in fresh if ".router." in name]
    assert len(names) == PLAIN.num_layers
    for name in names:
        assert torch.equal(found.read(name), fresh[name].detach())
        assert not torch.equal(found.read(name), mixture(plain, WHOLE).read(name))


@pytest.mark.parametrize("text", [WHOLE, SLICES])
def test_any_box_is_that_part_of_the_whole(plain, text):
    found = mixture(plain, text)
    for name in found.names():
        whole = found.read(name)
        start = tuple(n // 3 for n in whole.shape)
        box = Box(start, tuple(max(1, n // 2) for n in whole.shape))
        assert torch.equal(found.read(name, box), whole[box.slices]), name
    with pytest.raises(MtcliError, match="and the box"):
        found.read("blocks.0.mlp.router.weight", Box((99, 0), (1, 1)))


@pytest.mark.parametrize("layout", ["tp=2,dp=2,ep=4", "pp=2,dp=3,etp=3"])
def test_what_is_written_does_not_depend_on_the_layout(plain, tmp_path, layout):
    found = mixture(plain, SLICES)
    to_mtcli(found, tmp_path / "moe", *parse_layout(layout), WriteOptions())
    assert not list(differences(found, open_checkpoint(tmp_path / "moe")))


def test_a_mixture_is_a_new_model_at_step_0_with_the_weights_dtype(plain, tmp_path):
    found = mixture(plain, WHOLE)
    to_mtcli(found, tmp_path / "moe", *parse_layout("dp=2,ep=2"), WriteOptions(torch.bfloat16))
    written = open_checkpoint(tmp_path / "moe")
    assert open_checkpoint(plain).step == 3
    assert (written.step, written.extra, written.model) == (0, {}, found.model)
    assert written.config.model == found.model
    assert set(written.names()) == set(parameters(found.model))  # so no optimizer state
    assert {written.dtype(name) for name in written.names()} == {torch.bfloat16}


def test_what_rounds_weights_is_a_cast_or_a_scale_that_is_no_power_of_2(plain):
    dense = open_checkpoint(plain)
    recipes = [recipe_of(text, dense.model) for text in (WHOLE, SLICES, THIRDS)]
    assert [rounding(dense, recipe, None) for recipe in recipes] == [None, None, torch.float32]
    for recipe in recipes:
        assert rounding(dense, recipe, torch.bfloat16) == torch.bfloat16


def test_a_dense_checkpoint_that_lacks_a_tensor_is_refused(plain):
    dense = open_checkpoint(plain)
    recipe = recipe_of(WHOLE, dense.model)
    name = "blocks.1.mlp.up.weight"
    lacking = {key: stored for key, stored in dense.tensors.items() if key != name}
    with pytest.raises(MtcliError, match=f"has no tensor {name}"):
        upcycled(replace(dense, tensors=lacking), recipe)


@pytest.mark.parametrize("text", [WHOLE, SLICES])
def test_a_dense_checkpoint_for_a_mixture_is_answered_with_the_way_there(plain, text):
    with pytest.raises(MtcliError) as error:
        require_model(open_checkpoint(plain), mixture(plain, text).model)
    hint = error.value.problems[-1].hint
    assert f"`mtcli shard {plain} DST --to mtcli --upcycle {text}`" in hint
    with pytest.raises(MtcliError, match="the checkpoint is of another model"):
        require_model(mixture(plain, text), mixture(plain, "num_experts=2,top_k=2").model)


def test_a_family_that_has_no_such_mixture_is_named_before_anything_is_written(
    hf_folders, tmp_path
):
    with pytest.raises(MtcliError, match="no Hugging Face family has this model"):
        to_hf(mixture(hf_folders["qwen2"], WHOLE), tmp_path / "moe", 10_000, WriteOptions())
    assert not list(tmp_path.iterdir())


def test_a_dense_file_that_cannot_be_read_leaves_nothing_half_written(plain, tmp_path):
    def fail(box):
        raise damaged(plain / "rank-00000.safetensors", "it ends at byte 7")

    found = mixture(plain, WHOLE)
    norm = found.tensors["final_norm.weight"]._replace(computed=fail)
    broken = replace(found, tensors=found.tensors | {"final_norm.weight": norm})
    with pytest.raises(MtcliError, match="it ends at byte 7"):
        to_mtcli(broken, tmp_path / "moe", *parse_layout(""), WriteOptions())
    assert not list(tmp_path.iterdir())


@slow("a process of 2.5 s")
def test_peak_memory_is_bounded_by_the_largest_tensor_and_not_by_the_model(tmp_path):
    layers, hidden, experts = 10, 256, 4  # 10 layers of 8.4 MB of experts, in tensors of 4.2 MB
    code = f"""
import resource, sys
from pathlib import Path
from mtcli.core.convert.to_mtcli import WriteOptions, to_mtcli
from mtcli.core.convert.layout import parse_layout
from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.convert.upcycle import upcycled
from mtcli.core.convert.upcycle_recipe import recipe_of
root = Path(sys.argv[1])
dense = open_checkpoint(root / "dense")
found = upcycled(dense, recipe_of("num_experts={experts},top_k=2", dense.model))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
to_mtcli(found, root / "moe", *parse_layout("tp=2,dp=1"), WriteOptions())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_heads": 4, "vocab_size": 100}
    model = ModelConfig(**sizes, max_seq_len=8, bias=False)
    tensors = {name: torch.zeros(p.shape) for name, p in parameters(model).items()}
    saved = save_halves(tmp_path, tensors=tensors, config_toml=dump_toml(RunConfig(model=model)))
    saved[0].rename(tmp_path / "dense")
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown = int(done.stdout) * 1024
    largest = 4 * prod((experts, 4 * hidden, hidden))
    assert 2 * layers * largest > 80e6
    assert grown < (8 << 20) + 6 * largest, f"{grown:,}"
