"""Step times that papers print and constants were not fitted on, and what records leave unsaid.

Narayanan 2021 (arXiv:2104.04473, table 1), Korthikanti 2022 (arXiv:2205.05198, table 5), MT-NLG
(arXiv:2201.11990, section 2.4), Nemotron-4 340B (arXiv:2402.16819, table 2), NVIDIA NeMo 24.07's
performance summary (FP8, H100), Llama 3 405B (arXiv:2407.21783, table 4), the README of
Megatron-Core r0.8 (H100), NVIDIA NeMo AutoModel's performance summary (DeepEP, H100) and torchtitan
(benchmarks/llama3_h100_202412, compiled), and the best layouts of Hagemann 2023 (arXiv:2311.05610,
sheets of its repository). Of all these only the first full recomputation of a
trillion was fitted on.
"""

from functools import cache
from statistics import median

import pytest
from published.records import device_of, read_record
from published.scores import score

from mtcli.core.config.loading import load_config
from mtcli.core.plan.certainty import RANGES, kind_of
from mtcli.core.plan.hardware import GPUS
from mtcli.core.plan.predict import HARDWARE, MODEL

NARAYANAN = "Narayanan 2021 (arXiv 2104.04473)"
# fmt: off
TABLE_1 = [  # heads, hidden, layers, tp, pp, GPUs, batch, TFLOP/s per GPU
    (24, 2304, 24, 1, 1, 32, 512, 137), (32, 3072, 30, 2, 1, 64, 512, 138),
    (32, 4096, 36, 4, 1, 128, 512, 142), (48, 6144, 40, 8, 1, 256, 1024, 135),
    (64, 8192, 48, 8, 2, 512, 1536, 138), (80, 10240, 60, 8, 4, 1024, 1792, 140),
    (96, 12288, 80, 8, 8, 1536, 2304, 148), (128, 16384, 96, 8, 16, 1920, 2160, 155),
    (128, 20480, 105, 8, 35, 2520, 2520, 163), (160, 25600, 128, 8, 64, 3072, 3072, 163),
]
TABLE_5 = [  # layers, hidden, heads, GPUs, pp, vpp, micro-batch, batch, full and present seconds
    (48, 6144, 64, 8, 1, 1, 4, 4, 1.42, 1.10), (96, 12288, 96, 64, 8, 3, 1, 64, 18.13, 13.75),
    (105, 20480, 128, 280, 35, 3, 1, 280, 49.05, 37.83),
    (128, 25600, 160, 512, 64, 1, 1, 512, 94.42, 71.49),
]
NEMO = [  # the model's shapes; GPUs, batch, micro-batch, tp, pp, cp, vpp, tokens/s per GPU
    (24, 4096, 32, 32, 16384, 51200, 2048, False, 64, 2048, 4, 1, 1, 1, 1, 22521),
    (96, 12288, 96, 96, 49152, 51200, 2048, False, 512, 2048, 2, 4, 8, 1, 6, 782),
    (32, 4096, 32, 32, 11008, 32000, 4096, True, 8, 128, 1, 1, 1, 1, 1, 16847),
    (40, 5120, 40, 40, 13824, 32000, 4096, True, 16, 128, 1, 1, 4, 1, 10, 8646),
    (80, 8192, 64, 8, 28672, 32000, 4096, True, 64, 128, 1, 4, 4, 1, 20, 1707),
    (32, 4096, 32, 8, 14336, 128256, 8192, True, 8, 128, 1, 1, 1, 2, 1, 12036),
    (80, 8192, 64, 8, 28672, 128256, 8192, True, 64, 128, 1, 4, 4, 2, 5, 1533),
]
MEGATRON_CORE = [  # heads, hidden, layers, tp, pp, GPUs, batch, TFLOP/s per GPU
    (16, 2048, 24, 1, 1, 48, 192, 408.8), (32, 4096, 30, 2, 1, 96, 192, 465.9),
    (48, 6144, 32, 4, 1, 192, 192, 489.1), (56, 7168, 48, 8, 1, 384, 192, 459.6),
    (64, 8192, 84, 8, 2, 768, 384, 419.7), (80, 10240, 92, 8, 4, 1536, 768, 420.5),
    (96, 12288, 96, 8, 6, 2304, 1152, 432.8), (128, 16384, 96, 8, 8, 3072, 1536, 474.4),
    (144, 18432, 112, 8, 16, 6144, 3072, 459.9),
]
DEEP_EP = [  # the model's shapes and experts; GPUs, batch, pp, vpp, ep, tokens/s per GPU
    (61, 7168, 128, 128, 2048, 129280, 4096, True, 256, 1024, 8192, 4, 8, 64, 865),
    (61, 7168, 128, 128, 2048, 129280, 4096, True, 256, 256, 512, 4, 8, 64, 1002),
    (61, 7168, 64, 64, 2048, 163840, 4096, True, 384, 256, 512, 8, 4, 32, 924),
]
TORCHTITAN = [  # precision, GPUs, tp, micro-batch, tokens, recomputation, tokens/s per GPU
    ("bf16", 8, 1, 2, 8192, "selective", 6667), ("fp8", 8, 1, 2, 8192, "selective", 8532),
    ("bf16", 128, 1, 2, 8192, "selective", 6514), ("fp8", 128, 1, 2, 8192, "selective", 8380),
    ("fp8", 8, 1, 1, 32768, "full", 3890),
]
HAGEMANN = [  # billions, tokens, GPUs, tp, pp, sequence parallel, best seconds of its sheet
    (13, 2048, 32, 1, 1, False, 53.81), (13, 2048, 64, 1, 1, False, 26.54),
    (13, 8192, 128, 2, 2, False, 18.41), (13, 8192, 64, 2, 2, True, 34.84),
    (30, 8192, 128, 4, 4, False, 49.43), (30, 8192, 64, 4, 2, True, 84.37),
    (30, 2048, 256, 2, 4, False, 22.67), (30, 2048, 64, 1, 4, False, 72.0),
    (65, 2048, 128, 2, 4, False, 79.31), (65, 2048, 64, 2, 4, True, 147.02),
]
OPTIMUS = [  # GPUs, hidden, heads, batches and sequences/s of Megatron-LM, and of Optimus
    (4, 2048, 32, 60, 2.94, 96, 2.52), (16, 4096, 64, 60, 1.38, 192, 1.41),
    (36, 6144, 72, 40, 0.88, 288, 1.31), (64, 8192, 128, 30, 0.64, 384, 0.95),
]
LLAMA_1 = {13: (40, 5120, 40, 13824), 30: (60, 6656, 52, 17920), 65: (80, 8192, 64, 22016)}
LLAMA_8B, LLAMA_405B = (32, 4096, 32, 8, 14336, 128256), (126, 16384, 128, 8, 53248, 128256)
# fmt: on


