"""Models with weights in bfloat16 or int8 compute what transformers does, in float64, with the
numbers that the weights are rounded to."""

import copy

import pytest
import torch
from ranks import run_ranks
from test_batching import KINDS, greedy_of
from transformers import AutoConfig, AutoModelForCausalLM

from mtcli.core.config.errors import MtcliError
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.rules import forward_config, require_stored
from mtcli.core.inference.generate import generate
from mtcli.core.inference.model import open_model
from mtcli.core.inference.token_choice import Sampling
from mtcli.core.model.inputs import KVCache
from mtcli.core.runtime.launch import Runtime
from mtcli.kernels.stored_weight import StoredWeight

ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))
AS_THEY_ARE = ("wpe", "mlp.gate.weight", "router")  # position tables, routers
SHAPES = ((1, 5), (4, 11))  # rows, tokens: of torch's int8 GEMM, and of blocks


@pytest.fixture(scope="module", params=["gpt2", "llama", "deepseek_v3", "qwen3_moe"])
def model(request, tmp_path_factory):
    """(transformers' model, its folder)."""
    torch.manual_seed(6)
    config = AutoConfig.for_model(request.param, **KINDS[request.param])
    config.initializer_range, config.pad_token_id, config.eos_token_id = 0.3, None, None
    eager = {"attn_implementation": "eager"}
    if request.param.endswith(("_v3", "_moe")):
        eager["experts_implementation"] = "eager"
    made = AutoModelForCausalLM.from_config(config, **eager).eval()
    folder = tmp_path_factory.mktemp(request.param)
    made.save_pretrained(folder)
    return made, str(folder)


def rounded(model, weights):
    """The model in float64, with the numbers of narrow weights."""
    made = copy.deepcopy(model).double()
    for name, weight in made.named_parameters():
        if weight.dim() > 1 and not any(word in name for word in AS_THEY_ARE):
            transposed = "c_" in name  # GPT-2's channels are columns
            w = weight.data.T if transposed else weight.data
            if weights == "bf16":
                w.copy_(w.to(torch.bfloat16))
            else:
                scale = (w.abs().amax(-1, keepdim=True).float() / 127).to(torch.bfloat16).double()
                w.copy_(torch.round(w / scale) * scale)
    return made


def tokens_of(b, s):
    return torch.randint(97, (b, s), generator=torch.Generator().manual_seed(s))


def logits(runtime, folder, overrides, weights, exactly=False):
    """The logits of each shape; `exactly` multiplies stored numbers in float64."""
    scorer = open_model(folder, overrides, runtime, weights=weights).scorer
    if exactly:
        StoredWeight.linear = exact_linear
    return [
        scorer.next_logits(tokens_of(b, s), torch.arange(s).repeat(b, 1), KVCache()).tolist()
        for b, s in SHAPES
    ]


def exact_linear(stored, x, bias=None):
    numbers = (stored.values if stored.packed is None else stored.packed.to_dense()).double()
    if stored.scales is not None:
        numbers = numbers * stored.scales.double()[:, None]
    y = x.double() @ numbers.T
    return (y if bias is None else y + bias).float()


def expected_of(made):
    with torch.no_grad():
        return [made(tokens_of(*shape)).logits[:, -1] for shape in SHAPES]


def errors_of(found, made):
    """The errors of logits, in proportion."""
    pairs = zip(map(torch.tensor, found), expected_of(made), strict=True)
    return [float((one.double() - other).norm() / other.norm()) for one, other in pairs]


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_logits_are_those_of_the_rounded_weights(model, weights, monkeypatch):
    made, folder = model
    monkeypatch.setattr(StoredWeight, "linear", StoredWeight.linear)  # restores it
    expected = rounded(made, weights)
    # activations are rounded to bfloat16, 1/512 at most, ahead of each GEMM
    assert max(errors_of(logits(ALONE, folder, (), weights), expected)) < 0.02
    exactly = logits(ALONE, folder, (), weights, True)
    assert max(errors_of(exactly, expected)) < 1e-5
    assert min(errors_of(exactly, made.double())) > 1e-3, "not those of the weights as they were"


LAYOUTS = {"gpt2": ["tp=2", "pp=2"], "llama": ["tp=4"], "deepseek_v3": ["tp=2", "ep=2", "etp=1"],
           "qwen3_moe": ["tp=2", "etp=2"]}  # fmt: skip


@pytest.mark.parametrize("weights", ["bf16", "int8"])
@pytest.mark.parametrize("model", LAYOUTS, indirect=True)
def test_every_layout_has_the_same_weights(model, weights, request):
    made, folder = model
    axes = LAYOUTS[request.node.callspec.params["model"]]
    axes = [f"parallel.{axis}" for axis in axes]
    expected = rounded(made, weights)
    for found in run_ranks(4, logits, folder, axes, weights, True):
        assert max(errors_of(found, expected)) < 1e-5


def test_packed_weights_give_transformers_tokens_and_logits(model):
    made, folder = model
    scorer = open_model(folder, (), ALONE, weights="fp32").scorer
    stored = [m for stage in scorer.stages.values() for m in stage.modules()
              if isinstance(getattr(m, "weight", None), StoredWeight)]  # fmt: skip
    assert len(stored) >= 5 and all(m.weight.packed is not None for m in stored)
    assert max(errors_of(logits(ALONE, folder, (), "fp32"), made.double())) < 1e-5
    prompt = tokens_of(1, 7)[0].tolist()
    assert generate(scorer, prompt, 9, Sampling(), ()) == greedy_of(made.float(), prompt)


@pytest.mark.parametrize("overrides", [["train.precision=fp64"], ["train.precision=bf16"], []])
def test_weights_of_another_precision_are_not_packed(model, overrides):
    scorer = open_model(model[1], overrides, ALONE, weights="fp32").scorer
    assert scorer.weights == (None if overrides else "fp32")


@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8"])
def test_a_stored_weight_that_is_not_finite_is_named(model, weights, tmp_path):
    made, _ = model
    made = copy.deepcopy(made).float()
    made.get_output_embeddings().weight.data[3, 2] = float("nan")
    made.save_pretrained(tmp_path)
    scorer = open_model(str(tmp_path), (), ALONE, weights=weights).scorer
    with pytest.raises(MtcliError, match=r"the weight (head|embedding)\.weight has NaN"):
        generate(scorer, [3, 4], 3, Sampling(), ())


def test_other_precisions_and_grids_are_refused_at_once():

    sizes = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_heads": 4,
        "vocab_size": 97,
        "max_seq_len": 24,
    }
    given = ["parallel.tp=4", "parallel.tp_mode=2d", "train.precision=bf16"]
    config = forward_config(ModelConfig(**sizes), given, 4)
    with pytest.raises(MtcliError) as error:
        require_stored("int8", config, "cuda")
    said = str(error.value)
    assert "train.precision='bf16'" in said and "parallel.tp_mode=1d" in said
    assert "the device is cuda" in said and said.count("hint:") == 3
    require_stored("fp32", config, "cuda")
