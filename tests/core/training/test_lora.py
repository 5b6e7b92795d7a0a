"""LoRA: peft's adapters both ways, and what checkpoints hold; the parity table has its layouts."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from chats import save_model, sums, write_lines
from marks import slow_cases
from ranks import run_ranks

from mtcli.core.checkpoint.fine_tuning import source_of
from mtcli.core.checkpoint.folder import find_checkpoint, model_of
from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.config.errors import MtcliError
from mtcli.core.config.loading import load_config
from mtcli.core.config.rules import problems
from mtcli.core.config.schema import LoraConfig
from mtcli.core.convert.to_peft import to_peft
from mtcli.core.mesh.adapters import LoraTarget
from mtcli.core.mesh.parameters import run_parameters
from mtcli.core.parallel.lora import AdapterSite, ExpertAdapter
from mtcli.core.runtime.launch import Runtime
from mtcli.core.training.loader import open_loader
from mtcli.core.training.loop import train
from mtcli.core.training.state import load_weights, shards, starting_point
from mtcli.core.training.step import Trainer
from mtcli.kernels.gemm import LinearFunction
from mtcli.kernels.grouped_gemm import grouped_gemms

ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))
KINDS = ("llama", "gpt2", "phi3", "gpt_oss", "deepseek_v3")
MORE = ("mixtral", "qwen2_moe", "gemma2", "starcoder2", "glm4", "gpt_neox", "falcon", "qwen3_moe")
MORE += ("deepseek_v2", "glm4_moe")
KINDS += tuple(slow_cases("another family, 3 s", *((kind,) for kind in MORE)))
FEW = {  # some targets of modules and arrays that have several
    "phi3": ["q_proj", "v_proj", "up_proj", "down_proj"],
    "gpt_neox": ["k_proj", "o_proj", "up_proj", "down_proj"],
    "mixtral": ["experts.up_proj"],
    "gpt_oss": ["o_proj", "experts.gate_proj", "experts.down_proj"],
}


def config(home, name, *settings):
    given = [f"data.train={home / 'my.jsonl'}", "batch.seq_len=128", "train.device=cpu"]
    given += ["batch.global_batch_size=4", "optimizer.lr=1e-2", "train.steps=3"]
    given += [f"train.output={home / 'run'}", "train.matmul=strict", "lora.rank=4"]
    return load_config(source_of(str(home / name)), [*given, *settings])


def run(config):
    train(config, ALONE, resume=False)
    return open_checkpoint(Path(config.train.output))


@pytest.fixture
def home(tmp_path):
    write_lines(tmp_path / "my.jsonl", sums(20))
    return tmp_path


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A folder with a base in `llama`, a run of adapters in `run`, and these in `peft`: to read."""
    home = tmp_path_factory.mktemp("tuned")
    write_lines(home / "my.jsonl", sums(20))
    save_model(home / "llama")
    to_peft(run(config(home, "llama")), home / "peft", force=False)
    return home


def ids(vocab=300):
    return torch.randint(0, vocab, (2, 40), generator=torch.Generator().manual_seed(1))


