"""Each fused operator against B plain torch modules: values, gradients and buffers, float64."""

import pytest
import torch
from alone import EXACT, Wrapped, assert_runs_as_its_models, made, seeded
from torch import nn

import mtcli_fused as fused
from mtcli_fused import fusing

B = 3
ids = torch.tensor([[[0, 2, 2, 6], [5, 2, 1, 1]], [[2, 2, 3, 0], [4, 4, 6, 2]]] * 2)[:B]
causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
padding = torch.zeros(B, 2, 5, dtype=torch.bool)
padding[0, 1, 3:], padding[2, 0, 4:] = True, True


def attention(**options):
    return lambda: nn.MultiheadAttention(6, 3, batch_first=True, **options)


def layer(cls=nn.TransformerEncoderLayer, **options):
    return lambda: cls(6, 3, 10, **({"dropout": 0.0, "batch_first": True} | options))


def encoder(**options):
    return lambda: nn.TransformerEncoder(
        layer(**options)(), 2, nn.LayerNorm(6), enable_nested_tensor=False
    )


x5 = seeded(B, 2, 5, 6)
# fmt: off
CASES = {
    "linear": (lambda: nn.Linear(5, 7), seeded(B, 3, 5)),
    "linear of more dims": (lambda: nn.Linear(5, 7), seeded(B, 3, 2, 4, 5)),
    "linear without bias": (lambda: nn.Linear(5, 1, bias=False), seeded(B, 3, 5)),
    "conv1d": (lambda: nn.Conv1d(3, 5, 3, 2, 1), seeded(B, 2, 3, 7)),
    "conv2d": (lambda: nn.Conv2d(3, 5, (3, 2), (2, 1), (1, 2), (1, 2)), seeded(B, 2, 3, 9, 7)),
    "conv2d in blocks": (lambda: nn.Conv2d(8, 16, 3, padding=1), seeded(B, 2, 8, 5, 4)),
    "conv2d in groups": (lambda: nn.Conv2d(16, 32, 3, groups=2, bias=False),
        seeded(B, 2, 16, 5, 4)),
    "conv2d by depth": (lambda: nn.Conv2d(6, 6, 3, groups=6), seeded(B, 2, 6, 5, 4)),
    "conv2d reflected": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
        seeded(B, 2, 3, 5, 4)),
    "conv2d same": (lambda: nn.Conv2d(3, 4, 4, padding="same"), seeded(B, 2, 3, 5, 4)),
    "conv1d pointwise": (lambda: nn.Conv1d(3, 5, 1), seeded(B, 2, 3, 7)),
    "conv2d pointwise": (lambda: nn.Conv2d(3, 5, 1, bias=False), seeded(B, 2, 3, 5, 3)),
    "conv2d pointwise padded": (lambda: nn.Conv2d(3, 5, 1, padding=1), seeded(B, 2, 3, 5, 3)),
    "conv2d pointwise in groups": (lambda: nn.Conv2d(4, 6, 1, groups=2), seeded(B, 2, 4, 5, 3)),
    "conv2d pointwise strided": (lambda: nn.Conv2d(3, 5, 1, 2), seeded(B, 2, 3, 5, 3)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), seeded(B, 2, 2, 3, 4, 3)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(3, 5, 4, 2, 1), seeded(B, 2, 3, 5)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(3, 5, 4, 2, 1, 1), seeded(B, 2, 3, 5, 4)),
    "conv_transpose2d in blocks": (lambda: nn.ConvTranspose2d(16, 8, 3, groups=2),
        seeded(B, 2, 16, 3, 4)),
    "conv_transpose2d of a size": (lambda: Wrapped(nn.ConvTranspose2d(3, 5, 3, 2),
        output_size=[8, 9]), seeded(B, 2, 3, 3, 4)),
    "batch_norm1d": (lambda: nn.BatchNorm1d(5), seeded(B, 4, 5)),
    "batch_norm1d of lengths": (lambda: nn.BatchNorm1d(5), seeded(B, 4, 5, 3)),
    "batch_norm2d": (lambda: nn.BatchNorm2d(5, momentum=0.3, eps=0.1), seeded(B, 4, 5, 3, 2)),
    "batch_norm2d plain": (lambda: nn.BatchNorm2d(5, affine=False), seeded(B, 4, 5, 3, 2)),
    "batch_norm2d untracked": (lambda: nn.BatchNorm2d(5, track_running_stats=False),
        seeded(B, 4, 5, 3, 2)),
    "batch_norm2d cumulative": (lambda: nn.BatchNorm2d(5, momentum=None), seeded(B, 4, 5, 3, 2)),
    "layer_norm": (lambda: nn.LayerNorm(5, eps=0.1), seeded(B, 4, 3, 5)),
    "layer_norm of two dims": (lambda: nn.LayerNorm((3, 5), bias=False), seeded(B, 4, 3, 5)),
    "layer_norm plain": (lambda: nn.LayerNorm(5, elementwise_affine=False), seeded(B, 4, 5)),
    "rms_norm": (lambda: nn.RMSNorm(5, eps=0.1), seeded(B, 4, 3, 5)),
    "group_norm": (lambda: nn.GroupNorm(2, 6, eps=0.1), seeded(B, 4, 6, 3)),
    "group_norm plain": (lambda: nn.GroupNorm(3, 6, affine=False), seeded(B, 4, 6)),
    "prelu": (lambda: nn.PReLU(), seeded(B, 4, 6, 3)),
    "prelu of channels": (lambda: nn.PReLU(6), seeded(B, 4, 6)),
    "embedding": (lambda: nn.Embedding(7, 4), ids),
    "embedding of labels": (lambda: nn.Embedding(7, 4), ids[:, :, 0]),
    "embedding with padding": (lambda: nn.Embedding(7, 4, padding_idx=2), ids),
    "max_pool2d": (lambda: nn.MaxPool2d(2), seeded(B, 2, 3, 5, 4)),
    "avg_pool2d": (lambda: nn.AvgPool2d(3, 2, 1), seeded(B, 2, 3, 5, 4)),
    "adaptive_avg_pool2d": (lambda: nn.AdaptiveAvgPool2d((2, 1)), seeded(B, 2, 3, 5, 4)),
    "dropout of 0": (lambda: nn.Dropout(0.0), seeded(B, 2, 3)),
    "attention": (attention(), x5, seeded(B, 2, 4, 6), seeded(B, 2, 4, 6, seed=1)),
    "attention of other widths": (attention(kdim=4, vdim=5, bias=False), x5, seeded(B, 2, 7, 4),
        seeded(B, 2, 7, 5)),
    "attention, padded": (attention(), x5, x5, x5, padding),
    "attention, masked": (attention(), x5, x5, x5, padding, True, fused.Shared(causal)),
    "attention without weights": (attention(), x5, x5, x5, padding, False, fused.Shared(causal)),
    "attention, causal": (attention(), x5, x5, x5, None, False, fused.Shared(causal), True, True),
    "attention, heads' weights": (attention(), x5, x5, x5, None, True, None, False),
    "attention of lengths first": (lambda: nn.MultiheadAttention(6, 3), seeded(B, 5, 2, 6),
        seeded(B, 4, 2, 6), seeded(B, 4, 2, 6)),
    "encoder layer": (layer(), x5),
    "encoder layer, norms first": (layer(norm_first=True, activation="gelu"),
        x5, fused.Shared(causal), padding),
    "encoder layer of lengths first": (layer(batch_first=False), seeded(B, 5, 2, 6),
        fused.Shared(causal), padding),
    "encoder": (encoder(), x5, fused.Shared(causal)),
    "encoder, padded": (encoder(activation="gelu"), x5, None, padding),
    "encoder of lengths first": (encoder(batch_first=False, bias=False), seeded(B, 5, 2, 6),
        None, padding),
    "decoder layer": (layer(nn.TransformerDecoderLayer), x5, seeded(B, 2, 4, 6)),
    "transformer": (lambda: nn.Transformer(6, 3, 1, 1, 10, 0.0), seeded(B, 5, 2, 6),
        seeded(B, 4, 2, 6)),
}
# fmt: on


