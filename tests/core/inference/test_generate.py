from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks

import mtcli.core.inference.model as inference_model
from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.config.errors import MtcliError
from mtcli.core.convert.layout import parse_layout
from mtcli.core.convert.to_mtcli import WriteOptions, to_mtcli
from mtcli.core.convert.verify import logit_difference
from mtcli.core.inference.generate import Ends, generate, generate_text
from mtcli.core.inference.model import open_model
from mtcli.core.inference.token_choice import Sampling, choose, probabilities, uniform
from mtcli.core.model.inputs import KVCache
from mtcli.core.runtime.launch import Runtime

ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))
PROMPT, VOCAB = [3, 14, 15, 92, 65], 97


def make_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 24, "vocab_size": VOCAB}
    return GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.3, eos_token_id=96))


def make_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=24,
        vocab_size=VOCAB,
        initializer_range=0.3,
        eos_token_id=96,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def model(request, tmp_path_factory):
    """(transformers' model, its folder)."""
    torch.manual_seed(4)
    made = {"gpt2": make_gpt2, "llama": make_llama}[request.param]().eval()
    folder = tmp_path_factory.mktemp("model")
    made.save_pretrained(folder)
    return made, str(folder)


def tokens(runtime, folder, overrides=(), sampling=Sampling(), count=12, ends=()):  # noqa: B008
    engine = open_model(folder, overrides, runtime).scorer
    return generate(engine, PROMPT, count, sampling, ends)


def greedy_of(model, count=12):
    ids = torch.tensor([PROMPT])
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
    return found[0, len(PROMPT) :].tolist()


def without_end(model):
    """transformers never draws the end token before min_new_tokens; the comparison needs none."""
    greedy = greedy_of(model)
    assert 96 not in greedy
    return greedy


def test_a_cache_has_every_token_and_is_rarely_copied():
    cache, generator = KVCache(), torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 1, 3, 5, 4, generator=generator)
    parts = [k], [v]
    assert cache.extend(0, k, v)[0] is k  # of a prompt alone nothing is copied
    places = set()
    for _ in range(200):
        new = torch.randn(2, 1, 3, 1, 4, generator=generator)
        for seen, x in zip(parts, new, strict=True):
            seen.append(x)
        for found, seen in zip(cache.extend(0, *new), parts, strict=True):
            torch.testing.assert_close(found, torch.cat(seen, 2), rtol=0, atol=0)
        places.add(cache.layers[0][0].data_ptr())
    assert len(places) == 2  # 128 tokens, then 256


def test_what_is_generated_builds_no_plans_of_attention(model, monkeypatch):
    asked = []

    def note(device, repeats):
        asked.append(repeats)
        return nullcontext()

    monkeypatch.setattr(inference_model, "sdpa_backends", note)
    tokens(ALONE, model[1], count=3)
    assert asked == [False] * 3


def test_greedy_tokens_are_transformers(model):
    theirs, folder = model
    assert tokens(ALONE, folder) == without_end(theirs)


def test_the_end_token_ends_and_is_not_given(model):
    theirs, folder = model
    greedy = without_end(theirs)
    end = greedy[3]
    assert tokens(ALONE, folder, ends={end}) == greedy[: greedy.index(end)]


def test_a_full_context_ends(model):
    _, folder = model
    assert len(tokens(ALONE, folder, count=100)) == 24 - len(PROMPT) + 1


