"""Texts that are generated together are those that are generated alone, and transformers'."""

import pytest
import torch
from ranks import run_ranks
from transformers import AutoConfig, AutoModelForCausalLM

from mtcli.core.inference.generate import Ends, Generator, TextRequest
from mtcli.core.inference.model import open_model
from mtcli.core.inference.token_choice import Sampling
from mtcli.core.runtime.launch import Runtime

ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))
VOCAB, LIMIT = 97, 48
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": VOCAB}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LIMIT}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
KINDS = {
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": LIMIT, "vocab_size": VOCAB},
    "llama": SIZES,
    "mistral": SIZES | {"sliding_window": 7},
    "gpt_oss": SIZES
    | {"head_dim": 6, "sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": SIZES
    | {"head_dim": 6, "sliding_window": 6, "final_logit_softcapping": 3.0}
    | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 6},
    "deepseek_v3": SIZES
    | EXPERTS
    | {"num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6}
    | {"qk_rope_head_dim": 4, "v_head_dim": 10, "n_routed_experts": 4, "n_shared_experts": 1}
    | {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
    "qwen3_moe": SIZES | EXPERTS | {"num_experts": 4, "head_dim": 6},
}
LENGTHS = (5, 1, 19, 3, 11, 2, 30, 7)
COUNT = 9


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    """(transformers' model, its folder)."""
    torch.manual_seed(4)
    config = AutoConfig.for_model(request.param, **KINDS[request.param])
    config.initializer_range, config.pad_token_id, config.eos_token_id = 0.6, None, None
    made = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    folder = tmp_path_factory.mktemp(request.param)
    made.save_pretrained(folder)
    return made, str(folder)


def only(*kinds):
    return pytest.mark.parametrize("model", kinds, indirect=True)


def prompts_of(lengths, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=draw).tolist() for length in lengths]


def greedy_of(model, prompt, count=COUNT):
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return found[0, len(prompt) :].tolist()


def requests_of(prompts, count=COUNT, sampling=Sampling(), **more):  # noqa: B008
    ends = Ends(count)
    return [TextRequest(p, ends, sampling, number=n, **more) for n, p in enumerate(prompts)]


def ids_of(generator, requests):
    """The tokens of each text, in the order of requests."""
    texts = sorted(generator.run(requests), key=lambda text: text.index)
    assert [text.index for text in texts] == list(range(len(requests)))
    return [text.ids for text in texts]


class Counting(Generator):
    """A generator that notes the shape of each forward pass."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.shapes = []

    def _logits(self, slots, starts, rows):
        self.shapes.append((len(rows), max(map(len, rows)), sum(map(len, rows))))
        return super()._logits(slots, starts, rows)


def room_for(scorer, texts, tokens):
    return scorer.cached_bytes * texts * tokens


@pytest.mark.parametrize("slots", [1, 3, 64])
def test_texts_of_prompts_of_any_lengths_are_transformers(model, slots):
    theirs, folder = model
    prompts = prompts_of(LENGTHS)
    scorer = open_model(folder, (), ALONE).scorer
    generator = Counting(scorer, room_for(scorer, slots, max(LENGTHS) + COUNT))
    expected = [greedy_of(theirs, prompt) for prompt in prompts]
    assert ids_of(generator, requests_of(prompts)) == expected
    widest = min(slots, len(prompts))
    assert max(rows for rows, _, _ in generator.shapes) == widest
    assert generator.slots.count == widest
    memory = sum(x.nbytes for pair in generator.slots.layers.values() for x in pair)
    assert memory == room_for(scorer, widest, max(LENGTHS) + COUNT), "as budgeted, and no more"
    passes = sum(width == 1 for _, width, _ in generator.shapes)
    assert passes <= (COUNT - 1) * -(-len(prompts) // widest) + 2, "steps are shared"


@only("llama")
def test_slots_take_the_next_prompt_when_a_text_ends(model):
    theirs, folder = model
    prompts, counts = prompts_of(LENGTHS), [1, 12, 2, 7, 3, 9, 4, 5]
    scorer = open_model(folder, (), ALONE).scorer
    generator = Counting(scorer, room_for(scorer, 2, 30 + 4))
    requests = [TextRequest(p, Ends(c)) for p, c in zip(prompts, counts, strict=True)]
    expected = [greedy_of(theirs, p, c) for p, c in zip(prompts, counts, strict=True)]
    assert ids_of(generator, requests) == expected
    steps = [rows for rows, width, _ in generator.shapes if width == 1]
    assert sum(counts) - len(counts) <= sum(steps) <= sum(counts), "no ended text takes a row"


def test_a_prompt_of_several_texts_and_a_common_beginning_are_read_once(model):
    theirs, folder = model
    first, *tails = prompts_of((20, 3, 6, 3, 1))
    prompts = [first + tails[0], *[first + tail for tail in tails], first + tails[1], first]
    generator = Counting(open_model(folder, (), ALONE).scorer)
    expected = [greedy_of(theirs, prompt) for prompt in prompts]
    assert ids_of(generator, requests_of(prompts)) == expected
    read = sum(tokens for rows, width, tokens in generator.shapes[:3] if width > 1)
    # the first whole, those that begin alike from there on, and one token of what is a beginning
    assert read <= len(prompts[0]) + sum(map(len, tails)) + 2
    again = Counting(generator.model)
    assert ids_of(again, requests_of([first] * 4)) == [greedy_of(theirs, first)] * 4
    assert again.shapes[0] == (1, 20, 20) and len(again.shapes) == COUNT


@only("llama", "deepseek_v3")
def test_a_conversation_that_goes_on_reads_what_is_new(model):
    theirs, folder = model
    (prompt,) = prompts_of((20,))
    generator = Counting(open_model(folder, (), ALONE).scorer)
    (ids,) = ids_of(generator, requests_of([prompt]))
    longer = [*prompt, *ids, 5, 6]
    generator.shapes.clear()
    assert ids_of(generator, requests_of([longer], 4)) == [greedy_of(theirs, longer, 4)]
    assert generator.shapes[0] == (1, 3, 3), "the last token was chosen, and not read"


DRAWN = Sampling(1.0, top_p=0.95, seed=3)


@only("llama", "gpt_oss", "deepseek_v3")
def test_a_text_does_not_depend_on_what_is_generated_with_it(model):
    scorer = open_model(model[1], ["train.precision=fp64"], ALONE).scorer
    prompts = prompts_of(LENGTHS)
    ends = Ends(COUNT)
    requests = [
        TextRequest(prompt, ends, DRAWN, number=n, sample=k)
        for n, prompt in enumerate(prompts)
        for k in range(2)
    ]
    together = ids_of(Generator(scorer), requests)
    assert [ids_of(Generator(scorer), [one])[0] for one in requests] == together
    few = Generator(scorer, room_for(scorer, 3, max(LENGTHS) + COUNT))
    assert ids_of(few, requests[::-1]) == together[::-1]
    assert len({tuple(ids) for ids in together}) == len(requests), "samples and prompts differ"
    same = [TextRequest(prompts[0], ends, DRAWN, number=n) for n in range(3)]
    assert len({tuple(ids) for ids in ids_of(Generator(scorer), same)}) == 3


def on_ranks(runtime, folder, overrides, sampling):
    scorer = open_model(folder, overrides, runtime).scorer
    few = Generator(scorer, room_for(scorer, 3, max(LENGTHS) + COUNT))
    return ids_of(few, requests_of(prompts_of(LENGTHS), sampling=sampling))


@pytest.mark.parametrize(
    ("model", "axes"),
    [
        ("gpt2", ["tp=2", "pp=2"]),
        ("gpt_oss", ["tp=2", "ep=2"]),
        ("gemma2", ["tp=4"]),
        ("deepseek_v3", ["tp=2", "pp=2"]),
        ("qwen3_moe", ["ep=4"]),
        ("qwen3_moe", ["pp=2", "tp=2", "ep=2", "etp=1"]),
        ("llama", ["tp=4", "tp_mode=2d"]),
    ],
    indirect=["model"],
    ids=str,
)
def test_any_layout_generates_the_same_texts(model, axes):
    _, folder = model
    overrides = ["train.precision=fp64", *(f"parallel.{axis}" for axis in axes)]
    for sampling in (Sampling(), DRAWN):
        alone = on_ranks(ALONE, folder, ["train.precision=fp64"], sampling)
        assert run_ranks(4, on_ranks, folder, overrides, sampling) == [alone] * 4


@only("llama")
def test_stop_strings_and_limits_are_of_each_text(model):
    theirs, folder = model
    generator = Generator(open_model(folder, (), ALONE).scorer)
    prompts = prompts_of((4, 9, 45))
    greedy = [greedy_of(theirs, prompt) for prompt in prompts[:2]]

    def letters(ids):
        return "".join(chr(97 + id % 26) + chr(65 + id // 26) for id in ids)

    stop = letters(greedy[0])[5:8]
    ends = [Ends(COUNT, (), [stop]), Ends(COUNT, {greedy[1][3]}), Ends(100)]
    requests = [TextRequest(p, e, decode=letters) for p, e in zip(prompts, ends, strict=True)]
    texts = sorted(generator.run(requests), key=lambda text: text.index)
    first = letters(greedy[0])
    assert texts[0].result == (first[: first.index(stop)], first.index(stop) // 2 + 2, "stop")
    count = greedy[1].index(greedy[1][3])
    assert texts[1].result == (letters(greedy[1][:count]), count, "end_token")
    assert texts[2].result[1:] == (LIMIT - 45 + 1, "context")


@only("qwen3_moe")
def test_experts_with_a_capacity_get_one_text_at_a_time(model, tmp_path):
    from dataclasses import replace

    scorer = open_model(model[1], (), ALONE).scorer
    limited = scorer.config.model.model_copy(update={"capacity_factor": 1.0})
    limited = replace(scorer, config=scorer.config.model_copy(update={"model": limited}))
    assert scorer.is_separable and not limited.is_separable
    generator = Counting(limited)
    prompts = prompts_of((20, 20))
    ids_of(generator, requests_of([prompts[0], prompts[0] + [1], prompts[1]]))
    assert [rows for rows, _, _ in generator.shapes] == [1] * len(generator.shapes)
    assert [tokens for _, _, tokens in generator.shapes if tokens > 1] == [20, 21, 20]
