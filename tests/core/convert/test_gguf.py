"""GGUF files against readers that share no code with the writer: transformers, which loads them as
models, and the arithmetic of the format."""

import json
import struct
from contextlib import closing, contextmanager
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from command_line import mtcli

from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.config.errors import MtcliError
from mtcli.core.convert.gguf.metadata import architecture_of, facts_of, notes
from mtcli.core.convert.gguf.token_table import PATTERNS, name_of, vocabulary_of
from mtcli.core.convert.gguf.write import plan_gguf, to_gguf
from mtcli.core.data.tokenize import byte_tokenizer, load_tokenizer, train_tokenizer

gguf = pytest.importorskip("gguf")
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 9}


def configs():
    import transformers as t

    return {
        "gpt2": t.GPT2Config(
            vocab_size=320, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=1,
            eos_token_id=2,
        ),
        "llama": t.LlamaConfig(**SIZES, head_dim=24, attention_bias=False),
        "llama-tied": t.LlamaConfig(**SIZES, tie_word_embeddings=True),
        "mistral": t.MistralConfig(**SIZES, sliding_window=None),
        "mixtral": t.MixtralConfig(**SIZES, num_experts_per_tok=2, num_local_experts=3),
        "qwen2": t.Qwen2Config(**SIZES),
        "qwen3": t.Qwen3Config(**SIZES, head_dim=24),
        "qwen2_moe": t.Qwen2MoeConfig(
            **SIZES, **EXPERTS, num_experts=3, shared_expert_intermediate_size=64
        ),
        "qwen3_moe": t.Qwen3MoeConfig(
            **SIZES, **EXPERTS, head_dim=24, num_experts=3, norm_topk_prob=True
        ),
        "gemma2": t.Gemma2Config(**SIZES, **GEMMA),
        "gemma3": t.Gemma3TextConfig(**SIZES, **GEMMA),
        "phi": t.PhiConfig(**SIZES),
        "phi3": t.Phi3Config(**SIZES),
        "gpt_oss": t.GptOssConfig(
            **SIZES, num_experts_per_tok=2, head_dim=16, num_local_experts=3, sliding_window=8,
            rope_parameters={"rope_type": "default", "rope_theta": 999.0},
        ),
    }  # fmt: skip