def exported(home, kind, targets, *more):
    """A run's adapters, and the same read back from peft's folder, once their logits are peft's."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    save_model(home / "hf", kind)
    # read as users read it: peft converts names by what the reader noted of the folder
    base = AutoModelForCausalLM.from_pretrained(home / "hf", experts_implementation="eager")
    done = run(config(home, "hf", "lora.alpha=7", f"lora.targets={json.dumps(targets)}", *more))
    to_peft(done, home / "peft", force=False)
    theirs = PeftModel.from_pretrained(base, home / "peft").eval()
    with torch.no_grad():
        wanted = theirs(ids()).logits
        with theirs.disable_adapter():
            before = theirs(ids()).logits
    assert (wanted - before).abs().max() > 0.05, "the adapters do something"
    assert torch.allclose(_logits(done, home / "merged"), wanted, atol=1e-4)
    again = open_checkpoint(home / "peft")
    assert torch.allclose(_logits(again, home / "again"), wanted, atol=1e-4)
    return done.adapters, again.adapters


def require_same(ours, read):
    names = [name for name in ours.own.names() if "/" not in name]
    assert sorted(read.own.names()) == sorted(names)
    assert all(torch.equal(read.own.read(name), ours.own.read(name)) for name in names)
    assert (read.lora.rank, read.lora.alpha) == (ours.lora.rank, ours.lora.alpha)


@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_our_adapters_and_the_merged_model_has_its_logits(home, kind):
    require_same(*exported(home, kind, ["all-linear"]))


@pytest.mark.parametrize("kind", FEW)
def test_some_targets_of_a_module_of_several_are_adapters_of_it(home, kind):
    require_same(*exported(home, kind, FEW[kind]))


WHOLE = {  # modules that are trained whole, and those of peft's file
    "llama": (["embed_tokens", "lm_head"], ["embed_tokens", "lm_head"]),
    "gpt2": (["wte"], ["lm_head", "wte"]),  # a tied head, which peft unties
    "gpt_neox": (["lm_head"], ["lm_head"]),  # embed_out in folders
}


@pytest.mark.parametrize("kind", WHOLE)
def test_peft_loads_modules_that_were_trained_whole_beside_adapters(home, kind):
    from safetensors.torch import load_file

    ours, names = WHOLE[kind]
    more = ("optimizer.lr=3e-2", f"lora.modules_to_save={json.dumps(ours)}")
    mine, read = exported(home, kind, ["all-linear"], *more)
    require_same(mine, read)
    assert (*read.lora.modules_to_save,) == (*mine.lora.modules_to_save,) == (*ours,)
    table = json.loads((home / "peft" / "adapter_config.json").read_text())
    assert table["modules_to_save"] == names
    tensors = load_file(home / "peft" / "adapter_model.safetensors")
    for parameter in ("embedding.weight", "head.weight"):
        if parameter in mine.own.tensors:
            change = mine.own.read(parameter) - mine.base.read(parameter)
            assert change.abs().max() > 0.01, "it was trained"
    assert sum("lora_" not in key for key in tensors) == len(names)


def test_whole_modules_that_are_not_an_embedding_or_a_head_are_refused(home):
    from peft import LoraConfig as Theirs
    from peft import get_peft_model

    for kind, whole in (("llama", ["norm"]), ("gpt2", ["wte"])):
        target = "q_proj" if kind == "llama" else "c_attn"
        made = Theirs(r=2, target_modules=[target], modules_to_save=whole, task_type="CAUSAL_LM")
        theirs = get_peft_model(save_model(home / kind, kind), made)
        theirs.peft_config["default"].base_model_name_or_path = str(home / kind)
        theirs.save_pretrained(home / f"peft-{kind}")
        with pytest.raises(MtcliError, match=r"modules_to_save=.* cannot be represented"):
            open_checkpoint(home / f"peft-{kind}")


def test_modules_have_the_names_of_their_family_and_several_targets_times_their_rank(home):
    exported(home, "gpt_neox", ["all-linear"])
    table = json.loads((home / "peft" / "adapter_config.json").read_text())
    names = ["dense", "dense_4h_to_h", "dense_h_to_4h", "query_key_value"]
    assert (table["target_modules"], table["r"], table["lora_alpha"]) == (names, 4, 7)
    assert table["rank_pattern"] == {"query_key_value": 12}
    assert table["alpha_pattern"] == {"query_key_value": 21}


ARRAYS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
THEIRS = {  # peft's own adapters: a model's kind, and the config
    "one A for query, key and value": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj"]}),
    "arrays of experts": ("gpt_oss", ARRAYS | {"target_modules": ["q_proj"]}),
    "one array": ("mixtral", {"target_modules": [], "target_parameters": ["experts.down_proj"]}),
    "several ranks of one scale": (
        "llama",
        {"target_modules": ["q_proj", "v_proj", "down_proj"]}
        | {"rank_pattern": {"v_proj": 6, r".*\.down_proj": 2}}
        | {"alpha_pattern": {"v_proj": 9, r".*\.down_proj": 3}},
    ),
    "scaled by roots": ("falcon", {"target_modules": ["query_key_value"], "use_rslora": True}),
}


def made_by_peft(home, kind, settings):
    """Adapters of random values that peft has saved; its model."""
    from peft import LoraConfig as Theirs
    from peft import get_peft_model

    torch.manual_seed(2)
    made = Theirs(r=4, lora_alpha=6, init_lora_weights=False, task_type="CAUSAL_LM", **settings)
    theirs = get_peft_model(save_model(home / "hf", kind), made).eval()
    theirs.peft_config["default"].base_model_name_or_path = str(home / "hf")
    theirs.save_pretrained(home / "peft")
    return theirs


@pytest.mark.parametrize("case", THEIRS)
def test_adapters_of_peft_have_peft_s_logits(home, case):
    theirs = made_by_peft(home, *THEIRS[case])
    with torch.no_grad():
        wanted = theirs(ids()).logits
        with theirs.disable_adapter():
            assert (wanted - theirs(ids()).logits).abs().max() > 0.05
    opened = open_checkpoint(home / "peft")
    assert torch.allclose(_logits(opened, home / "merged"), wanted, atol=1e-4)
    to_peft(opened, home / "more", force=False)
    written = open_checkpoint(home / "more")
    require_same(opened.adapters, written.adapters)


def test_adapters_of_transformers_4_have_a_module_of_each_expert(home):
    from peft import PeftModel
    from safetensors.torch import save_file

    base = save_model(home / "hf", "mixtral")
    (home / "peft").mkdir()
    table = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6}
    table |= {"target_modules": ["q_proj", "w1", "w2", "w3"]}
    table["base_model_name_or_path"] = str(home / "hf")
    (home / "peft" / "adapter_config.json").write_text(json.dumps(table))
    sizes, tensors = {"w1": (48, 32), "w2": (32, 48), "w3": (48, 32)}, {}
    modules = {f"block_sparse_moe.experts.{e}.{w}": sizes[w] for e in range(4) for w in sizes}
    for layer in range(2):
        for module, (out, inputs) in (modules | {"self_attn.q_proj": (32, 32)}).items():
            key = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{key}.lora_A.weight"] = 0.3 * torch.randn(4, inputs)
            tensors[f"{key}.lora_B.weight"] = 0.3 * torch.randn(out, 4)
    save_file(tensors, home / "peft" / "adapter_model.safetensors", {"format": "pt"})
    opened = open_checkpoint(home / "peft")
    with torch.no_grad():
        wanted = PeftModel.from_pretrained(base, home / "peft").eval()(ids()).logits
    assert torch.allclose(_logits(opened, home / "merged"), wanted, atol=1e-4)


def _logits(checkpoint, folder):
    """Logits of transformers' model of a checkpoint's tensors."""
    from transformers import AutoModelForCausalLM

    from mtcli.core.convert.to_huggingface import to_hf
    from mtcli.core.convert.to_mtcli import WriteOptions

    to_hf(checkpoint, folder, 10**9, WriteOptions())
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(ids()).logits


@pytest.mark.parametrize("kind", ("llama", "gpt2"))
def test_a_step_from_peft_s_adapters_is_peft_s_step(home, kind):
    """Gradients of one step, of adapters that peft has initialised, against torch's autograd."""
    from peft import LoraConfig as Theirs
    from peft import get_peft_model

    base = save_model(home / "hf", kind)
    names = ["q_proj", "v_proj", "down_proj"] if kind == "llama" else ["c_attn", "c_proj"]
    made = Theirs(r=4, lora_alpha=6, target_modules=names, init_lora_weights=False)
    theirs = get_peft_model(base, made)
    theirs.peft_config["default"].base_model_name_or_path = str(home / "hf")
    theirs.save_pretrained(home / "peft")
    targets = json.dumps(names)
    run_config = config(home, "peft", "lora.alpha=6", f"lora.targets={targets}")
    trainer = Trainer(run_config, ALONE)
    start = starting_point(run_config, trainer.groups.world)
    assert start.checkpoint.adapters.lora.alpha == 6
    load_weights(trainer, start.checkpoint)
    loader = open_loader(run_config, trainer.groups)
    step = trainer.train_step(loader)
    data, total = loader.batches, 0.0
    loader.close()
    weight = data.loss_weights(0, 4).sum()
    rows, documents, weights = (f(0, 4) for f in (data.batch, data.documents, data.loss_weights))
    for row, of, counts in zip(rows, documents, weights, strict=True):
        for document in range(of.max() + 1):
            at = (of == document).nonzero()[0]
            labels = torch.from_numpy(row[at])
            taken = torch.from_numpy(counts[at[1:] - 1])
            logits = theirs(labels[None]).logits[0, :-1]
            lost = torch.nn.functional.cross_entropy(logits, labels[1:], reduction="none")
            total = total + (lost * taken).sum() / weight
    assert step.loss == pytest.approx(total.item(), rel=1e-5)
    total.backward()
    squares = sum(p.grad.square().sum() for p in theirs.parameters() if p.requires_grad)
    assert step.grad_norm == pytest.approx(squares.sqrt().item(), rel=1e-4)


