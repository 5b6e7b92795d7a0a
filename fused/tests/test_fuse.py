"""fuse and unfuse: what any module becomes, what is refused and why, and the way back."""

import copy

import pytest
import torch
import torch.nn.functional as F
from alone import assert_runs_as_its_models, assert_same_state, made, seeded
from torch import nn

import mtcli_fused as fused
from mtcli.core.config.errors import MtcliError

B = 3


def small(width=4, **options):
    return nn.Sequential(nn.Linear(4, width, **options), nn.ReLU(), nn.Linear(width, 2))


class Tied(nn.Module):
    """A language model with positions, whose head is its token table."""

    def __init__(self, positions=8):
        super().__init__()
        self.tok, self.pos = nn.Embedding(9, 4), nn.Embedding(positions, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, ids):
        at = torch.arange(ids.shape[1])
        return self.head(self.tok(ids) + self.pos(at))


class Vision(nn.Module):
    """Tokens of patches with parameters of its own: a class token and positions."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 2, 2)
        self.cls = nn.Parameter(torch.zeros(1, 1, 8))
        self.positions = nn.Parameter(torch.zeros(1, 5, 8))
        self.register_buffer("mean", torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)

    def forward(self, x):
        x = self.patches(x - self.mean).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.positions
        return self.layer(x)[:, 0]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.scale


class MeanOfBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        x = self.layer(x)
        return x - x.mean(0)


class Frames(nn.Module):
    """Gives its layer more rows than samples."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x.view(-1, 4)).view(x.shape)


def test_models_come_back_bit_for_bit_and_share_no_memory():
    models = made(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), small(5)))
    models[0][0].weight.requires_grad_(False)
    for model in models[1:]:
        model[0].weight.requires_grad_(False)
    array = fused.fuse(models)
    for one, model in zip(fused.unfuse(array), models, strict=True):
        assert_same_state(one, model)
        for p, q in zip(one.parameters(), model.parameters(), strict=True):
            assert torch.equal(p, q) and p.requires_grad == q.requires_grad
            assert p.data_ptr() != q.data_ptr() and p.is_contiguous()
        assert vars(one[0]).keys() == vars(model[0]).keys()
        x = seeded(2, 3, 4, 4)
        assert torch.equal(one[0](x), model[0](x))
    again = fused.fuse(fused.unfuse(array))
    for p, q in zip(array.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_dict_of_state_has_the_models_names_with_a_leading_dimension():
    models = made(small)
    state = fused.fuse(models).model.state_dict()
    stacked = {k: torch.stack([m.state_dict()[k] for m in models]) for k in models[0].state_dict()}
    assert list(state) == list(stacked)
    assert all(torch.equal(state[k], stacked[k]) for k in state)


def test_an_array_saved_and_loaded_computes_the_same():
    array, other = fused.fuse(made(small)), fused.fuse(made(small, seed=1))
    other.load_state_dict(array.state_dict())
    assert torch.equal(other(seeded(B, 2, 4)), array(seeded(B, 2, 4)))


def test_tied_weights_stay_tied_and_positions_have_no_batch():
    ids = torch.randint(9, (B, 4, 5))
    array = assert_runs_as_its_models(Tied, ids, positions=["pos"])
    assert array.model.head.weight is array.model.tok.weight
    for one in fused.unfuse(array):
        assert one.head.weight is one.tok.weight
    assert_runs_as_its_models(Tied, torch.randint(9, (B, 4, 12))[:, :, :8], positions=["pos"])


def test_as_many_positions_as_rows_are_no_labels():
    with pytest.raises(MtcliError, match=r"ids of shape \[6\] may be positions, or a label"):
        fused.fuse(made(Tied))(torch.randint(9, (B, 2, 6)))
    assert_runs_as_its_models(Tied, torch.randint(9, (B, 2, 6)), positions=["pos"])


def test_parameters_of_a_users_module_that_broadcast_over_the_batch_are_each_models_own():
    array = assert_runs_as_its_models(Vision, seeded(B, 2, 3, 4, 4))
    assert torch.equal(array.model.mean, torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1))
    fused.verify(array, seeded(B, 2, 3, 4, 4))


def test_a_module_used_twice_is_fused_once():
    layer = lambda: nn.Linear(4, 4)  # noqa: E731

    def make():
        one = layer()
        return nn.Sequential(one, nn.Tanh(), one)

    array = assert_runs_as_its_models(make, seeded(B, 2, 4))
    assert array.model[0] is array.model[2]


def test_a_subclass_that_keeps_torchs_forward_is_fused_and_one_with_its_own_is_not():
    class Named(nn.Linear):
        pass

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    array = assert_runs_as_its_models(lambda: Named(4, 2), seeded(B, 2, 4))
    assert type(fused.unfuse(array)[0]) is Named
    with pytest.raises(MtcliError, match="Doubled has weight"):
        fused.fuse(made(lambda: Doubled(4, 2)))


