import pytest
import torch
from exact import TOLERANCE, distance, seeded

from mtcli.kernels import lamb
from mtcli.kernels.lamb import (
    lamb_moments_,
    lamb_moments_reference_,
    lamb_step_,
    lamb_step_reference_,
    trust_ratios,
)
from mtcli.kernels.multi_tensor import CHUNK, OptimizerStep, OptimizerTensors, tensor_table

SIZES = [5, CHUNK + 130, 21, 0, 16]  # the last is zeros and has no gradient
DECAYS = [True, True, False, True, False]
UPDATES = [
    OptimizerStep(0.03, (0.8, 0.97), 1e-6, 0.3, count, factor)
    for count, factor in enumerate((1.0, 0.25, 1.0), start=1)
]
BOUNDS = (0.01, 10.0)


def made(seed, scales=(0.001, 1.0, 50.0, 1.0, 0.0)):
    return [
        (scale * seeded(size, seed=seed + i)).float()
        for i, (size, scale) in enumerate(zip(SIZES, scales, strict=True))
    ]


def gradients_of(step):
    return made(100 * (step + 1), (1.0, 1.0, 1.0, 1.0, 0.0))


def exact():
    """(weights, ratios of each step) in float64, by the paper's formulas."""
    weights = [x.double() for x in made(1)]
    m, v = ([torch.zeros_like(x) for x in weights] for _ in range(2))
    ratios = []
    for step, update in enumerate(UPDATES):
        ratios.append([])
        for i, g in enumerate(gradients_of(step)):
            g = g.double() * update.factor
            m[i] = 0.8 * m[i] + 0.2 * g
            v[i] = 0.97 * v[i] + 0.03 * g**2
            u = m[i] / (v[i].sqrt() + 1e-6) + 0.3 * DECAYS[i] * weights[i]
            norms = weights[i].norm(), u.norm()
            ratio = min(max(float(norms[0] / norms[1]), 0.01), 10.0) if all(norms) else 1.0
            ratios[-1].append(ratio)
            weights[i] = weights[i] - 0.03 * ratio * u
    return weights, torch.tensor(ratios)


def parts_on(device, dtype):
    masters = [x.to(device) for x in made(1)]
    moments = ([torch.zeros_like(x) for x in masters] for _ in range(2))
    weights = masters if dtype == torch.float32 else [x.to(dtype) for x in masters]
    return OptimizerTensors(masters, *moments, weights, DECAYS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_is_updated_as_the_paper_does(device, dtype):
    parts, (weights, ratios) = parts_on(device, dtype), exact()
    packed = tensor_table(parts)
    for step, update in enumerate(UPDATES):
        gradients = [g.to(device) for g in gradients_of(step)]
        found = trust_ratios(lamb_moments_(packed, parts, gradients, update), BOUNDS)
        assert distance(found, ratios[step]) < 2e-6
        lamb_step_(packed, parts, found, update)
    assert ratios.min() == pytest.approx(0.01) and ratios.max() == 10.0, "both bounds are met"
    for ours, rounded, theirs in zip(parts.masters, parts.weights, weights, strict=True):
        assert distance(ours, theirs) < 2e-6
        assert distance(rounded, theirs) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("piece", [lamb.SLICE, 50], ids=["whole tensors", "in pieces"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_references_do_so_too(dtype, piece, monkeypatch):
    monkeypatch.setattr(lamb, "SLICE", piece)
    parts, (weights, ratios) = parts_on("cpu", dtype), exact()
    for step, update in enumerate(UPDATES):
        found = trust_ratios(lamb_moments_reference_(parts, gradients_of(step), update), BOUNDS)
        assert distance(found, ratios[step]) < 2e-6
        lamb_step_reference_(parts, found, update)
    for ours, rounded, theirs in zip(parts.masters, parts.weights, weights, strict=True):
        assert distance(ours, theirs) < 2e-6
        assert distance(rounded, theirs) < 2 * TOLERANCE[dtype]
