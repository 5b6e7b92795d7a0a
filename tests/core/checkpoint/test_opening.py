"""Opening checkpoints: where they are looked for, and damage of every kind is named."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hostile import write_manifest
from hypothesis import given
from hypothesis import strategies as st
from saving import MODEL, save_halves, values

from mtcli.core.checkpoint import safetensors_file
from mtcli.core.checkpoint.compatibility import require_model
from mtcli.core.checkpoint.integrity import verify_hashes, verify_weights
from mtcli.core.checkpoint.manifest import BLOCK_BYTES, Manifest, read_manifest
from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.config.errors import Exit, MtcliError
from mtcli.core.config.model import ModelConfig
from mtcli.core.mesh.sharding import Box

RANK = "rank-00001.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of steps 1 and 2."""
    root = tmp_path_factory.mktemp("saved")
    for step in (1, 2):
        save_halves(root, step)
    return root


@pytest.fixture
def run(saved, tmp_path):
    """A run folder with steps 1 and 2."""
    shutil.copytree(saved, tmp_path / "checkpoints")
    return tmp_path


def newest(run):
    return run / "checkpoints" / "step-00000002"


def edit_manifest(folder, change):
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    write_manifest(folder / "manifest.json", manifest)


def test_a_config_with_an_illegal_field_is_named(run):
    path = newest(run) / "config.toml"
    path.write_text(path.read_text().replace("num_layers = 2", "num_layers = 0"))
    with pytest.raises(MtcliError, match="config.toml: model.num_layers: 0 should be at least"):
        open_checkpoint(run)
    path.unlink()
    with pytest.raises(MtcliError, match="has no config.toml, and its manifest no model"):
        open_checkpoint(newest(run))


def test_a_checkpoint_of_no_tensors_is_refused(run):
    edit_manifest(newest(run), lambda manifest: manifest.update(tensors={}))
    with pytest.raises(MtcliError, match="manifest.json is damaged: tensors: .* at least 1 item"):
        open_checkpoint(newest(run))


def test_a_path_that_the_system_refuses_is_wrong_input():
    with pytest.raises(MtcliError, match="x cannot be opened: File name too long") as error:
        open_checkpoint(Path("x" * 300))
    assert error.value.code == Exit.WRONG_INPUT


def test_a_run_folder_opens_its_newest_step(run):
    assert open_checkpoint(run).step == 2
    assert open_checkpoint(run / "checkpoints").step == 2
    assert open_checkpoint(run / "checkpoints" / "step-00000001").step == 1


def test_steps_are_ordered_by_number_and_not_by_name(tmp_path):
    for step in (99_999_999, 100_000_000):
        save_halves(tmp_path, step)
    assert open_checkpoint(tmp_path).step == 100_000_000


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("", "holds no checkpoint"),
        ("none", "there is no folder"),
        ("tiny", "there is no folder"),  # a folder of a preset's name is no preset
        ("file", "is a file, and a checkpoint is a folder"),
    ],
)
def test_a_folder_without_a_checkpoint_is_refused(tmp_path, name, expected):
    folder = tmp_path / name
    if name == "file":
        folder.touch()
    with pytest.raises(MtcliError, match=expected) as error:
        open_checkpoint(folder)
    assert error.value.code == Exit.WRONG_INPUT
    assert error.value.problems[0].hint


def test_a_preset_is_refused_as_it_has_no_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MtcliError, match="tiny is a preset, which has no weights"):
        open_checkpoint(Path("tiny"))


def test_a_missing_file_is_named_and_the_checkpoint_before_is_offered(run):
    (newest(run) / RANK).unlink()
    with pytest.raises(MtcliError, match=f"{RANK} is damaged: it cannot be opened") as error:
        open_checkpoint(run)
    expected = f"the checkpoint before it is whole: {run / 'checkpoints' / 'step-00000001'}; "
    assert error.value.problems[0].hint == expected + "move step-00000002 away to go on there"


def test_where_no_checkpoint_is_whole_none_is_offered(run):
    for step in (run / "checkpoints").iterdir():
        (step / RANK).unlink()
    with pytest.raises(MtcliError, match="step-00000002/rank") as error:
        open_checkpoint(run)
    assert "before it" not in str(error.value)


def test_a_truncated_file_is_named(run):
    path = newest(run) / RANK
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    expected = f"it has {size - 1} bytes and the manifest says {size}"
    with pytest.raises(MtcliError, match=expected):
        open_checkpoint(newest(run))