def test_blocks_that_are_kept_run_as_modules_and_may_be_unlike():
    x = seeded(B, 5, 4)
    array = assert_runs_as_its_models(small, x, keep=["2"])
    owners = {name: owner for name, _, owner in array.named_slots()}
    assert owners["model.0.weight"] is None and owners["model.2.models.1.weight"] == 1
    activations = [nn.Tanh(), nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 4)), nn.ReLU()]
    models = [nn.Sequential(nn.Linear(4, 4), one, nn.Linear(4, 2)).double() for one in activations]
    array = fused.fuse(models, keep=["1"])
    array(x).sum().backward()
    for b, (one, model) in enumerate(zip(fused.unfuse(array), models, strict=True)):
        torch.testing.assert_close(array(x)[b], model(x[b]))
        assert_same_state(one, model)


def test_blocks_are_kept_by_pattern_and_with_buffers_and_masks():
    make = lambda: nn.Sequential(  # noqa: E731
        nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.Sequential(nn.Conv1d(8, 8, 3), nn.BatchNorm1d(8))
    )
    assert_runs_as_its_models(make, seeded(B, 4, 3, 6), keep=["*1"])
    layer = lambda: nn.TransformerEncoderLayer(6, 2, 8, 0.0)  # noqa: E731
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    assert_runs_as_its_models(layer, seeded(B, 5, 2, 6), fused.Shared(mask), keep=["self_attn"])


def test_a_copy_of_an_array_is_an_array_of_its_own():
    array = fused.fuse(made(small))
    other = copy.deepcopy(array)
    x, y = seeded(B, 2, 4), seeded(B, 7, 4)
    before = array(x)
    other(y)
    assert torch.equal(array(x), before)


def test_models_on_one_batch_take_it_expanded():
    models = made(small)
    x = seeded(5, 4)
    y = fused.fuse(models)(x.expand(B, 5, 4))
    for b, model in enumerate(models):
        torch.testing.assert_close(y[b], model(x))


def test_attributes_of_users_modules_keep_their_names_and_come_back():
    class Own(Vision):
        def __init__(self):
            super().__init__()
            self.array, self.values, self.batch_dim, self.stacked = [1], {"a": 2}, 3, 4

        def forward(self, *images, scale=1.0):
            return super().forward(images[0] + images[1]) * scale * self.batch_dim

    images = seeded(B, 2, 3, 4, 4), seeded(B, 2, 3, 4, 4, seed=1)
    array = assert_runs_as_its_models(Own, *images)
    one = fused.unfuse(array)[1]
    assert (one.array, one.values, one.batch_dim, one.stacked) == ([1], {"a": 2}, 3, 4)
    with pytest.raises(MtcliError, match="different numbers of samples"):
        array(images[0], images[1][:, :1])


def test_differences_of_a_module_do_not_hide_those_of_its_children():
    models = [small(), small(5)]
    models[0].note, models[1].note = "a", "b"
    with pytest.raises(MtcliError) as error:
        fused.fuse(models)
    text = str(error.value)
    assert "note='a' in model 0, note='b' in model 1" in text and "0: weight [4, 4]" in text


def test_every_difference_is_named_with_both_values():
    one = nn.Sequential(nn.Linear(4, 5), nn.Conv1d(3, 4, 3), nn.LayerNorm(4), nn.Tanh(), small())
    other = nn.Sequential(
        nn.Linear(4, 6), nn.Conv1d(3, 4, 3, stride=2), nn.LayerNorm(4, bias=False), nn.ReLU(),
        nn.Sequential(nn.Linear(4, 4)),
    )  # fmt: skip
    with pytest.raises(MtcliError) as error:
        fused.fuse([one, copy.deepcopy(one), other])
    text = str(error.value)
    assert "0: weight [5, 4] float32 on cpu in model 0, weight [6, 4] float32 on cpu in m" in text
    assert "1: stride=(1,) in model 0, stride=(2,) in model 2" in text
    assert "2: bias [4] float32 on cpu in model 0, bias None in model 2" in text
    assert "3: Tanh in model 0, ReLU in model 2" in text
    assert "4: children ['0', '1', '2'] in model 0, children ['0'] in model 2" in text
    assert "keep=('1',)" in text


def test_modes_dtypes_and_activations_of_layers_must_be_equal():
    with pytest.raises(MtcliError, match="training=True in model 0, training=False in model 1"):
        fused.fuse([small(), small().eval()])
    with pytest.raises(MtcliError, match="float32 on cpu in model 0, weight .* float64"):
        fused.fuse([small(), small().double()])
    layers = [nn.TransformerEncoderLayer(4, 2, 8, activation=f) for f in (F.relu, F.gelu)]
    with pytest.raises(MtcliError, match="activation=relu in model 0, activation=gelu in model 1"):
        fused.fuse(layers)
    frozen = small().requires_grad_(False)
    with pytest.raises(MtcliError, match="without gradient in model 1"):
        fused.fuse([small(), frozen])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.LSTM(4, 4), "LSTM has weight_ih_l0 [16, 4] of its own, and no fused form"),
        (Scaled, "Scaled has scale [4] of its own, and no fused form"),
        (lambda: nn.Sequential(nn.Flatten(0)), "0: Flatten works along dimension 0"),
        (lambda: nn.Sequential(nn.MSELoss()), "0: MSELoss reduces over the batch"),
        (lambda: nn.Embedding(4, 2, max_norm=1.0), "Embedding with max_norm"),
        (lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True), "with add_bias_kv"),
        (
            lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
            "has parametrizations",
        ),
    ],
    ids=["lstm", "own", "flatten", "loss", "max_norm", "bias_kv", "weight_norm"],
)
def test_what_has_no_fused_form_is_refused_with_the_way_out(make, message):
    with pytest.raises(MtcliError) as error:
        fused.fuse([make(), make()])
    assert message in str(error.value)
    assert "hint:" in str(error.value)


