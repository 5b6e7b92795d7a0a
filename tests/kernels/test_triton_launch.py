"""Kernels as operators: what imports them, who sees through them, which of them is chosen."""

import subprocess
import sys
from threading import Thread

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mtcli.kernels import autotune, triton_launch
from mtcli.kernels.norm import norm
from mtcli.kernels.swiglu import swiglu

needs_triton = pytest.mark.skipif(not triton_launch.HAS_TRITON, reason="triton is not installed")


def test_a_step_on_cpu_imports_neither_triton_nor_dynamo():
    code = (
        "import sys, torch; from mtcli.kernels.swiglu import swiglu\n"
        "import mtcli.core.training.step\n"
        "swiglu(torch.ones(2, 4, requires_grad=True)).sum().backward();"
        "print([name for name in ('triton', 'torch._dynamo') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_kernels_take_16_and_32_bits_on_a_gpu_and_nothing_on_a_cpu(device):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert triton_launch.runs_triton(torch.empty(1, dtype=dtype, device=device))
    assert not triton_launch.runs_triton(torch.empty(1, dtype=torch.float64, device=device))


def test_kernels_leave_cpu_tensors_alone():
    assert not triton_launch.runs_triton(torch.empty(1))


def test_a_fake_gpu_tensor_gets_the_shape_and_dtype_without_a_gpu():
    with FakeTensorMode():
        y = swiglu(torch.empty(3, 10, dtype=torch.bfloat16, device="cuda"))
    assert (y.shape, y.dtype, y.device.type) == ((3, 5), torch.bfloat16, "cuda")


def test_torch_compile_takes_an_operator_whole_without_a_gpu():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(swiglu, backend=backend, fullgraph=True)
    with FakeTensorMode():
        assert compiled(torch.empty(3, 10, device="cuda")).shape == (3, 5)
    assert "torch.ops.mtcli.swiglu" in graphs[0].code


class Timed:
    """Stands for a kernel's launches: which configurations were timed, and how long they take."""

    def __init__(self, milliseconds):
        self.milliseconds, self.timed = milliseconds, []

    def __call__(self, launch, config):
        self.timed.append(config)
        return self.milliseconds[config["BLOCK"]]


CONFIGS = ({"BLOCK": 1}, {"BLOCK": 2}, {"BLOCK": 4})


def chosen(x, *magnitudes):
    return autotune.best_config("op._kernel", x, magnitudes, CONFIGS, lambda config: None)


@pytest.fixture
def measured(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    timed = Timed({1: 3.0, 2: 1.0, 4: 2.0})
    monkeypatch.setattr(autotune, "_milliseconds", timed)
    autotune._measured.cache_clear()
    yield timed
    autotune._measured.cache_clear()


def test_without_a_measurement_nothing_is_chosen(measured):
    assert chosen(torch.empty(1), 100) is None
    assert measured.timed == []


def test_a_choice_is_timed_once_and_read_by_later_runs(measured, tmp_path):
    x = torch.empty(1)
    with autotune.autotuning() as table:
        assert chosen(x, 100) == chosen(x, 128) == {"BLOCK": 2}
    assert measured.timed == list(CONFIGS)
    assert autotune.save_table(table, x.device) == tmp_path / "mtcli" / "kernels.json"
    assert chosen(x, 65) == {"BLOCK": 2}
    assert chosen(x, 129) is chosen(x.half(), 100) is None  # not measured
    assert measured.timed == list(CONFIGS)


def test_a_launch_in_another_thread_is_tuned_as_a_backward_on_a_gpu_needs(measured):
    class Launches(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            chosen(grad, 100)
            return grad

    with autotune.autotuning() as table:
        y = Launches.apply(torch.ones(1, requires_grad=True)).sum()
        thread = Thread(target=y.backward)  # autograd's device threads begin as this one does
        thread.start()
        thread.join()
    assert table == {"op._kernel": {"float32 128": {"BLOCK": 2}}}
    assert chosen(torch.empty(1), 7) is None  # timed inside alone


def test_the_tuning_outside_goes_on_after_one_inside(measured):
    with autotune.autotuning() as outer:
        with autotune.autotuning() as inner:
            chosen(torch.empty(1), 100)
        chosen(torch.empty(1), 7)
    assert [list(t["op._kernel"]) for t in (inner, outer)] == [["float32 128"], ["float32 8"]]


class Device:
    """Stands for a GPU on which configurations take 3 ms, or fail; an error may be sticky."""

    def __init__(self, monkeypatch, sticky=False):
        monkeypatch.setattr("triton.testing.do_bench", self.do_bench)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        self.sticky, self.broken = sticky, False

    def do_bench(self, step, return_mode):
        try:
            step()
        except RuntimeError:
            self.broken = self.sticky
            raise
        return 3.0

    def synchronize(self):
        if self.broken:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


@needs_triton
@pytest.mark.parametrize("kind", ["resources", "source", "assembler", "launch"])
def test_a_config_that_does_not_compile_or_launch_takes_forever(monkeypatch, kind):
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    Device(monkeypatch)
    error = {
        "resources": OutOfResources(2**20, 2**18, "shared memory"),
        "source": CompilationError("x + y", None, "shapes differ"),
        "assembler": PTXASError("out of registers"),
        "launch": RuntimeError("Triton Error [CUDA]: out of memory"),
    }[kind]

    def launch(config):
        if config["BLOCK"] == 1:
            raise error

    assert autotune._milliseconds(launch, {"BLOCK": 1}) == float("inf")
    assert autotune._milliseconds(launch, {"BLOCK": 2}) == 3.0


@needs_triton
@pytest.mark.parametrize(
    "raised",
    [
        RuntimeError("Triton Error [CUDA]: misaligned address"),
        torch.AcceleratorError("CUDA error: misaligned address"),
    ],
    ids=["triton's", "torch's"],
)
def test_an_error_after_which_the_device_is_of_no_use_ends_the_tuning(monkeypatch, raised):
    Device(monkeypatch, sticky=True)

    def launch(config):
        raise raised

    with pytest.raises(torch.AcceleratorError, match="CUDA error"):
        autotune._milliseconds(launch, {"BLOCK": 1})


def test_a_bug_of_a_launch_is_no_reason_to_take_another_config(monkeypatch):
    Device(monkeypatch)
    with pytest.raises(TypeError, match="no such argument"):
        autotune._milliseconds(lambda config: raises(TypeError("no such argument")), {})


def raises(error):
    raise error


def test_a_choice_that_is_no_longer_offered_is_not_taken(measured):
    x = torch.empty(1)
    autotune.save_table({"op._kernel": {"float32 128": {"BLOCK": 8}}}, x.device)
    assert chosen(x, 100) is None


def test_measurements_of_more_kernels_are_added_to_the_file(measured):
    x = torch.empty(1)
    autotune.save_table({"other": {"float32 1": {"BLOCK": 4}}}, x.device)
    autotune.save_table({"op._kernel": {"float32 128": {"BLOCK": 4}}}, x.device)
    assert chosen(x, 100) == {"BLOCK": 4}
    assert "other" in autotune._measured(x.device)


H200 = autotune.DeviceFacts("9.0", 132)
KEPT = {"op._kernel": {"float32 128": {"BLOCK": 4}}}


@pytest.fixture
def board(measured, monkeypatch, tmp_path):
    """A function that makes the device another GPU, by name and facts; nothing comes with mtcli."""
    monkeypatch.setattr(autotune, "SHIPPED", tmp_path / "none.json")

    def become(name, facts):
        monkeypatch.setattr(autotune, "device_name", lambda device: name)
        monkeypatch.setattr(autotune, "device_facts", lambda device: facts)
        autotune._measured.cache_clear()

    return become


@pytest.mark.parametrize(
    ("name", "facts", "block"),
    [
        ("H200", H200, 4),
        ("H100", H200, 4),
        ("H100 PCIe", H200._replace(multiprocessors=114), 4),
        ("B200", autotune.DeviceFacts("10.0", 148), None),
        ("cpu", None, None),
    ],
)
def test_a_gpu_takes_what_one_of_its_capability_measured(board, name, facts, block):
    x = torch.empty(1)
    board("H200", H200)
    autotune.save_table(KEPT, x.device)
    board(name, facts)
    assert (chosen(x, 100) or {}).get("BLOCK") == block


def test_the_nearest_gpu_s_measurement_is_taken_and_its_own_before_any(board):
    x = torch.empty(1)
    for sms, block in ((132, 4), (78, 1), (114, 2)):
        board(f"of {sms}", H200._replace(multiprocessors=sms))
        autotune.save_table({"op._kernel": {"float32 128": {"BLOCK": block}}}, x.device)
    for sms, block in ((131, 4), (116, 2), (80, 1)):
        board("another", H200._replace(multiprocessors=sms))
        assert chosen(x, 100) == {"BLOCK": block}
    board("of 78", H200)  # by name, whatever its facts
    assert chosen(x, 100) == {"BLOCK": 1}


def test_the_shipped_table_is_an_h100_s_too(measured, monkeypatch):
    monkeypatch.setattr(autotune, "device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(autotune, "device_facts", lambda device: H200)
    x = torch.empty(1, dtype=torch.bfloat16)
    assert autotune.fastest_backend("grouped_linear", x, [28672]) == "torch"
    assert autotune.fastest_backend("rms_norm", x, [4096]) == "mtcli"


def test_a_magnitude_is_rounded_up_to_a_power_of_two():
    sizes = [(n, autotune.bucket_of(torch.bfloat16, [n])) for n in (0, 1, 2, 3, 4096, 4097)]
    powers = {0: 0, 1: 1, 2: 2, 3: 4, 4096: 4096, 4097: 8192}
    assert sizes == [(n, f"bfloat16 {power}") for n, power in powers.items()]


def test_torchs_function_is_called_where_it_was_measured_to_be_faster(measured, device):
    x = torch.linspace(-1.0, 1.0, 24, device=device).view(2, 12)
    weight, called = torch.ones(12, device=device), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            called.append(function.namespace)
            return function(*args, **(kwargs or {}))

    def namespaces():
        called.clear()
        with Watch():
            norm(x, weight, eps=1e-5, centred=False)
        return set(called)

    assert namespaces() >= {"mtcli"}
    autotune.save_table({"rms_norm": {"float32 16": {"by": "torch"}}}, x.device)
    assert "mtcli" not in namespaces()
    autotune.save_table({"rms_norm": {"float32 16": {"by": "mtcli"}}}, x.device)
    assert namespaces() >= {"mtcli"}
