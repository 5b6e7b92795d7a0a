import pytest
import torch
from exact import TOLERANCE, distance, seeded

from mtcli.kernels.adamw import Parts
from mtcli.kernels.lamb import LambUpdate, lamb_, lamb_reference_
from mtcli.kernels.packed import CHUNK, pack

SIZES = [5, CHUNK + 130, 21, 0, 16]  # the last is zeros and has no gradient
DECAYS = [True, True, False, True, False]
UPDATES = [
    LambUpdate(0.03, (0.8, 0.97), 1e-6, 0.3, (0.01, 10.0), factor) for factor in (1.0, 0.25, 1.0)
]


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
    return Parts(masters, *moments, weights, DECAYS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_launches_update_every_tensor_as_the_paper_does(device, dtype):
    parts, (weights, ratios) = parts_on(device, dtype), exact()
    packed = pack(parts.masters)
    for step, update in enumerate(UPDATES):
        gradients = [g.to(device) for g in gradients_of(step)]
        assert distance(lamb_(packed, parts, gradients, update), ratios[step]) < 2e-6
    assert ratios.min() == pytest.approx(0.01) and ratios.max() == 10.0, "both bounds are met"
    for ours, rounded, theirs in zip(parts.masters, parts.weights, weights, strict=True):
        assert distance(ours, theirs) < 2e-6
        assert distance(rounded, theirs) < 2 * TOLERANCE[dtype]


def test_the_reference_does_so_too():
    parts, (weights, ratios) = parts_on("cpu", torch.float32), exact()
    for step, update in enumerate(UPDATES):
        found = lamb_reference_(parts, gradients_of(step), update)
        assert distance(found, ratios[step]) < 2e-6
    for ours, theirs in zip(parts.masters, weights, strict=True):
        assert distance(ours, theirs) < 2e-6