@pytest.mark.parametrize("order", ["samples", "models", "either, in evaluation"])
def test_an_operator_has_the_values_and_gradients_of_each_model_alone(order, subtests, monkeypatch):
    """Whichever dimension of its rows is outermost."""
    train = order != "either, in evaluation"
    if train:
        prefers = lambda model: order == "samples"  # noqa: E731
        monkeypatch.setattr(fusing, "_prefers_samples_outermost", prefers)
    for name, (make, *inputs) in CASES.items():
        with subtests.test(name):
            array = assert_runs_as_its_models(make, *inputs, train=train)
            assert not train or array.array.samples_outermost == (order == "samples")


@pytest.mark.parametrize("size", [1, 4])
def test_any_number_of_models_is_an_array(size):
    both = lambda: nn.Sequential(nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.Conv1d(8, 8, 3))  # noqa: E731
    assert_runs_as_its_models(both, seeded(size, 5, 3, 4), size=size)


def test_batch_norms_statistics_go_on_over_steps_and_are_each_models_own():
    models = made(lambda: nn.BatchNorm1d(3, momentum=None))
    models[1](seeded(5, 3))  # which has one batch more behind it
    array = fused.fuse(models)
    for step in range(3):
        x = seeded(B, 4, 3, seed=step)
        array(x)
        for b, model in enumerate(models):
            model(x[b])
    for one, model in zip(fused.unfuse(array), models, strict=True):
        torch.testing.assert_close(one.running_var, model.running_var, **EXACT)
        assert one.num_batches_tracked == model.num_batches_tracked