def test_adapters_of_peft_in_some_layers_are_no_incomplete_file(home):
    from peft import LoraConfig as Theirs
    from peft import get_peft_model

    theirs = get_peft_model(
        save_model(home / "hf"), Theirs(r=4, target_modules=r".*layers\.0\..*q_proj")
    )
    theirs.peft_config["default"].base_model_name_or_path = str(home / "hf")
    theirs.save_pretrained(home / "peft")
    with pytest.raises(MtcliError, match=r"has 2 of 4 tensors: no .*layers\.1") as caught:
        open_checkpoint(home / "peft")
    hint = caught.value.problems[0].hint
    assert "target_modules='.*layers" in hint and "merge_and_unload" in hint


def test_adapters_of_experts_are_added_to_the_views_that_batched_gemms_return():
    """As a GPU has them where all experts have equally many rows."""
    torch.manual_seed(0)
    experts, rank, x = 2, 3, torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    a, b, w = (torch.randn(experts, *shape).double() for shape in ((rank, 4), (5, rank), (5, 4)))
    sides = {
        side: {"down_proj": torch.nn.Parameter(matrix.flatten(0, 1))}
        for side, matrix in (("a", a), ("b", b))
    }
    site = AdapterSite((LoraTarget("experts.down_proj"),), 1, 1, (0, 1))
    y = LinearFunction.apply(x, w, None, grouped_gemms(x, w, None))
    out = ExpertAdapter(site, sides, 0.5, experts)(x, y, None)
    expected = torch.cat([one @ (w[e] + 0.5 * b[e] @ a[e]).T for e, one in enumerate(x.chunk(2))])
    assert torch.allclose(out, expected, atol=1e-12)
    out.sum().backward()
    assert all(part.grad.norm() > 0 for side in sides.values() for part in side.values())