NAMES = ("gpt2", "llama", "llama-tied", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe")
NAMES += ("qwen3_moe", "gemma2", "gemma3", "phi", "phi3", "gpt_oss")
UNREAD = ("phi", "gpt_oss", "mistral", "mixtral")  # which transformers reads no GGUF of


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of each model, with a tokenizer of bytes and random weights, biases and norms."""
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("gguf")
    texts = ["the cat sat on the mat, the hat and the rat"] * 9
    words = train_tokenizer(texts, 300)
    for number, (name, config) in enumerate(configs().items()):
        torch.manual_seed(number)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape)
        model.save_pretrained(root / name)
        words.save(root / name)
    return {name: root / name for name in NAMES}


def write(folder, path, dtype="fp32", verify=True):
    source = open_checkpoint(folder)
    return to_gguf(source, path, plan_gguf(source, None, dtype), verify)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in UNREAD])
def test_transformers_loads_the_same_model_from_the_file(folders, tmp_path, name):
    from transformers import AutoModelForCausalLM

    facts = write(folders[name], tmp_path / "x.gguf")
    assert facts["tensors_equal"] == sum(facts["tensors"].values())
    assert facts["largest_rounding"] == 0.0
    theirs = AutoModelForCausalLM.from_pretrained(folders[name]).eval()
    config = theirs.config  # its reader of metadata drops rotary bases and the width of heads
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="x.gguf", config=config
    ).eval()
    ids = torch.randint(300, (2, 40), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        ours, expected = loaded(ids).logits, theirs(ids).logits
    assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    state = loaded.state_dict()
    for key, value in theirs.state_dict().items():
        assert torch.allclose(state[key].float(), value, atol=1e-6), key


def test_rows_are_rounded_as_the_format_says(folders, tmp_path):
    source = open_checkpoint(folders["llama"])
    weight = source.read("blocks.0.mlp.down.weight").float().numpy()  # [64, 96]
    for dtype, kind in (("fp16", "F16"), ("bf16", "BF16"), ("q8_0", "Q8_0")):
        facts = write(folders["llama"], tmp_path / f"{dtype}.gguf", dtype)
        found = {t.name: t for t in gguf.GGUFReader(tmp_path / f"{dtype}.gguf").tensors}
        assert found["blk.0.ffn_down.weight"].tensor_type.name == kind
        assert found["blk.0.attn_norm.weight"].tensor_type.name == "F32"
        data = np.asarray(found["blk.0.ffn_down.weight"].data)
        if dtype == "q8_0":
            blocks = weight.reshape(64, 3, 32)
            scale = (np.abs(blocks).max(-1, keepdims=True) / 127).astype(np.float32)
            steps = np.rint(blocks / scale)
            stored = data.reshape(64, 3, 34)
            assert np.abs(stored[..., 2:].view(np.int8) - steps).max() <= 1
            assert np.array_equal(stored[..., :2].copy().view(np.float16), scale.astype(np.float16))
            assert 1e-4 < facts["largest_rounding"] < 0.5 / 127 + 2**-11  # of the scale
        else:
            half = torch.float16 if dtype == "fp16" else torch.bfloat16
            rounded = torch.from_numpy(weight).to(half).view(torch.uint16).numpy()
            assert np.array_equal(data.view(np.uint16).reshape(weight.shape), rounded)


def test_rows_that_32_does_not_divide_are_float16(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = SIZES | {"hidden_size": 48, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path / "hf")
    facts = write(tmp_path / "hf", tmp_path / "x.gguf", "q8_0")
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
    assert kinds["blk.0.ffn_up.weight"] == "F16" and kinds["blk.0.ffn_down.weight"] == "Q8_0"
    assert facts["tensors"]["q8_0"] == 2 and kinds["blk.1.attn_norm.weight"] == "F32"


def field(path, key):
    return gguf.GGUFReader(path).get_field(key).contents()


def test_the_vocabulary_is_the_tokenizer_s(folders, tmp_path):
    write(folders["llama"], tmp_path / "x.gguf")
    tokenizer = load_tokenizer(folders["llama"])
    tokens = field(tmp_path / "x.gguf", "tokenizer.ggml.tokens")
    vocab = tokenizer.backend.get_vocab()
    assert len(tokens) == 320 and [vocab[token] for token in tokens[: len(vocab)]] == [
        *range(len(vocab))
    ]
    types = field(tmp_path / "x.gguf", "tokenizer.ggml.token_type")
    assert types[tokenizer.eod_id] == 3 and set(types[len(vocab) :]) == {5}
    assert field(tmp_path / "x.gguf", "tokenizer.ggml.pre") == "gpt-2"
    assert field(tmp_path / "x.gguf", "tokenizer.ggml.eos_token_id") == tokenizer.eod_id
    definition = json.loads(tokenizer.definition)["model"]["merges"]
    ranked = [" ".join(pair) if isinstance(pair, list) else pair for pair in definition]
    assert field(tmp_path / "x.gguf", "tokenizer.ggml.merges") == ranked


def test_sentencepiece_merges_by_the_scores_of_its_ranks():
    from tokenizers import Tokenizer, models

    vocab = {"<unk>": 0, "<0x0A>": 1, "▁": 2, "a": 3, "b": 4, "ab": 5, "▁a": 6, "▁ab": 7}
    merges = [("a", "b"), ("▁", "ab"), ("▁", "a")]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    from mtcli.core.data.tokenize import Tokenizer as Ours

    found = vocabulary_of(Ours(backend, {"unk_token": "<unk>"}), 9, "template")
    assert found.types == [2, 6, 1, 1, 1, 1, 1, 1, 5] and found.tokens[8] == "[PAD8]"
    assert [round(score) for score in found.scores[5:8]] == [0, -2, -1]
    assert found.facts["ggml.model"] == "llama" and found.facts["chat_template"] == "template"
    with pytest.raises(MtcliError, match="has 8 ids, and the model 7"):
        vocabulary_of(Ours(backend), 7, None)


def test_words_split_by_an_unknown_pattern_are_refused(tmp_path):
    from tokenizers import Regex, pre_tokenizers

    tokenizer = train_tokenizer(["the cat sat"] * 9, 260)
    split = pre_tokenizers.Split(Regex("a+"), "isolated")
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.backend.pre_tokenizer = pre_tokenizers.Sequence([split, bytewise])
    from mtcli.core.data.tokenize import Tokenizer as Ours

    with pytest.raises(MtcliError, match=r"splits words by 'a\+', which llama.cpp has no name"):
        vocabulary_of(Ours(tokenizer.backend.to_str()), 300, None)
    assert vocabulary_of(byte_tokenizer(), 257, None).facts["ggml.pre"] == "gpt-2"


def test_what_llama_cpp_cannot_compute_is_refused_or_said(folders):
    model = open_checkpoint(folders["gemma2"]).model
    changed = model.model_copy(update={"attention_scale": 0.3})
    with pytest.raises(MtcliError, match="gemma2 cannot have attention_scale=0.3"):
        architecture_of(changed, "gemma2")
    with pytest.raises(MtcliError, match="no layout of GGUF is known for the family falcon"):
        architecture_of(model, "falcon")
    assert facts_of(model, "gemma2")["attention.sliding_window"] == 9
    same = model.model_copy(update={"window_pattern": "L"})
    assert facts_of(same, "gemma2")["context_length"] == 9
    assert "a context of 9" in notes(same, "gemma2")[0]
    llama = open_checkpoint(folders["mistral"]).model.model_copy(update={"window": 7})
    assert facts_of(llama, "llama")["context_length"] == 7


@pytest.mark.parametrize("dtype", ["q8_0", "fp16"])
def test_the_perplexity_of_a_text_is_transformers_by_the_weights_of_the_file(
    folders, tmp_path, dtype
):
    from transformers import AutoModelForCausalLM

    text = "of the words of a text, " * 40
    (tmp_path / "text.txt").write_text(text)
    words = ("x.gguf", "--dtype", dtype, "--text", "text.txt", "--json", "-")
    done = mtcli("shard", folders["llama"], *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    before = AutoModelForCausalLM.from_pretrained(folders["llama"]).eval()
    after = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="x.gguf", config=before.config
    ).eval()
    ids = torch.tensor(load_tokenizer(folders["llama"]).encode(text))
    assert len(ids) > 3 * 64  # the context, of which a window has one input more
    expected = []
    for model in (before, after):
        windows = [ids[at : at + 65][None] for at in range(0, len(ids) - 1, 64)]
        with torch.no_grad():
            losses = [
                float(model(w[:, :-1]).logits.double().log_softmax(-1)[0]
                      .gather(1, w[0, 1:, None]).sum())
                for w in windows
            ]  # fmt: skip
        expected.append(np.exp(-sum(losses) / (len(ids) - 1)))
    assert found["perplexity"] == pytest.approx(expected[0], rel=1e-7)
    assert found["perplexity_difference"] == pytest.approx(expected[1] - expected[0], rel=1e-4)
    apart = found["perplexity_rounded"] - found["perplexity"]
    assert found["perplexity_difference"] == pytest.approx(apart, rel=1e-6) and apart != 0


def test_inspect_shows_what_the_package_s_reader_finds(folders, tmp_path):
    for name, dtype in (("llama", "q8_0"), ("gpt2", "bf16")):
        path = tmp_path / f"{name}.gguf"
        write(folders[name], path, dtype)
        done = mtcli("shard", "inspect", path, "--json", "-", folder=tmp_path)
        assert done.returncode == 0, done.stderr
        found, theirs = json.loads(done.stdout), gguf.GGUFReader(path)
        assert found["architecture"] == name and found["file_bytes"] == path.stat().st_size
        assert found["tensors"] == {
            tensor.name: {
                "shape": [int(size) for size in reversed(tensor.shape)],
                "dtype": tensor.tensor_type.name,
                "bytes": int(tensor.n_bytes),
            }
            for tensor in theirs.tensors
        }
        assert found["parameters"] == sum(int(tensor.n_elements) for tensor in theirs.tensors)
        stated = {key: one for key, one in theirs.fields.items() if not key.startswith("GGUF.")}
        assert found["facts"].keys() == stated.keys()
        for key, value in found["facts"].items():
            is_array = stated[key].types[0] == gguf.GGUFValueType.ARRAY
            assert value == (len(stated[key].data) if is_array else stated[key].contents()), key
        shown = mtcli("shard", "inspect", path, folder=tmp_path).stdout
        for kind, count in found["types"].items():
            assert f"{count['tensors']:,} {kind} of {count['bytes']:,} bytes" in shown
        assert f"{name}.context_length" in shown and "chat_template" not in shown


def test_a_damaged_file_is_refused_by_what_is_wrong(folders, tmp_path):
    write(folders["llama"], tmp_path / "x.gguf", verify=False)
    data = (tmp_path / "x.gguf").read_bytes()
    at = data.index(b"general.architecture") + 20
    array = data.index(b"tokenizer.ggml.tokens") + 25  # its kind, 9, is before

    def big(size):
        return struct.pack("<Q", size)

    for damaged, said in (
        (b"GGML" + data[4:], "it does not begin as a GGUF file does"),
        (data[:4] + data[7:3:-1] + data[8:], "it is of version 50331648, and (2, 3)"),
        (data[:8] + big(2**63) + data[16:], "it has 9,223,372,036,854,775,808 tensors"),
        (data[:at] + b"\x0d" + data[at + 1 :], "a fact of kind 13"),
        (data[: at + 4] + big(2**40) + data[at + 12 :], "a text of 1,099,511,627,776 bytes"),
        (data[: array + 4] + big(2**62) + data[array + 12 :], "ends beyond its"),
        (data[:array] + b"\x04\0\0\0" + big(2**62) + data[array + 12 :], "ends beyond its"),
        (data[:-1], f"ends at byte {len(data):,} of {len(data) - 1:,}"),
        (data[:100], "its header ends beyond its 100 bytes"),
    ):
        (tmp_path / "y.gguf").write_bytes(damaged)
        done = mtcli("shard", "inspect", "y.gguf", folder=tmp_path)
        assert done.returncode == 2 and said in done.stderr, (said, done.stderr)
    done = mtcli("shard", "inspect", "none.gguf", folder=tmp_path)
    assert done.returncode == 2 and "none.gguf cannot be read: No such file" in done.stderr
    done = mtcli("shard", folders["llama"], "z.gguf", "--dtype", "q4", folder=tmp_path)
    assert done.returncode == 2 and "with --to gguf also q8_0" in done.stderr


def test_the_command_writes_verifies_and_replaces_nothing_else(folders, tmp_path):
    done = mtcli("shard", folders["qwen3"], "x.gguf", "--dtype", "q8_0", "--verify",
                 "--json", "x.json", folder=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "writing qwen3 as q8_0 to x.gguf" in done.stderr
    facts = json.loads((tmp_path / "x.json").read_text())
    assert facts["bytes"] == (tmp_path / "x.gguf").stat().st_size and facts["tensors"]["q8_0"] > 9
    (tmp_path / "text.gguf").write_text("mine")
    for words, said in (
        (("x.gguf",), "x.gguf exists"),
        (("text.gguf", "--force"), "text.gguf exists and is no GGUF file"),
        (("y", "--to", "gguf"), "y does not end in .gguf"),
        (("y.gguf", "--to", "hf", "--dtype", "q8_0"), "--dtype q8_0 without --to gguf"),
        (("y.gguf", "--to", "gguf", "--layout", "tp=2"), "--layout tp=2 with --to gguf"),
        (("y", "--to", "hf", "--text", "t"), "--text t with --to hf"),
        (("y.gguf", "--text", "none"), "none cannot be read"),
        (("y.gguf", "--dtype", "fp64"), "--dtype fp64 with --to gguf"),
    ):
        done = mtcli("shard", folders["qwen3"], *words, folder=tmp_path)
        assert done.returncode == 2 and said in done.stderr, done.stderr
    assert (tmp_path / "text.gguf").read_text() == "mine"
    done = mtcli("shard", folders["qwen3"], "x.gguf", "--dtype", "bf16", "--force", folder=tmp_path)
    assert done.returncode == 0, done.stderr


in_llama = pytest.mark.skipif(find_spec("llama_cpp") is None, reason="needs llama-cpp-python")
# llama.cpp looks up GELU in a table of float16 numbers.
WITH_GELU = ("gpt2", "gemma2", "gemma3", "phi")


@in_llama
@pytest.mark.parametrize("name", NAMES)
def test_llama_cpp_has_the_logits_and_the_greedy_tokens_of_transformers(folders, tmp_path, name):
    from transformers import AutoModelForCausalLM

    write(folders[name], tmp_path / "x.gguf")
    with in_llama_cpp(tmp_path / "x.gguf") as model:
        ids = torch.randint(300, (1, 40), generator=torch.Generator().manual_seed(3))
        model.eval(ids[0].tolist())
        found = torch.tensor(model.scores[:40])
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folders[name]).eval()(ids).logits[0]
    assert torch.equal(found.argmax(1), expected.argmax(1))
    off = float((found - expected).abs().max() / expected.abs().max())
    assert off < (1e-3 if name in WITH_GELU else 5e-6)


@in_llama
@pytest.mark.parametrize("kind", ["gpt-2", "spm", "spm with a space ahead", *PATTERNS.values()])
def test_llama_cpp_splits_texts_as_the_tokenizer_does(folders, tmp_path, kind):
    from transformers import AutoModelForCausalLM

    tokenizer = of_kind(kind)
    model = AutoModelForCausalLM.from_pretrained(folders["llama"])
    model.resize_token_embeddings(tokenizer.vocab_size + 3)
    model.save_pretrained(tmp_path / kind)
    tokenizer.save(tmp_path / kind)
    write(tmp_path / kind, tmp_path / "x.gguf", verify=False)
    with in_llama_cpp(tmp_path / "x.gguf", vocab_only=True) as model:
        for text in TEXTS:
            if kind in APPROXIMATE and "\u0301" in text:
                continue
            ids = model.tokenize(text.encode(), add_bos=False, special=True)
            assert ids == [*tokenizer.encode(text)], text


@contextmanager
def in_llama_cpp(path, **options):
    """A file in llama.cpp, with keys and values in float32."""
    import llama_cpp

    wide = {"type_k": 0, "type_v": 0}
    model = llama_cpp.Llama(
        str(path), n_ctx=64, logits_all=True, n_threads=1, verbose=False, **wide, **options
    )
    with closing(model):
        yield model


# Patterns with combining marks among letters, which llama.cpp's own have not.
APPROXIMATE = ("gpt-4o", "tekken")
TEXTS = (
    "Hello world", "  two  spaces", "I'm sure you'LL don't", "12345 67 8", "a\n\n\nb \n c\t\td",
    "naïve café — “quotes” … ×10⁵", "日本語 テスト 中文", "x=1;y=[2,3]//z", "ONE Two tHree",
    "<s>hi</s> there", "🙂🙂 emoji", "a b", "e\u0301", "end ", "the hat and the rat",
)  # fmt: skip


def of_kind(kind):
    """A tokenizer of a way to split words that has a name in llama.cpp."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, trainers
    from tokenizers import pre_tokenizers as pre

    from mtcli.core.data.tokenize import Tokenizer as Ours

    roles = {"bos_token": "<s>", "eos_token": "</s>"}
    lines = [*TEXTS, "the cat sat on the mat, the hat and the rat", "two spaces, sure"] * 9
    if kind.startswith("spm"):
        trained = Tokenizer(models.BPE(unk_token="<unk>"))
        trained.pre_tokenizer = pre.Split(Regex("▁"), "merged_with_next")
        special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, limit_alphabet=40)
        trained.train_from_iterator([line.replace(" ", "▁") for line in lines], trainer)
        table = json.loads(trained.to_str()) | {"pre_tokenizer": None}
        table["model"] |= {"byte_fallback": True, "fuse_unk": True}
        table["added_tokens"] = table["added_tokens"][:3]
        backend = Tokenizer.from_str(json.dumps(table))
        spaces = normalizers.Replace(" ", "▁")
        ahead = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        backend.normalizer = spaces if kind == "spm" else ahead
        return Ours(backend, roles | {"unk_token": "<unk>"})
    backend = Tokenizer(models.BPE())
    split = [pre.Split(Regex(word), "isolated") for word, name in PATTERNS.items() if name == kind]
    bytewise = pre.ByteLevel(add_prefix_space=False, use_regex=not split)
    backend.pre_tokenizer = pre.Sequence([*split, bytewise]) if split else bytewise
    backend.decoder = decoders.ByteLevel()
    alphabet = pre.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet
    )
    backend.train_from_iterator(lines, trainer)
    return Ours(backend, roles)


def test_a_model_is_named_after_phi_3_where_it_has_its_tokens(folders, tmp_path):
    """llama.cpp reads Phi-3's special tokens of any model whose name has phi-3."""
    tokenizer = train_tokenizer(["the cat sat"] * 9, 260)
    plain = vocabulary_of(tokenizer, 300, None)
    tokens = ["</s>", "<unk>", "<s>", "<|endoftext|>"]
    phi = plain._replace(tokens=tokens)
    assert name_of("Phi-3-mini", "phi3", phi) == "Phi-3-mini"
    assert name_of("mine", "phi3", phi) == "phi-3 mine" and name_of("mine", "llama", phi) == "mine"
    assert name_of("my-phi3", "phi3", plain) == name_of("phi-3", "llama", plain) == "model"
    assert name_of("mine", "phi3", plain) == "mine"
    write(folders["phi3"], tmp_path / "x.gguf")
    assert field(tmp_path / "x.gguf", "general.name") == "model"