def test_the_padding_row_of_every_model_has_no_gradient_and_every_table_keeps_its_rows():
    models = made(lambda: nn.Embedding(7, 4, padding_idx=2))
    array = fused.fuse(models)
    array(ids).sum().backward()
    gradient = array.model.weight.grad
    assert gradient.shape == (B, 7, 4) and not gradient[:, 2].any()
    for b in range(B):
        counts = torch.bincount(ids[b].flatten(), minlength=7)
        assert torch.equal(gradient[b, :, 0] > 0, (counts > 0) & (torch.arange(7) != 2))


@pytest.mark.parametrize(("b", "wrong"), [(0, 7), (B - 1, -1)])
def test_an_id_outside_its_table_never_reads_another_models(b, wrong):
    array = fused.fuse(made(lambda: nn.Embedding(7, 4)))
    some = torch.zeros(B, 2, dtype=torch.long)
    some[b, 1] = wrong  # a row of its neighbour's, in one table of them all
    with pytest.raises(IndexError):
        array(some)


@pytest.mark.parametrize("cls", [nn.Dropout, nn.Dropout2d])
def test_dropout_has_each_models_own_rate_and_keeps_the_mean(cls):
    torch.manual_seed(0)
    rates = [0.0, 0.25, 0.9]
    array = fused.fuse([cls(p) for p in rates])
    y = array(torch.ones(B, 400, 50, 3, 3))
    spread = y.flatten(3).std(-1)
    assert (spread.max() == 0) == (cls is nn.Dropout2d)
    for b, p in enumerate(rates):
        assert (y[b] == 0).float().mean().item() == pytest.approx(p, abs=0.01)
        torch.testing.assert_close(y[b].max(), torch.tensor(1 / (1 - p)))
    array.eval()
    assert torch.equal(array(y), y)
    assert [one.p for one in fused.unfuse(array)] == rates


def test_masks_of_models_with_one_rate_differ():
    torch.manual_seed(0)
    y = fused.fuse([nn.Dropout(0.5), nn.Dropout(0.5)])(torch.ones(2, 64))
    assert not torch.equal(y[0], y[1])


def test_attention_drops_weights_at_each_models_rate():
    torch.manual_seed(0)
    models = made(attention())
    for model, p in zip(models, [0.0, 0.3, 0.8], strict=True):
        model.dropout = p
    array = fused.fuse(models)
    x = seeded(B, 40, 9, 6)
    weights = array(x, x, x, average_attn_weights=False)[1]
    for b, p in enumerate([0.0, 0.3, 0.8]):
        assert (weights[b] == 0).float().mean().item() == pytest.approx(p, abs=0.02)
    assert torch.equal(array(x, x, x, need_weights=False)[0][0], array(x, x, x)[0][0])
    assert not torch.equal(array(x, x, x, need_weights=False)[0][1], array(x, x, x)[0][1])


def test_a_half_precision_forward_under_autocast_runs():
    array = fused.fuse([nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)) for _ in range(B)])
    with torch.autocast("cpu", torch.bfloat16):
        assert array(torch.randn(B, 2, 4)).isfinite().all()
