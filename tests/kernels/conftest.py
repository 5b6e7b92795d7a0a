"""Where kernels are tested: interpreted on CPU, and compiled on a GPU where there is one."""

import importlib.util

import pytest
import torch

from mtcli.kernels.triton_launch import interpreted


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """A device whose tensors kernels work on."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    from triton import knobs

    if request.param == "cuda":
        assert not knobs.runtime.interpret, "unset TRITON_INTERPRET to test on the GPU"
        yield torch.device("cuda")
    elif not knobs.runtime.interpret:
        pytest.skip("kernels are compiled here, not interpreted: TRITON_INTERPRET=1 changes that")
    else:
        with interpreted():
            yield torch.device("cpu")
