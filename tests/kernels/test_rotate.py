import pytest
import torch
from exact import check, seeded

from mtcli.kernels.rope import rotate, rotate_reference, split_rotated

B, S = 2, 5


def turned(x, angles):
    """Each pair of dimensions as a complex number, times exp(i angle)."""
    half = x.shape[-1] // 2
    y = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([y.real, y.imag], -1)


def rotations(d, dtype, device):
    """(angles [b, 1, s, d / 2], cosines and sines rounded to dtype), other for each sequence."""
    angles = 3.0 * seeded(B, 1, S, d // 2, seed=5)
    return angles, *(
        f(torch.cat([angles, angles], -1)).to(dtype).to(device) for f in (torch.cos, torch.sin)
    )


@pytest.mark.parametrize(("heads", "groups", "d"), [(4, 4, 8), (6, 2, 20), (18, 18, 6)])
def test_queries_and_keys_turn_by_their_angles_and_gradients_turn_back(device, heads, groups, d):
    angles, cos, sin = rotations(d, torch.float32, device)
    check(
        lambda q, k: rotate(q, k, cos, sin),
        lambda q, k: (turned(q, angles), turned(k, angles)),
        [seeded(B, n, S, d, seed=n, device=device) for n in (heads, groups)],
        torch.float32,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotation_in_16_bits_is_that_of_the_rounded_cosines(device, dtype):
    _, cos, sin = rotations(8, dtype, device)
    wide = cos.cpu().double(), sin.cpu().double()
    check(
        lambda q, k: rotate(q, k, cos, sin),
        lambda q, k: (rotate_reference(q, *wide), rotate_reference(k, *wide)),
        [seeded(B, n, S, 8, seed=n, device=device) for n in (4, 2)],
        dtype,
    )


def test_queries_and_keys_may_be_parts_of_one_product(device):
    _, cos, sin = rotations(6, torch.float32, device)
    wide = cos.cpu().double(), sin.cpu().double()

    def split(qkv):
        q, k, _ = qkv.view(B, S, 2, 5, 6).split([3, 1, 1], 3)
        return (x.flatten(2, 3).transpose(1, 2) for x in (q, k))

    def formula(qkv):
        return tuple(rotate_reference(x, *wide) for x in split(qkv))

    qkv = seeded(B * S, 60, device=device)
    check(lambda qkv: rotate(*split(qkv), cos, sin), formula, [qkv], torch.float32)
    assert rotate(*split(qkv.float()), cos, sin)[0].transpose(1, 2).is_contiguous()


def parts(qkv, members):
    q, k, v = qkv.split([members, 1, 1], 3)
    return tuple(x.flatten(2, 3).transpose(1, 2) for x in (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("groups", "members", "d"), [(2, 3, 8), (4, 1, 20), (1, 18, 6)])
def test_fused_projections_are_split_and_turned_in_one_pass(device, groups, members, d, dtype):
    _, cos, sin = rotations(d, dtype, device)
    wide = cos.cpu().double(), sin.cpu().double()

    def formula(qkv):
        q, k, v = parts(qkv, members)
        return rotate_reference(q, *wide), rotate_reference(k, *wide), v

    qkv = seeded(B, S, groups, members + 2, d, device=device)
    check(lambda qkv: split_rotated(qkv, cos, sin), formula, [qkv], dtype)


def test_fused_projections_have_the_bits_of_their_parts(device):
    _, cos, sin = rotations(8, torch.float32, device)
    qkv, found = seeded(B, S, 2, 5, 8, device=device).float(), []
    weights = [seeded(B, h, S, 8, seed=h, device=device).float() for h in (6, 2, 2)]

    def by_parts(x):
        q, k, v = parts(x, 3)
        return *rotate(q, k, cos, sin), v

    for split in (lambda x: split_rotated(x, cos, sin), by_parts):
        x = qkv.clone().requires_grad_()
        outs = split(x)
        torch.autograd.backward(outs, weights)
        found.append((*outs, x.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert found[0][-1].is_contiguous()