def test_a_checkpoint_holds_adapters_alone_and_names_their_base(tuned):
    done = open_checkpoint(tuned / "run")
    own = done.adapters.own
    assert all(".adapter." in name for name in own.names())
    table = run_parameters(done.model, LoraConfig(rank=4))
    adapters = sum(p.numel for p in table.values() if p.of_adapter)
    assert sum(record.bytes for name, record in own.files.items() if name.startswith("rank")) < (
        3 * 4 * adapters + 20_000
    )
    assert own.extra["base"]["path"] == str(tuned / "llama")


def test_frozen_weights_have_no_gradients_and_no_state(tuned):
    trainer = Trainer(config(tuned, "llama", "train.precision=bf16", "parallel.zero=1"), ALONE)
    adapters = {name for name, one in trainer.table.items() if one.of_adapter}
    assert set(trainer.strategy.gradients) == set(trainer.optimizer.weights) == adapters
    frozen = {n: s.tensor for n, s in trainer.strategy.shards.items() if n not in adapters}
    assert {tensor.dtype for tensor in frozen.values()} == {torch.bfloat16}
    assert {shard.name for shard in shards(trainer) if "optimizer" not in shard.name} == adapters


def test_a_resumed_run_goes_on_bit_for_bit(home):
    save_model(home / "llama")
    through = run(config(home, "llama", "train.steps=4", f"train.output={home / 'a'}"))
    run(config(home, "llama", "train.steps=4", f"train.output={home / 'b'}", "train.save_every=2"))
    steps = home / "b" / "checkpoints"
    shutil.rmtree(steps / "step-00000004")
    again = config(home, "llama", "train.steps=4", f"train.output={home / 'b'}")
    train(again, ALONE, resume=True)
    resumed = open_checkpoint(home / "b")
    for name in through.adapters.own.names():
        assert torch.equal(through.adapters.own.read(name), resumed.adapters.own.read(name)), name


def replicas_trained(runtime, config, resumes):
    """How many replicas a run has saved, and this one's adapters by name."""
    train(config, runtime, resume=resumes)
    own = open_checkpoint(Path(config.train.output)).adapters.own
    mine = own.replica(runtime.rank) if own.replicas > 1 else own
    return own.replicas, {name: mine.read(name) for name in mine.names() if "/" not in name}


def test_adapters_of_replicas_are_kept_each_and_go_on_bit_for_bit(home):
    save_model(home / "llama")
    sync = ["sync.method=diloco", "sync.period=3", "batch.micro_batch_size=1"]
    sync += ["optimizer.min_lr=5e-3", "train.steps=4"]
    through = config(home, "llama", *sync, f"train.output={home / 'a'}")
    stopped = config(home, "llama", *sync, f"train.output={home / 'b'}", "train.save_every=2")
    whole = run_ranks(2, replicas_trained, through, False)
    run_ranks(2, replicas_trained, stopped, False)
    shutil.rmtree(home / "b" / "checkpoints" / "step-00000004")
    again = run_ranks(2, replicas_trained, stopped, True)
    for (count, one), (_, other) in zip(whole, again, strict=True):
        assert count == 2 and one.keys() == other.keys() and all(".adapter." in n for n in one)
        assert all(torch.equal(one[name], other[name]) for name in one)
    apart = [name for name in whole[0][1] if not torch.equal(whole[0][1][name], whole[1][1][name])]
    assert apart, "the last step is each replica's own"


