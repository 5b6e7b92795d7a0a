"""Which backend of scaled_dot_product_attention a GPU takes, on a machine without one."""

import pytest
import torch
from torch.nn.attention import SDPBackend

from mtcli.kernels.attention.backends import (
    NAMES,
    backend_name,
    sdpa_backends,
    sdpa_order,
    shapes_repeat,
)

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def enabled():
    """(what torch may take, its order), as torch has them now."""
    allowed = {
        "CUDNN_ATTENTION": torch.backends.cuda.cudnn_sdp_enabled(),
        "FLASH_ATTENTION": torch.backends.cuda.flash_sdp_enabled(),
        "EFFICIENT_ATTENTION": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "MATH": torch.backends.cuda.math_sdp_enabled(),
    }
    names = {int(getattr(SDPBackend, name)): name for name in NAMES}
    order = [names[i] for i in torch._C._get_sdp_priority_order() if i in names]
    return [name for name in order if allowed[name]]


@pytest.fixture
def board(monkeypatch):
    """A function that makes the GPU one of a compute capability."""
    return lambda capability: monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: capability
    )


@pytest.mark.parametrize(
    ("capability", "first"),
    [((8, 0), "FLASH_ATTENTION"), ((8, 9), "FLASH_ATTENTION"), ((9, 0), "CUDNN_ATTENTION"),
     ((10, 0), "CUDNN_ATTENTION"), ((12, 0), "FLASH_ATTENTION")],
)  # fmt: skip
def test_training_takes_cudnn_first_where_it_is_the_fastest(board, capability, first):
    board(capability)
    before = enabled()
    with sdpa_backends(CUDA, repeats=True):
        assert enabled() == list(sdpa_order(capability, repeats=True))
        assert enabled()[0] == first and set(enabled()) == set(NAMES)
        assert shapes_repeat()
    assert enabled() == before


def test_shapes_that_come_once_have_no_plan_made(board):
    board((9, 0))
    before = enabled()
    with sdpa_backends(CUDA, repeats=False):
        assert enabled() == ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"]
        assert not shapes_repeat()
    assert enabled() == before and shapes_repeat()


def test_a_cpu_stays_as_it_is():
    before = enabled()
    for repeats in (True, False):
        with sdpa_backends(CPU, repeats):
            assert enabled() == before and shapes_repeat()


def test_the_backend_that_torch_takes_has_a_name():
    q = torch.empty(1, 4, 8, 16)
    assert backend_name(q, q[:, :2], causal=True) == "FlashAttention"
    assert backend_name(q.double().requires_grad_(), q.double(), causal=False) in NAMES.values()
