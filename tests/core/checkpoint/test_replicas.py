"""Data-parallel replicas that differ: each is written and read as its own, and equal ones once."""

import hashlib
import json
import shutil
from copy import deepcopy
from functools import cache

import pytest
import torch
from hostile import write_manifest
from safetensors.torch import load_file
from saving import CONFIG, MODEL, on_ranks, save_halves, values

from mtcli.core.checkpoint.integrity import verify_hashes
from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.checkpoint.store import Shard, save
from mtcli.core.config.errors import Exit, MtcliError
from mtcli.core.config.loading import dump_toml
from mtcli.core.convert.inspect import describe
from mtcli.core.convert.layout import parse_layout
from mtcli.core.convert.shard import ConversionPlan, compare, convert
from mtcli.core.convert.to_mtcli import WriteOptions, to_mtcli
from mtcli.core.convert.upcycle import upcycled
from mtcli.core.convert.upcycle_recipe import UpcycleRecipe
from mtcli.core.convert.verify import differences
from mtcli.core.mesh.sharding import Box

EQUAL = "final_norm.bias"  # on all replicas
W = "blocks.1.mlp.up.weight"


@cache
def of_replicas(count=2):
    """The tensors of each replica: of another seed but for EQUAL."""
    tables = [values(seed=replica) for replica in range(count)]
    return [table | {EQUAL: tables[0][EQUAL]} for table in tables]


def shards_of(rank, replicas):
    """What rank 2 dp + tp saves: tp's half of each tensor of replica dp, and EQUAL where dp = 0."""
    dp, tp = divmod(rank, 2)
    found = []
    for name, tensor in replicas[dp].items():
        first, second = tensor.tensor_split(2)
        start = (len(first) * tp,) + (0,) * (tensor.dim() - 1)
        shard = Shard(name, (first, second)[tp], start, tuple(tensor.shape))
        if name != EQUAL:
            found.append(shard._replace(replica=dp))
        elif dp == 0:
            found.append(shard)
    return found


def save_replicas(root, replicas, without=None):
    """Saves from 2 ranks of each replica; their results."""
    count = len(replicas)
    about = {"extra": {}, "config_toml": dump_toml(CONFIG), "tokenizer": None, "keep": 0}

    def work(rank, ranks):
        shards = [s for s in shards_of(rank, replicas) if (rank, s.name) != without]
        return save(root, 1, shards, ranks=ranks, replicas=count, **about)

    return on_ranks(2 * count, work)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of two replicas that differ."""
    return save_replicas(tmp_path_factory.mktemp("saved"), of_replicas())[0]


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of it, to be read or changed."""
    return shutil.copytree(saved, tmp_path / saved.name)


def digest(tensor):
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def edit(folder, change):
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    write_manifest(folder / "manifest.json", manifest)


def test_each_replica_is_read_back_as_it_was(folder):
    checkpoint, expected = open_checkpoint(folder), of_replicas()
    assert checkpoint.replicas == 2
    for replica, tensors in enumerate(expected):
        alone = checkpoint.replica(replica)
        for name, tensor in tensors.items():
            assert digest(checkpoint.read(name, replica=replica)) == digest(tensor), name
            assert digest(alone.read(name)) == digest(tensor), name
    assert not torch.equal(checkpoint.read(W, replica=0), checkpoint.read(W, replica=1))
    assert digest(checkpoint.read(EQUAL)) == digest(expected[1][EQUAL])
    verify_hashes(checkpoint)


def test_a_tensor_that_replicas_share_is_written_once(folder):
    files = [load_file(folder / f"rank-{rank:05d}.safetensors") for rank in range(4)]
    assert [EQUAL in file for file in files] == [True, True, False, False]
    assert all(W in file for file in files)
    expected = of_replicas()[1][W].tensor_split(2)[0]
    assert torch.equal(files[2][W], expected)


def test_a_manifest_of_equal_replicas_says_nothing_of_them(tmp_path):
    """It is of version 3, which older readers read."""
    folder = save_replicas(tmp_path / "a", of_replicas(1))[0]
    text = (folder / "manifest.json").read_bytes()
    assert json.loads(text)["version"] == 3 and b"replica" not in text
    unnamed, _ = save_halves(tmp_path / "b", tensors=values(), extra={})
    assert (unnamed / "manifest.json").read_bytes() == text


def test_which_replica_is_to_be_said_where_they_differ(folder):
    checkpoint = open_checkpoint(folder)
    message = rf"{W} differs between the 2 replicas of .*, and "
    with pytest.raises(MtcliError, match=message + "none is named"):
        checkpoint.read(W)
    with pytest.raises(MtcliError, match=message + "there is no replica 2"):
        checkpoint.read(W, replica=2)


@pytest.mark.parametrize("rank", [0, 3])
def test_a_box_that_a_replica_lacks_is_refused_by_every_rank(tmp_path, rank):
    for error in save_replicas(tmp_path, of_replicas(), without=(rank, W)):
        assert isinstance(error, MtcliError) and error.code == Exit.FAILED
        assert f"the pieces of replica {rank // 2} of {W} hold 120 of its 240 elements" in str(
            error
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["tensors"][W]["pieces"].pop(), f"replica 1 of {W} hold 120 of its 240"),
        (lambda m: m.update(replicas=3), "replica 2 of .* hold 0 of its"),
        (lambda m: m.update(replicas=1), r"it has replica 1 of .* and says that there are 1"),
        (lambda m: m.update(replicas=0), "replicas: Input should be greater"),
        (lambda m: m["tensors"][W]["pieces"][0].update(replica=-1), "replica: Input should be"),
        (lambda m: m["tensors"][W]["pieces"][0].update(replica=1), f"replica 0 of {W} hold 120"),
        (lambda m: m["tensors"][W]["pieces"][0].update(replica=None), f"1 of {W} hold 360 of"),
    ],
)
def test_a_manifest_whose_replicas_cannot_be_true_is_refused(folder, change, message):
    edit(folder, change)
    with pytest.raises(MtcliError, match=rf"manifest\.json is damaged: .*{message}"):
        open_checkpoint(folder)