def test_a_base_that_is_gone_or_changed_is_refused(home):
    save_model(home / "llama")
    run(config(home, "llama"))
    (home / "llama").rename(home / "elsewhere")
    with pytest.raises(MtcliError, match=r"holds adapters of .*llama.*, which is gone"):
        open_checkpoint(home / "run")
    save_model(home / "llama", initializer_range=0.1)
    with pytest.raises(MtcliError, match=r"with the hash .*, and it has now"):
        open_checkpoint(home / "run")


def test_a_run_goes_on_with_a_base_that_has_moved_where_its_weights_are_the_same(home):
    def settings(name, steps):
        output = f"train.output={home / name}"
        return "optimizer.schedule=constant", f"train.steps={steps}", output

    def adapters_of(name):
        own = open_checkpoint(home / name).adapters.own
        return own, {name: own.read(name) for name in own.names()}

    save_model(home / "llama")
    run(config(home, "llama", *settings("whole", 3)))
    _, expected = adapters_of("whole")
    run(config(home, "llama", *settings("half", 2)))
    (home / "llama").rename(home / "elsewhere")
    moved = config(home, "elsewhere", *settings("half", 3))
    save_model(home / "other", initializer_range=0.1)
    with pytest.raises(MtcliError, match=r"holds adapters of .*other with the hash .*it has now"):
        train(config(home, "other", *settings("half", 3)), ALONE, resume=True)
    train(moved, ALONE, resume=True)
    own, found = adapters_of("half")
    assert own.step == 3 and own.extra["base"]["path"] == str(home / "elsewhere")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_adapters_of_another_rank_are_refused(tuned, tmp_path):
    init, output = f"train.init={tuned / 'run'}", f"train.output={tmp_path / 'new'}"
    other = config(tuned, "llama", "lora.rank=2", init, output)
    trainer = Trainer(other, ALONE)
    start = starting_point(other, trainer.groups.world)
    with pytest.raises(MtcliError, match="adapters keep their rank and targets"):
        load_weights(trainer, start.checkpoint)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["parallel.zero=3"], "rank=4 with zero=3"),
        (["train.precision=fp8"], "rank=4 with precision='fp8'"),
        (['lora.targets=["q_prj"]'], "there is no target 'q_prj' in this model"),
        (["lora.rank=0", "lora.alpha=3"], "alpha=3.0 with rank=0, which has no adapters"),
    ],
)
def test_what_adapters_are_not_trained_with_is_refused(tuned, settings, said):
    found = problems(config(tuned, "llama", *settings), 1)
    assert any(said in problem.message for problem in found), found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"use_dora": True}, "use_dora=true cannot be represented"),
        ({"r": 0}, "r=0 is no rank"),
        ({"lora_alpha": "x"}, "lora_alpha='x'"),
        ({"base_model_name_or_path": "nowhere"}, "base_model_name_or_path='nowhere' is no folder"),
        ({"r": 5}, "and [5, 32] by its config"),
        ({"alpha_pattern": {"q_proj": 99}}, "adapters are scaled by 4 and by 24.75"),
        ({"rank_pattern": {"(q|k)_proj": 4}}, "cannot be represented"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern={'q_proj': 0} cannot be represented"),
        ({"target_parameters": "experts"}, "target_parameters='experts' is no list of names"),
    ],
)
def test_settings_of_peft_that_are_not_plain_are_refused(tuned, tmp_path, change, said):
    shutil.copytree(tuned / "peft", tmp_path / "peft")
    path = tmp_path / "peft" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(MtcliError) as caught:
        open_checkpoint(tmp_path / "peft")
    assert said in str(caught.value)


def test_adapters_for_adapters_that_could_be_themselves_are_refused(tuned, tmp_path):
    shutil.copytree(tuned / "peft", tmp_path / "peft")
    path = tmp_path / "peft" / "adapter_config.json"
    own = {"base_model_name_or_path": str(tmp_path / "peft")}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    for read in (open_checkpoint, lambda folder: model_of(find_checkpoint(folder))):
        with pytest.raises(MtcliError, match="peft' holds adapters, and no weights"):
            read(tmp_path / "peft")