def in_pairs(ids):
    """Decodes a token as two letters, so that most strings begin or end within one."""
    return "".join(chr(97 + id % 26) + chr(65 + id // 26) for id in ids)


DRAWN = Sampling(temperature=0.8, top_k=20, seed=5)
TENSOR_2D = ["tp=4", "tp_mode=2d"]


def said(runtime, folder, overrides, stops):
    """Greedy tokens, drawn ones, and the texts up to stop strings, of one engine."""
    engine = open_model(folder, overrides, runtime).scorer
    ids = [generate(engine, PROMPT, 12, sampling, ()) for sampling in (Sampling(), DRAWN)]
    ends = [Ends(12, (), strings) for strings in stops]
    return ids, [generate_text(engine, in_pairs, PROMPT, Sampling(), end).text for end in ends]


@pytest.mark.parametrize(
    ("model", "world", "axes"),
    [("gpt2", 4, ["tp=2", "pp=2"]), ("gpt2", 4, TENSOR_2D), ("llama", 4, ["tp=2", "pp=2"]),
     ("llama", 4, ["tp=4"]), ("llama", 4, TENSOR_2D), ("llama", 2, [])],
    indirect=["model"],
    ids=str,
)  # fmt: skip
def test_every_rank_of_any_layout_says_the_same_up_to_the_first_stop_string(model, world, axes):
    theirs, folder = model
    text = in_pairs(without_end(theirs))
    stops = [[text[7:10]], [text[6:8]], [text[:2]], ["no"], [text[19:], text[7:12], text[9:11]], []]
    stops = stops if "pp=2" in axes else stops[:2]
    ends = [[text.find(stop) for stop in given if stop in text] for given in stops]
    expected = [text[: min(end, default=None)] for end in ends]
    assert len({*map(len, expected)}) > len(stops) / 2, "the stop strings lie apart"
    alone = [without_end(theirs), tokens(ALONE, folder, (), DRAWN)]
    overrides = [f"parallel.{axis}" for axis in axes]
    assert run_ranks(world, said, folder, overrides, stops) == [(alone, expected)] * world


def test_a_stop_string_ends_the_generation_where_transformers_does(model):
    theirs, folder = model
    text = in_pairs(greedy_of(theirs))
    engine = open_model(folder, (), ALONE).scorer
    for start, end in ((7, 10), (6, 8), (5, 11)):
        # their criterion sees all ids: it is asked for the string in what is new
        stop = text[start:end]
        criterion = [lambda ids, _, stop=stop: torch.tensor([stop in in_pairs(ids[0, 5:])])]
        ids = torch.tensor([PROMPT])
        options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        made = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), stopping_criteria=criterion, **options
        )
        found = generate_text(engine, in_pairs, PROMPT, Sampling(), Ends(12, (), [stop]))
        assert found == (text[: text.index(stop)], made.shape[1] - len(PROMPT), "stop")


def test_a_text_says_why_it_ended(model):
    theirs, folder = model
    greedy, engine = without_end(theirs), open_model(folder, (), ALONE).scorer
    end, count = greedy[3], greedy.index(greedy[3])

    def ended(*ends):
        found = generate_text(engine, in_pairs, PROMPT, Sampling(), Ends(*ends))
        return found.num_tokens, found.finish_reason

    stop = in_pairs([end])
    assert ended(12) == (12, "max_tokens")
    assert ended(100) == (24 - len(PROMPT) + 1, "context")
    assert ended(12, {end}) == (count, "end_token")
    assert ended(12, {end}, [stop]) == (count, "end_token"), "an end token is no text"
    assert ended(12, (), [stop]) == (count + 1, "stop")
    assert ended(count + 1, (), [stop]) == (count + 1, "stop")


@pytest.mark.parametrize("prompt", [[], [1] * 25])
def test_a_prompt_that_does_not_fit_is_an_error_with_both_numbers(model, prompt):
    engine = open_model(model[1], (), ALONE).scorer
    with pytest.raises(MtcliError) as caught:
        generate(engine, prompt, 1, Sampling(), ())
    (problem,) = caught.value.problems
    assert problem.message == f"the prompt has {len(prompt)} tokens and the model takes 1 to 24"
    assert problem.field == "--prompt"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_are_not_finite_end_the_generation_with_exit_1(model, value, temperature):
    engine = open_model(model[1], (), ALONE).scorer
    engine.stages[0].blocks["1"].mlp_norm.weight[3] = value
    with pytest.raises(MtcliError) as caught:
        generate(engine, PROMPT, 12, Sampling(temperature), ())
    said = "after 0 new tokens the model's logits are not finite, so no token is likelier: "
    said += "the weight blocks.1.mlp_norm.weight has NaN or infinity"
    assert caught.value.problems[0].message == said and caught.value.code == 1