def test_hooks_plain_lists_and_ties_of_some_models_are_refused():
    hooked = [small() for _ in range(2)]
    for model in hooked:
        model[0].register_forward_hook(lambda *args: None)
    with pytest.raises(MtcliError, match="0: Linear has hooks"):
        fused.fuse(hooked)
    listed = [small() for _ in range(2)]
    for model in listed:
        model.layers = [nn.Linear(2, 2)]
    with pytest.raises(MtcliError, match=r"Sequential.layers has modules in a plain container"):
        fused.fuse(listed)
    tied = Tied()
    untied = Tied()
    untied.head.weight = nn.Parameter(untied.tok.weight.detach().clone())
    for models in ([tied, untied], [untied, tied]):
        with pytest.raises(MtcliError, match=r"head.weight: .* not all models share"):
            fused.fuse(models)
    with pytest.raises(MtcliError, match="not all models share"):
        fused.fuse([Tied(), Tied()], keep=["head"])


def test_names_that_no_module_has_are_refused_with_the_nearest():
    with pytest.raises(MtcliError, match=r"hint: pos"):
        fused.fuse([Tied(), Tied()], positions=["poss"])
    with pytest.raises(MtcliError, match="no module of the models has this name"):
        fused.fuse([small()], keep=["layer9"])
    with pytest.raises(MtcliError, match="no models"):
        fused.fuse([])


def test_arguments_of_other_shapes_are_refused_with_theirs():
    array = fused.fuse([small() for _ in range(B)])
    with pytest.raises(MtcliError, match=r"shape \[2, 4\] is not \[3, N, ...\]"):
        array(torch.zeros(2, 4))
    with pytest.raises(MtcliError, match=r"shape \[3\] is not"):
        array(torch.zeros(3))
    layer = fused.fuse([nn.TransformerDecoderLayer(4, 2, 8) for _ in range(B)])
    with pytest.raises(
        MtcliError, match=r"different numbers of samples: \[3, 5, 2, 4\], \[3, 6, 3"
    ):
        layer(torch.zeros(B, 5, 2, 4), torch.zeros(B, 6, 3, 4))
    with pytest.raises(MtcliError, match="none of them tensors"):
        array(1.0)
    attention = fused.fuse([nn.MultiheadAttention(4, 2) for _ in range(B)])
    x, mask = torch.zeros(B, 5, 2, 4), fused.Shared(torch.zeros(4, 5, 5))
    with pytest.raises(MtcliError, match=r"attn_mask has shape \[4, 5, 5\], not \[T, S\]"):
        attention(x, x, x, attn_mask=mask)


def test_rows_that_are_no_samples_are_refused_unless_the_module_is_kept():
    x = seeded(B, 2, 5, 4)
    with pytest.raises(MtcliError, match=r"30 rows in dimension 0, not 3 models \* 2 samples"):
        fused.fuse(made(Frames))(x)
    assert_runs_as_its_models(lambda: nn.Sequential(Frames()), x, keep=["0"])


def test_a_forward_that_mixes_samples_is_found_by_verify():
    x = seeded(B, 5, 4)
    array = fused.fuse(made(MeanOfBatch))
    with pytest.raises(MtcliError, match="output 0 of model 0 is .* off"):
        fused.verify(array, x)
    kept = fused.fuse([nn.Sequential(one) for one in made(MeanOfBatch)], keep=["0"])
    fused.verify(kept, x)
    assert kept.training


def test_inference_of_encoders_takes_no_fast_path_that_reads_one_models_weights():
    make = lambda: nn.TransformerEncoder(  # noqa: E731
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2
    )
    models = [model.eval() for model in made(make)]
    padding = torch.zeros(B, 2, 5, dtype=torch.bool)
    padding[:, :, 4:] = True
    x = seeded(B, 2, 5, 4)
    array = fused.fuse(models)
    with torch.inference_mode():
        y = array(x, src_key_padding_mask=padding)
    for b, (model, one) in enumerate(zip(models, fused.unfuse(array), strict=True)):
        expected = model(x[b], src_key_padding_mask=padding[b])
        torch.testing.assert_close(y[b, :, :4], expected[:, :4])
        assert one.use_nested_tensor and one.layers[0].activation_relu_or_gelu == 1


@pytest.mark.slow("traced for 4 s")
def test_a_compiled_array_computes_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    array = fused.fuse([Vision() for _ in range(B)])
    x = torch.randn(B, 2, 3, 4, 4)
    expected = array(x)
    compiled = torch.compile(array, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    torch.testing.assert_close(compiled(x[:, :1]), expected[:, :1])