@given(st.data())
def test_every_flipped_bit_is_found_by_opening_or_by_the_hashes(tmp_path_factory, data):
    run = tmp_path_factory.getbasetemp() / "flip"
    if not run.exists():
        save_halves(run, 1, tensors={"x": torch.ones(4, 2)})
    folder = run / "step-00000001"
    path = folder / data.draw(st.sampled_from(["rank-00000.safetensors", RANK, "config.toml"]))
    good = path.read_bytes()
    bad = bytearray(good)
    bad[data.draw(st.integers(0, len(good) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(bad)
    try:
        with pytest.raises(MtcliError) as error:
            verify_hashes(open_checkpoint(folder))
        assert path.name in str(error.value) or "config" in path.name
    finally:
        path.write_bytes(good)


def test_ranks_share_the_files_to_hash(run):
    path = newest(run) / RANK
    bad = bytearray(path.read_bytes())
    bad[-1] ^= 1
    path.write_bytes(bad)
    checkpoint = open_checkpoint(newest(run))
    found = []
    for part in range(4):
        try:
            verify_hashes(checkpoint, part, 4)
        except MtcliError as error:
            found.append(str(error))
    assert len(found) == 1
    assert f"{RANK} is damaged: the bytes from 0 do not have the manifest's hash" in found[0]


def test_who_reads_weights_alone_hashes_no_optimizer_state(tmp_path):
    half = BLOCK_BYTES // 2  # elements, of which each rank has half: one block
    tensors = {"x": torch.ones(half), "optimizer.exp_avg/x": torch.ones(half)}
    save_halves(tmp_path, 1, tensors=tensors)
    folder = tmp_path / "step-00000001"
    path = folder / RANK
    good = path.read_bytes()
    header = safetensors_file.read_header(path)
    damage = {name: header[name].offset + header[name].bytes - 1 for name in tensors}
    for name, at in damage.items():
        path.write_bytes(good[:at] + b"!" + good[at + 1 :])
        checkpoint = open_checkpoint(folder)
        if name == "x":
            with pytest.raises(MtcliError, match=f"the bytes from {BLOCK_BYTES} do not"):
                verify_weights(checkpoint)
        else:
            verify_weights(checkpoint)
            with pytest.raises(MtcliError, match=f"{RANK} is damaged"):
                verify_hashes(checkpoint)


def test_a_file_with_too_few_hashes_is_refused(run):
    edit_manifest(newest(run), lambda m: m["files"][RANK].update(xxh3_128=[]))
    with pytest.raises(MtcliError, match="it has 1 blocks and 0 hashes"):
        verify_hashes(open_checkpoint(newest(run)))


def test_a_file_that_goes_while_it_is_hashed_is_named(run):
    checkpoint = open_checkpoint(newest(run))
    (newest(run) / RANK).unlink()
    with pytest.raises(MtcliError, match=f"{RANK} is damaged: it cannot be read .No such file"):
        verify_hashes(checkpoint)


def test_a_header_that_disagrees_with_the_manifest_is_refused(run):
    path = newest(run) / RANK
    path.write_bytes(path.read_bytes().replace(b'"final_norm.bias"', b'"final_norm.bia5"'))
    with pytest.raises(MtcliError, match=r"it has no tensor final_norm\.bias"):
        open_checkpoint(newest(run))
    path.write_bytes(path.read_bytes().replace(b'"final_norm.bia5"', b'"final_norm.bias"'))
    path.write_bytes(path.read_bytes().replace(b'"shape":[6,12]', b'"shape":[12,6]'))
    with pytest.raises(MtcliError, match=r"is F32 \[12, 6\] and should be F32 \[6, 12\]"):
        open_checkpoint(newest(run))


BAD_MANIFESTS = (
    (lambda m: m.update(version="2"), "version"),
    (lambda m: m.update(format="other"), "format"),
    (lambda m: m.update(surprise=1), "surprise: Extra inputs"),
    (lambda m: m.pop("step"), "step: Field required"),
    (lambda m: m.update(step=-1), "step"),
    (lambda m: m["files"].update({"../x": {"bytes": 0, "xxh3_128": []}}), "files"),
    (lambda m: m["files"].update({"/etc/passwd": {"bytes": 0, "xxh3_128": []}}), "files"),
    (lambda m: m["files"].update({"a/../b": {"bytes": 0, "xxh3_128": []}}), "files"),
    (lambda m: m["tensors"]["final_norm.bias"].update(dtype="int8"), "dtype"),
    (lambda m: piece(m).update(file="rank-00009.safetensors"), "which it does not list"),
    (lambda m: piece(m).update(file="../../secret"), "file"),
    (lambda m: piece(m).update(size=[5]), "hold 11 of its 12 elements"),
    (lambda m: piece(m).update(start=[7]), "leave its shape"),
    (lambda m: piece(m).update(start=[6, 0]), "do not have the 1 dimensions"),
    (lambda m: piece(m).update(start=[0]), "overlap at"),
)  # fmt: skip


def test_a_manifest_that_cannot_be_true_is_refused(run, subtests):
    path = newest(run) / "manifest.json"
    whole = path.read_text()
    for change, message in BAD_MANIFESTS:
        with subtests.test(message):
            path.write_text(whole)
            edit_manifest(newest(run), change)
            with pytest.raises(MtcliError, match=r"manifest\.json is damaged") as error:
                open_checkpoint(newest(run))
            assert message in str(error.value)


@pytest.mark.parametrize("version", [1, 6])
def test_a_checkpoint_of_another_version_says_both_versions(run, version):
    edit_manifest(newest(run), lambda m: m.update(version=version))
    with pytest.raises(MtcliError) as error:
        open_checkpoint(newest(run))
    expected = f"is of version {version} of the format, and this mtcli reads 2, 3, 4 and 5"
    assert expected in str(error.value) and "mtcli shard SRC DST --to hf" in str(error.value)
    assert "damaged" not in str(error.value)


def piece(manifest):
    return manifest["tensors"]["final_norm.bias"]["pieces"][1]


def test_a_manifest_that_is_not_json_is_refused(run):
    for text in (b"", b"[]", b"{" * 10_000, b"\xff", b'{"step": 1e999}'):
        (newest(run) / "manifest.json").write_bytes(text)
        with pytest.raises(MtcliError, match=r"manifest\.json is damaged"):
            open_checkpoint(newest(run))


def test_a_manifest_that_is_too_long_is_refused(run, monkeypatch):
    monkeypatch.setattr("mtcli.core.checkpoint.manifest.MAX_MANIFEST_BYTES", 100)
    with pytest.raises(MtcliError, match="it has more than 100 bytes"):
        open_checkpoint(newest(run))


def test_a_folder_without_a_manifest_is_said_to_have_none(tmp_path):
    with pytest.raises(MtcliError, match=r"manifest\.json cannot be read: No such file"):
        read_manifest(tmp_path)


def test_pieces_cut_in_absurdly_many_ways_are_refused(run, monkeypatch):
    monkeypatch.setattr("mtcli.core.checkpoint.shard_index.MAX_CELLS", 2)
    with pytest.raises(MtcliError, match="are cut in more than 2 ways"):
        open_checkpoint(newest(run))


def test_a_manifest_comes_back_as_it_was(run):
    manifest = read_manifest(newest(run))
    assert Manifest.model_validate_json(manifest.to_bytes()) == manifest


def test_any_flipped_bit_of_a_manifest_is_laid_on_the_manifest(run):
    """Whatever it turns a step, a hash of a file or the version into."""
    path = newest(run) / "manifest.json"
    whole = path.read_bytes()
    for at in {*range(0, len(whole), 97), *range(60), *range(len(whole) - 60, len(whole))}:
        for bit in (0, 2, 6):
            text = bytearray(whole)
            text[at] ^= 1 << bit
            path.write_bytes(text)
            with pytest.raises(MtcliError) as error:
                verify_hashes(open_checkpoint(newest(run)))
            assert str(error.value).startswith(f"error: {path} is "), (at, bit)
            assert RANK not in error.value.problems[0].message
    path.write_bytes(whole)
    verify_hashes(open_checkpoint(newest(run)))


def test_a_manifest_of_version_2_has_no_hash_of_its_own_and_is_read(run):
    path = newest(run) / "manifest.json"
    table = json.loads(path.read_text())
    del table["xxh3_128"]
    path.write_text(json.dumps(table))
    with pytest.raises(MtcliError, match="manifest.json is damaged: it does not end with its own"):
        open_checkpoint(run)
    path.write_text(json.dumps(table | {"version": 2}))
    assert open_checkpoint(run).step == 2
    verify_hashes(open_checkpoint(run))


def test_a_box_is_read_across_pieces(run):
    checkpoint = open_checkpoint(run)
    box = Box((5, 3), (4, 2))  # rows 5 and 6 are rank 0's, 7 and 8 rank 1's
    expected = values()["embedding.weight"][5:9, 3:5]
    assert torch.equal(checkpoint.read("embedding.weight", box), expected)
    empty = checkpoint.read("embedding.weight", Box((13, 0), (0, 12)))
    assert empty.shape == (0, 12)


def test_a_box_outside_its_tensor_is_refused(run):
    checkpoint = open_checkpoint(run)
    for box in (((12, 0), (2, 12)), ((-1, 0), (1, 1)), ((0,), (1,))):
        with pytest.raises(MtcliError, match=r"weight has the shape \(13, 12\) and the box"):
            checkpoint.read("embedding.weight", Box(*box))


def test_an_unknown_tensor_is_answered_with_a_near_name(run):
    with pytest.raises(MtcliError, match=r"has no tensor 'embeding.weight'") as error:
        open_checkpoint(run).read("embeding.weight")
    assert "embedding.weight" in error.value.problems[0].hint


def test_a_checkpoint_of_another_model_is_refused_with_what_differs(run):
    checkpoint = open_checkpoint(run)
    require_model(checkpoint, MODEL)
    other = ModelConfig.model_validate(MODEL.model_dump() | {"num_layers": 3, "vocab_size": 14})
    with pytest.raises(MtcliError) as error:
        require_model(checkpoint, other)
    message = str(error.value)
    assert (
        f"embedding.weight is (13, 12) in {checkpoint.folder} and (14, 12) in the model" in message
    )
    assert "has no tensor blocks.2.attention_norm.weight" in message
    assert "the checkpoint is of another model" in message