def test_a_layer_that_overflows_is_named_where_all_weights_are_finite(model):
    engine = open_model(model[1], (), ALONE).scorer
    for name in ("0", "1"):
        engine.stages[0].blocks[name].mlp.down.weight[:] = 3e38
    with pytest.raises(MtcliError) as caught:
        generate(engine, PROMPT, 12, Sampling(), ())
    (problem,) = caught.value.problems
    assert problem.message.endswith("all weights are finite, and the output of blocks.0.mlp is not")
    assert caught.value.code == 1 and "train.precision=fp32" in problem.hint


def bad_at(runtime, folder, name, stage):
    engine = open_model(folder, ["parallel.tp=2", "parallel.pp=2"], runtime).scorer
    if stage in engine.stages and runtime.rank % 2:
        engine.stages[stage].get_parameter(name)[:] = float("nan")
    with pytest.raises(MtcliError) as caught:
        generate(engine, PROMPT, 12, Sampling(), ())
    return caught.value.problems[0].message


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_every_rank_names_the_same_weight(model):
    name = "blocks.1.attention.out.weight"
    (message, *others) = run_ranks(4, bad_at, model[1], name, 1)
    assert f"the weight {name} has NaN" in message and others == [message] * 3


def test_a_model_that_sees_the_future_is_refused_and_can_still_be_proven(model, tmp_path):
    _, folder = model
    source = open_checkpoint(Path(folder))
    source = replace(source, model=source.model.model_copy(update={"causal": False}))
    to_mtcli(source, tmp_path / "full", *parse_layout(""), WriteOptions())
    with pytest.raises(MtcliError) as caught:
        open_model(str(tmp_path / "full"), (), ALONE)
    (problem,) = caught.value.problems
    assert "full has causal=false: its tokens see the ones they would predict" in problem.message
    assert problem.field == "model.causal" and "model.causal=true" in problem.hint
    assert (
        logit_difference(open_checkpoint(tmp_path / "full"), open_checkpoint(tmp_path / "full"))[0]
        == 0.0
    )
    assert (
        logit_difference(open_checkpoint(tmp_path / "full"), open_checkpoint(Path(folder)))[0]
        > 0.01
    )


def test_a_seed_decides_the_text_and_seeds_differ(model):
    _, folder = model
    texts = [tokens(ALONE, folder, (), Sampling(1.0, seed=seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def kept_by_brute_force(logits, temperature, top_k, top_p):
    """{id: probability} as top-k and then nucleus sampling are defined, one id at a time."""
    weights = {i: 2.718281828459045 ** (x / temperature) for i, x in enumerate(logits)}
    order = sorted(weights, key=lambda i: (-logits[i], i))[: top_k or None]
    total, kept, reached = sum(weights[i] for i in order), [], 0.0
    for i in order:
        if reached < top_p - 1e-12:
            kept.append(i)
        reached += weights[i] / total
    mass = sum(weights[i] for i in kept)
    return {i: weights[i] / mass for i in kept}


LOGITS = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=1, max_size=12)


@given(
    LOGITS,
    st.sampled_from([0.5, 1.0, 2.0]),
    st.integers(0, 13),
    st.sampled_from([0.13, 0.5, 0.9, 1.0]),
)
def test_top_k_and_top_p_keep_what_their_definitions_say(logits, temperature, top_k, top_p):
    found = probabilities(torch.tensor(logits), Sampling(temperature, top_k, top_p))
    expected = kept_by_brute_force(logits, temperature, top_k, top_p)
    assert found.tolist() == pytest.approx([expected.get(i, 0.0) for i in range(len(logits))])


def test_draws_follow_the_probabilities():
    logits = torch.tensor([0.0, 1.0, 2.0, -9.0])
    draws = [choose(logits, Sampling(1.0, top_k=3), (), uniform(7, 0, 0, i)) for i in range(4000)]
    expected = logits[:3].softmax(0).tolist()
    for id, share in enumerate(expected):
        width = (share * (1 - share) / 4000) ** 0.5
        assert abs(draws.count(id) / 4000 - share) < 4 * width
    assert draws.count(3) == 0


def test_greedy_takes_the_lowest_of_equal_maxima():
    assert choose(torch.tensor([1.0, 3.0, 3.0]), Sampling(), (), 0.5) == 1
