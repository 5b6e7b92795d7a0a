"""Generated text begins and ends where transformers' does, for the folders of every family.

A prompt gets what the tokenizer's template puts around it, and text ends at any of the ids of
generation_config.json, or of config.json where there is no such file.
"""

import json

import pytest
import torch
from tokenizers import processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.config.errors import MtcliError
from mtcli.core.convert.layout import parse_layout
from mtcli.core.convert.to_huggingface import to_hf
from mtcli.core.convert.to_mtcli import WriteOptions, to_mtcli
from mtcli.core.data.tokenize import Tokenizer, byte_tokenizer
from mtcli.core.inference.generate import generate
from mtcli.core.inference.model import open_model
from mtcli.core.inference.token_choice import Sampling
from mtcli.core.runtime.launch import Runtime

ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))
BEGIN, END, VOCAB = 257, 258, 259  # after the bytes and the end of a document
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 40}
FAMILIES = {
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 40},
    "llama": SIZES,
    "mistral": SIZES | {"sliding_window": 9},
    "qwen2": SIZES,
    "qwen3": SIZES
    | {"head_dim": 6, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "gpt_oss": SIZES
    | {"head_dim": 6, "sliding_window": 5, "num_local_experts": 3, "num_experts_per_tok": 2},
    "smollm3": SIZES | {"pad_token_id": None},
    "glm4": SIZES | {"pad_token_id": None, "head_dim": 8},
    "phi3": SIZES | {"pad_token_id": None, "sliding_window": 9},
    "gpt_neox": {name: size for name, size in SIZES.items() if "key" not in name}
    | {"hidden_size": 32},
    "falcon": SIZES | {"new_decoder_architecture": True, "num_kv_heads": 2},
    "mixtral": SIZES | {"num_local_experts": 2, "sliding_window": None},
    "qwen2_moe": SIZES
    | {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    | {"shared_expert_intermediate_size": 8},
}
TEMPLATES = {"none": None, "begins": "<s> $A", "begins and ends": "<s> $A </s>"}
PROMPT, COUNT = "The cat", 14


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    """A family's folder, without tokenizer or generation config."""
    torch.manual_seed(5)
    config = AutoConfig.for_model(request.param, vocab_size=VOCAB, **FAMILIES[request.param])
    config.initializer_range = 0.6
    made = tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(config).save_pretrained(made)
    (made / "generation_config.json").unlink()
    return made


def write_tokenizer(folder, template):
    backend = Tokenizer(byte_tokenizer().definition).backend
    backend.add_special_tokens(["<s>", "</s>"])
    if template:
        ids = [("<s>", BEGIN), ("</s>", END)]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"}).save(folder)


def write_ends(folder, config, generation):
    """Sets the ends that the two files name; `generation` is all of the second, or None: no file"""
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(table | {"eos_token_id": config}))
    path = folder / "generation_config.json"
    path.unlink(missing_ok=True)
    if generation is not None:
        path.write_text(json.dumps(generation))


def theirs(folder):
    """The ids that transformers gives after the prompt, which goes on and has no end, up to the one
    that ends them."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt").input_ids
    ids = ids[:, :-1] if ids[0, -1] == END else ids
    options = {"max_new_tokens": COUNT, "do_sample": False, "pad_token_id": 0}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    new, ends = found[0, ids.shape[1] :].tolist(), model.generation_config.eos_token_id
    return new[:-1] if new[-1] in (ends if isinstance(ends, list) else [ends]) else new


def ours(folder):
    model = open_model(str(folder), (), ALONE)
    prompt = model.require_tokenizer().encode_prompt(PROMPT)
    return generate(model.scorer, prompt, COUNT, Sampling(), model.end_ids())


def test_a_prompt_gets_what_the_template_puts_before_it(folder):
    write_ends(folder, None, {})
    found = []
    for template in TEMPLATES.values():
        write_tokenizer(folder, template)
        found.append(ours(folder))
        assert found[-1] == theirs(folder)
    assert found[0] != found[1] == found[2], "the template matters to this model"


def test_text_ends_where_either_file_says(folder, tmp_path):
    """As gpt2's do in all cases; how a file is read is no matter of the family."""
    write_tokenizer(folder, TEMPLATES["begins"])
    write_ends(folder, None, None)
    whole = theirs(folder)
    assert ours(folder) == whole and len(whole) == COUNT
    early, late = whole[4], next(id for id in whole[6:] if id not in whole[:6])
    lengths = set()
    cases = (
        (None, {"eos_token_id": [late, early]}),
        (late, None),
        (early, {"eos_token_id": late}),
        (early, {"eos_token_id": [late]}),
        (early, {"eos_token_id": None}),
        (early, {}),
        (early, {"eos_token_id": []}),
        ([late, early], None),
    )
    is_gpt2 = "n_embd" in (folder / "config.json").read_text()
    for config, generation in cases if is_gpt2 else cases[:2]:
        write_ends(folder, config, generation)
        found = ours(folder)
        assert found == theirs(folder), (config, generation)
        name = str(len(list(tmp_path.iterdir())))
        to_mtcli(open_checkpoint(folder), tmp_path / name, *parse_layout("tp=2"), WriteOptions())
        assert ours(tmp_path / name) == found, "the files travel with the weights"
        lengths.add(len(found))
    assert lengths == {whole.index(early), whole.index(late)} | ({COUNT} if is_gpt2 else set())
    to_hf(open_checkpoint(tmp_path / "0"), tmp_path / "back", 10**9, WriteOptions())
    assert ours(tmp_path / "back") == theirs(tmp_path / "back") == whole[: whole.index(early)]


@pytest.mark.parametrize("folder", ["gpt2"], indirect=True)
@pytest.mark.parametrize("end", ["2", [1, "2"], {"a": 1}, True, 1.5], ids=str)
def test_an_end_that_is_no_id_is_refused_by_name(folder, end):
    write_tokenizer(folder, None)
    write_ends(folder, None, {"eos_token_id": end})
    with pytest.raises(MtcliError) as caught:
        open_model(str(folder), (), ALONE).end_ids()
    (problem,) = caught.value.problems
    assert "generation_config.json: eos_token_id=" in problem.message
    assert problem.message.endswith(" is no token id") and problem.hint