def run(model, gpus, result, **fields):
    layers, hidden, heads, *more = model
    kv, ffn, vocab, seq, gated, *experts = more or (heads, 4 * hidden, 51200, 2048, False)
    shapes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv, "seq": seq}
    shapes |= {"ffn_hidden": ffn, "vocab": vocab, "gated": gated}
    if experts:
        shapes |= {"experts": experts[0], "topk": 8, "shared_experts": 1}
    top = {"source", "gpu", "precision", "flop_convention"} & set(fields)
    parallel = {name: value for name, value in fields.items() if name not in top}
    usual = {"source": "a paper", "gpu": "A100-80GB", "precision": "bf16/fp16 mixed"}
    row = {"model": shapes, "n_gpus": gpus, "parallel": parallel, "result": result}
    return read_record(usual | {name: fields[name] for name in top} | row)


def narayanan(gpus=None):
    said = {"source": NARAYANAN, "flop_convention": "hardware 4x fwd, full s^2 attention"}
    return [
        run((layers, hidden, heads), world, {"tflops_per_gpu": rate}, **said, **layout)
        for heads, hidden, layers, tp, pp, world, batch, rate in TABLE_1
        for layout in [{"tp": tp, "pp": pp, "vpp": 1, "global_batch": batch, "sp": False}]
        for layout in [layout | {"recompute": "full"}]
        if gpus in (None, world)
    ]