def test_damage_to_one_replica_is_found(folder):
    path = folder / "rank-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(MtcliError, match=r"rank-00002\.safetensors is damaged"):
        verify_hashes(open_checkpoint(folder))


@pytest.mark.parametrize("layout", ["dp=2,tp=2,pp=2", "dp=2,zero=1", "dp=2,zero=3"])
def test_a_layout_of_as_many_replicas_copies_each_to_one(folder, tmp_path, layout):
    source = open_checkpoint(folder)
    to_mtcli(source, tmp_path / "dst", *parse_layout(layout), WriteOptions(nproc=2))
    found = open_checkpoint(tmp_path / "dst")
    for replica, tensors in enumerate(of_replicas()):
        for name, tensor in tensors.items():
            assert digest(found.read(name, replica=replica)) == digest(tensor), name
    assert not found.tensors[EQUAL].differs
    verify_hashes(found)


def mean_of(replicas, name):
    """The mean of a tensor over replicas, in float64, rounded once."""
    exact = torch.stack([tensors[name].double() for tensors in replicas]).mean(0)
    return exact.to(replicas[0][name].dtype)


def plan_of(to, layout="", recipe=None):
    return ConversionPlan(to, parse_layout(layout), None, 10**9, True, False, recipe, 1)


@pytest.mark.parametrize("layout", ["tp=2", "dp=4"])
def test_a_layout_of_another_number_of_replicas_has_their_average(folder, tmp_path, layout):
    facts = convert(open_checkpoint(folder), tmp_path / "d", plan_of("mtcli", layout))
    assert facts["averaged_replicas"] == 2 and facts["logits_apart"] == 0.0
    found, replicas = open_checkpoint(tmp_path / "d"), of_replicas()
    averaged = open_checkpoint(folder).averaged()
    assert found.replicas == 1
    for name in replicas[0]:
        whole = found.read(name)
        assert torch.equal(whole, mean_of(replicas, name)), name
        box = Box((1,) * whole.dim(), (1,) * whole.dim())
        assert torch.equal(averaged.read(name, box), found.read(name, box))


def test_an_average_of_three_is_exported_to_hugging_face_as_it_is(tmp_path):
    replicas = of_replicas(3)
    source = open_checkpoint(save_replicas(tmp_path / "run", replicas)[0])
    facts = convert(source, tmp_path / "hf", plan_of("hf"))
    assert facts["averaged_replicas"] == 3
    found = open_checkpoint(tmp_path / "hf")
    for name in found.names():
        assert torch.equal(found.read(name), mean_of(replicas, name)), name
    assert compare(source, found, None, False, 1)["averaged_replicas"] == 3


def test_experts_are_made_of_the_average(folder):
    sizes = {"num_experts": 2, "top_k": 1, "moe_ffn_hidden_size": MODEL.ffn_hidden_size}
    model = MODEL.model_copy(update=sizes)
    found = upcycled(open_checkpoint(folder), UpcycleRecipe(model, 1, 1))
    assert torch.equal(found.read(EQUAL), of_replicas()[0][EQUAL])
    name = "blocks.1.attention.qkv.weight"
    assert torch.equal(found.read(name), mean_of(of_replicas(), name))


def test_a_conversion_of_replicas_is_proved_bit_by_bit_and_by_the_logits_of_each(folder, tmp_path):
    source, target = open_checkpoint(folder), tmp_path / "dst"
    plan = ConversionPlan("mtcli", parse_layout("dp=2"), None, 10**9, True, False, None, 1)
    facts = convert(source, target, plan)
    assert facts["tensors_equal"] == len(of_replicas()[0]) and facts["logits_apart"] == 0.0
    assert compare(source, open_checkpoint(target), None, True, 1)["optimizer"] == "the same"


def test_a_difference_in_one_replica_is_named(folder, tmp_path):
    other, source = deepcopy(of_replicas()), open_checkpoint(folder)
    other[1][W][0, 0] += 1.0
    found = list(differences(source, open_checkpoint(save_replicas(tmp_path / "b", other)[0])))
    assert [difference.name for difference in found] == [W]
    assert "differs in 1 of 480 elements" in found[0].what
    one = open_checkpoint(save_replicas(tmp_path / "c", of_replicas(1))[0])
    found = {difference.name: difference.what for difference in differences(source, one)}
    assert found[W] == "is of 2 and of 1 replicas" and EQUAL not in found


def test_inspect_counts_the_bytes_of_every_replica(folder):
    facts, tensors = describe(open_checkpoint(folder)), of_replicas()[0]
    assert facts["replicas"] == 2
    sizes = {name: tensor.nbytes * (1 if name == EQUAL else 2) for name, tensor in tensors.items()}
    assert facts["bytes"] == sum(sizes.values())
    assert facts["largest_tensor_bytes"] == max(sizes.values())