def korthikanti():
    for layers, hidden, heads, world, pp, vpp, size, batch, full, present in TABLE_5:
        layout = {"tp": 8, "pp": pp, "vpp": vpp, "micro_batch": size, "global_batch": batch}
        said = {"source": "Korthikanti 2022 (arXiv 2205.05198)", **layout}
        shapes = (layers, hidden, heads)
        yield run(shapes, world, {"iter_time_s": full}, recompute="full", sp=False, **said)
        yield run(shapes, world, {"iter_time_s": present}, recompute="selective", sp=True, **said)


def megatron_turing():
    layout = {"tp": 8, "pp": 35, "vpp": 1, "micro_batch": 1, "global_batch": 1920, "sp": False}
    said = {"source": "MT-NLG (arXiv 2201.11990)", "precision": "bf16", "recompute": "full"}
    for world, seconds in ((2240, 60.1), (2800, 50.2), (3360, 44.4)):
        yield run((105, 20480, 128), world, {"iter_time_s": seconds}, **said, **layout)


def nemotron():
    shapes = (96, 18432, 96, 8, 73728, 256000, 4096, False)
    said = {"source": "Nemotron-4 (arXiv 2402.16819)", "gpu": "H100-SXM-80GB", "precision": "bf16"}
    layout = {"tp": 8, "pp": 12, "vpp": 8, "micro_batch": 1}
    for world, batch, seconds in ((1536, 768, 10.3), (3072, 1536, 10.3), (6144, 2304, 8.0)):
        yield run(shapes, world, {"iter_time_s": seconds}, global_batch=batch, **said, **layout)


def nemo():
    said = {"source": "NeMo 24.07", "gpu": "DGX-H100", "precision": "fp8", "zero": 1}
    for *shapes, world, batch, size, tp, pp, cp, vpp, rate in NEMO:
        layout = {"tp": tp, "pp": pp, "cp": cp, "vpp": vpp, "micro_batch": size}
        result = {"tokens_per_s_per_gpu": rate}
        yield run(tuple(shapes), world, result, global_batch=batch, **said, **layout)


def llama():
    said = {"source": "Llama 3 (arXiv 2407.21783)", "gpu": "H100-SXM-80GB", "precision": "bf16"}
    for world, cp, seq, batch, rate in (
        (8192, 1, 8192, 2048, 430),
        (16384, 1, 8192, 2048, 400),
        (16384, 16, 131072, 128, 380),
    ):
        layout = {"tp": 8, "pp": 16, "cp": cp, "micro_batch": 1, "global_batch": batch, "zero": 1}
        shapes = (*LLAMA_405B, seq, True)
        yield run(shapes, world, {"tflops_per_gpu": rate}, **said, **layout)


def megatron_core():
    said = {"source": "Megatron-Core r0.8", "gpu": "H100-SXM-80GB", "precision": "bf16", "zero": 1}
    for heads, hidden, layers, tp, pp, world, batch, rate in MEGATRON_CORE:
        shapes = (layers, hidden, heads, heads, 4 * hidden, 131072, 4096, False)
        layout = {"tp": tp, "pp": pp, "global_batch": batch}
        yield run(shapes, world, {"tflops_per_gpu": rate}, **said, **layout)


def deep_ep():
    said = {"source": "NeMo AutoModel", "gpu": "DGX-H100", "precision": "bf16", "zero": 3, "tp": 1}
    for *shapes, world, batch, pp, vpp, ep, rate in DEEP_EP:
        layout = {"pp": pp, "vpp": vpp, "ep": ep, "micro_batch": 1, "global_batch": batch}
        yield run(tuple(shapes), world, {"tokens_per_s_per_gpu": rate}, **said, **layout)


def torchtitan():
    for precision, world, tp, size, seq, again, rate in TORCHTITAN:
        said = {"source": "torchtitan", "gpu": "H100", "precision": precision, "zero": 3}
        layout = {"tp": tp, "micro_batch": size, "recompute": again}
        result = {"tokens_per_s_per_gpu": rate}
        yield run((*LLAMA_8B, seq, True), world, result, dp=world // tp, **said, **layout)


def hagemann():
    said = {"source": "Hagemann 2023 (arXiv 2311.05610)", "precision": "bf16", "vpp": 1, "zero": 1}
    for size, seq, world, tp, pp, sp, seconds in HAGEMANN:
        layers, hidden, heads, inner = LLAMA_1[size]
        shapes = (layers, hidden, heads, heads, inner, 128000, seq, True)
        layout = {"tp": tp, "pp": pp, "sp": sp, "micro_batch": 1, "global_batch": 2**22 // seq}
        yield run(shapes, world, {"iter_time_s": seconds}, **said, **layout)


def optimus(gpus, hidden, heads, batch, rate=1.0, mode="1d"):
    """A run of 24 layers on sequences of 512 tokens, of the paper's tables (arXiv:2104.05343)."""
    said = {"source": "Optimus (arXiv 2104.05343)", "gpu": "Quadro RTX 5000 16GB (4/node)"}
    layout = {"tp": gpus, "micro_batch": batch, "global_batch": batch, "recompute": "full"}
    shapes = (24, hidden, heads, heads, 4 * hidden, None, 512, False)
    said |= {"precision": None, "sp": False, "tp_mode": mode}
    return run(shapes, gpus, {"samples_s": rate}, **said, **layout)


def weak_scaling(mode):
    """Optimus' table 2: more layers' width on more GPUs."""
    column = 3 if mode == "1d" else 5
    for gpus, hidden, heads, *rest in OPTIMUS:
        batch, rate = rest[column - 3 : column - 1]
        yield optimus(gpus, hidden, heads, batch, rate, mode)


@cache
def scores(table):
    return score(list(table()))


BOUNDS = {  # of a table's errors: their median and the largest
    narayanan: (0.08, 0.14),
    korthikanti: (0.05, 0.15),
    nemo: (0.08, 0.13),
    nemotron: (0.04, 0.07),
    megatron_turing: (0.16, 0.18),
    llama: (0.1, 0.18),
    megatron_core: (0.04, 0.11),
    deep_ep: (0.09, 0.17),
    torchtitan: (0.12, 0.14),
    hagemann: (0.04, 0.16),
}


def test_steps_that_were_not_fitted_on_are_predicted_within_some_per_cent():
    for table, (typical, worst) in BOUNDS.items():
        errors = [abs(one.error) for one in scores(table)]
        assert median(errors) < typical and max(errors) < worst, table.__name__


def test_eight_of_ten_steps_that_no_range_was_made_of_lie_in_their_range():
    inside, widths = [], []
    for one in (one for table in BOUNDS for one in scores(table)):
        known = RANGES[kind_of(one.record.work, one.record.device)]
        inside.append(known.low <= one.record.seconds / one.seconds <= known.high)
        widths.append(known.high / known.low)
    assert len(inside) > 60 and sum(inside) >= 0.8 * len(inside)
    assert max(widths) < 2.5, "a range that holds everything says nothing"


def test_larger_models_reach_more_of_the_peak_as_published():
    """Table 1: from 135 to 163 TFLOP/s; the two largest are the two best."""
    scored = scores(narayanan)
    said = [
        one.record.seconds / one.seconds * rate
        for one, (*_, rate) in zip(scored, TABLE_1, strict=True)
    ]
    assert {said.index(rate) for rate in sorted(said)[-2:]} == {8, 9}


def test_present_work_gains_over_full_recomputation_what_table_5_says():
    """29.0 % to 32.1 % of throughput."""
    seconds = [one.seconds for one in scores(korthikanti)]
    for full, present in zip(seconds[::2], seconds[1::2], strict=True):
        assert 1.25 < full / present < 1.44


def test_weak_scaling_of_two_dimensions_is_the_papers():
    """Table 2. 1D is ahead on 4 GPUs, both are level on 16, and 2D is ahead 1.5 times on 36 and 64.
    Plan errs by 10 % in 1D and by 29 % in 2D, so that it has the crossover between 16 and 36."""
    one, two = (score(list(weak_scaling(mode))) for mode in ("1d", "2d"))
    assert max(abs(s.error) for s in one) < 0.11
    assert max(abs(s.error) for s in two) < 0.3 and median(abs(s.error) for s in two) < 0.18
    rates = [
        b.record.work.global_batch_size / b.seconds * a.seconds / a.record.work.global_batch_size
        for a, b in zip(one, two, strict=True)
    ]
    assert max(rates[:2]) < 1 < min(rates[2:])  # the paper: 0.86, 1.02, 1.49, 1.48
    assert rates[3] == pytest.approx(0.95 / 0.64, rel=0.1)


def test_strong_scaling_of_two_dimensions_is_the_papers_in_order():
    """Efficiency falls from 74 % to 60 % in 1D and rises over it in 2D, from 45 % to 64 %, on 4 and
    64 GPUs. The batch is not in the record; of 24 sequences plan has the order at both ends."""
    alone = optimus(1, 3072, 64, 24).predict().step_seconds
    seconds = {
        (gpus, mode): optimus(gpus, 3072, 64, 24, mode=mode).predict().step_seconds
        for gpus in (4, 64)
        for mode in ("1d", "2d")
    }
    assert alone / 4 / seconds[4, "1d"] == pytest.approx(0.74, rel=0.04)
    assert seconds[4, "1d"] < seconds[4, "2d"] and seconds[64, "2d"] < seconds[64, "1d"]


def test_inference_on_64_gpus_gains_by_two_dimensions_about_what_the_paper_says():
    """1.78 times the sequences a second, forward passes alone; plan errs by 15 %."""
    one, two = (
        batch / optimus(64, 8192, 128, batch, mode=mode).predict().costs.block.forward
        for batch, mode in ((60, "1d"), (480, "2d"))
    )
    assert two / one == pytest.approx(1.78, rel=0.17)


def test_a_gpu_is_known_by_any_of_its_spellings():
    spellings = {
        "NVIDIA A100-SXM4-40GB": "a100-40gb",
        "A100-80GB": "a100-80gb",
        "DGX A100": "a100-80gb",
        "DGX-GB200 NVL72": "gb200",
        "b200": "b200",
        "Tesla V100-SXM3-32GB": "v100-32gb",
        "Quadro RTX 5000 16GB (TACC Frontera, 4/node)": "rtx-5000",
    }
    assert {gpu: device_of(gpu, "a paper") for gpu in spellings} == {
        gpu: GPUS[name] for gpu, name in spellings.items()
    }


def test_a_source_with_other_machines_is_timed_on_those():
    jean_zay = device_of("A100-80GB", "BigScience 176B topology sweep (384 A100)")
    assert jean_zay.network.bandwidth == 6.25e9  # 4 links of 100 Gb/s for 8 GPUs
    assert device_of("H100", "torchtitan").memory_bandwidth == 2.4e12
    assert device_of("V100", "BLOOM") is GPUS["v100-32gb"]


def test_a_missing_micro_batch_is_the_quickest_that_fits():
    (record,) = narayanan(gpus=32)
    seconds = {}
    for size in (1, 2, 4, 8, 16):
        layout = {"tp": 1, "pp": 1, "vpp": 1, "global_batch": 512, "sp": False, "micro_batch": size}
        said = {"source": NARAYANAN, "recompute": "full", **layout}
        one = run((24, 2304, 24), 32, {"tflops_per_gpu": 137}, **said)
        found = one.predict()
        seconds[size] = found.step_seconds if found.fits else float("inf")
    assert record.work.micro_batch_size == min(seconds, key=seconds.get)


def test_attention_is_written_out_before_flash_attention_and_in_kernels_apart_before_fusion():
    kinds = [
        (one.work.flash, one.work.fused)
        for source in ("arXiv 1909.08053", NARAYANAN, "arXiv:2205.05198", "arXiv:2305.13245")
        for one in [run((2, 256, 4), 1, {}, source=source, precision="bf16", tp=1, global_batch=1)]
    ]
    assert kinds == [(False, False), (False, True), (False, True), (True, True)]


def test_the_conventions_are_the_published_equations():
    """arXiv:2104.04473, equation 3, and arXiv:2205.05198, appendix A, per token."""
    model = load_config("gpt3-175b").model
    s, h, layers, vocab = 2048, 12288, 96, model.vocab_size
    body = layers * h**2 * (1 + s / (6 * h))
    assert MODEL.token_flops(model, s) == pytest.approx(72 * body + 6 * h * vocab, rel=1e-3)
    assert HARDWARE.token_flops(model, s) == pytest.approx(96 * body + 6 * h * vocab, rel=1e-3)
