"""Every preset against what its source prints.

The counts of released checkpoints, and for the GPTs of the papers the formula of Narayanan 2021
(arXiv:2104.04473, section 5.1). `core/model/test_transformers.py` has transformers' own counts.
"""

import math
import tomllib
from importlib.resources import files

from mtcli.core.config.loading import dump_toml, load_config, preset_names, validate
from mtcli.core.config.rules import problems
from mtcli.core.config.schema import RunConfig
from mtcli.core.mesh.parameters import count_active, count_parameters

# fmt: off
RELEASED = {  # parameters of the released checkpoints, to the unit
    "gpt2-124m":           124_439_808,
    "gpt2-345m":           354_823_168,
    "gpt2-355m":           354_823_168,
    "gpt2-774m":           774_030_080,
    "gpt2-1.5b":         1_557_611_200,
    "llama-2-7b":        6_738_415_616,
    "llama-3.1-8b":      8_030_261_248,
    "llama-3.1-70b":    70_553_706_496,
    "llama-3.1-405b":  405_853_388_800,
    "tinyllama-1.1b":    1_100_048_384,
    "mixtral-8x7b":     46_702_792_704,
    "mixtral-8x22b":   140_620_634_112,
    "qwen2-57b-a14b":   57_408_658_944,
    "qwen3-0.6b":           596_049_920,
    "qwen3-1.7b":         1_720_574_976,
    "qwen3-4b":           4_022_468_096,
    "olmo-2-1b":          1_484_916_736,
    "olmo-2-7b":          7_298_617_344,
    "olmo-2-13b":        13_716_198_400,
    "olmo-2-32b":        32_234_279_936,
    "deepseek-v2-lite":  15_706_484_224,
    "deepseek-v2":      235_741_434_880,
    "deepseek-v3":      671_026_404_352,
    "kimi-k2":        1_026_408_209_408,
    "moonlight-16b-a3b": 15_960_108_544,
    "glm-4.5-air":      106_852_245_504,
    "glm-4.5":          352_797_814_784,
    "olmo-3-7b":          7_298_011_136,
    "olmo-3-32b":        32_233_522_176,
    "llama-3.2-1b":       1_235_814_400,
    "llama-3.2-3b":       3_212_749_824,
    "qwen3-8b":           8_190_735_360,
    "qwen3-14b":         14_768_307_200,
    "qwen3-32b":         32_762_123_264,
    "qwen3-30b-a3b":     30_532_122_624,
    "qwen3-235b-a22b":  235_093_634_560,
    "mistral-7b":         7_241_732_096,
    "pythia-14m":            14_067_712,
    "pythia-70m":            70_426_624,
    "pythia-160m":          162_322_944,
    "pythia-410m":          405_334_016,
    "pythia-1b":          1_011_781_632,
    "pythia-1.4b":        1_414_647_808,
    "pythia-2.8b":        2_775_208_960,
    "pythia-6.9b":        6_857_302_016,
    "pythia-12b":        11_846_072_320,
    "gpt-neox-20b":      20_554_567_680,
    "smollm3-3b":         3_075_098_624,
    "phi-1.5":            1_418_270_720,
    "phi-2":              2_779_683_840,
    "phi-3-mini":         3_821_079_552,
    "phi-3-medium":      13_960_238_080,
    "phi-4":             14_659_507_200,
    "phi-4-mini":         3_836_021_760,
    "stablelm-3b-4e1t":   2_795_443_200,
    "stablelm-2-1.6b":    1_644_515_328,
    "stablelm-2-12b":    12_143_185_920,
    "glm-4-9b":           9_400_279_040,
    "glm-4-32b":         32_566_081_536,
    "falcon-7b":          6_921_720_704,
    "falcon-40b":        41_303_293_952,
    "falcon-180b":      178_557_088_768,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_346_304,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "starcoder2-15b": 15_957_889_024,
    "minitron-4b": 4_190_509_056,
    "nemotron-4-15b": 15_628_775_424,
    "nemotron-4-340b": 341_029_195_776,
    "gpt-oss-20b":       20_914_757_184,
    "gpt-oss-120b":     116_829_156_672,
    "bert-110m":           110_106_428,
    "bert-336m":           336_226_108,
    "roberta-base":          124_697_433,
    "roberta-large":         355_412_057,
    "modernbert-base":       149_655_232,
    "modernbert-large":      395_881_664,
}
BERTS = {"megatron-bert-1.3b": "1.3", "megatron-bert-3.9b": "3.9"}  # billions as the paper has them
PRINTED = {  # layers, hidden size, billions as the paper prints them
    "megatron-1.2b":    ( 40,  1536, "1.2"),
    "megatron-2.5b":    ( 54,  1920, "2.5"),
    "megatron-4.2b":    ( 64,  2304, "4.2"),
    "megatron-8.3b":    ( 72,  3072, "8.3"),
    "narayanan-1.7b":   ( 24,  2304, "1.7"),
    "narayanan-3.6b":   ( 30,  3072, "3.6"),
    "narayanan-7.5b":   ( 36,  4096, "7.5"),
    "narayanan-18.4b":  ( 40,  6144, "18.4"),
    "narayanan-39.1b":  ( 48,  8192, "39.1"),
    "narayanan-76.1b":  ( 60, 10240, "76.1"),
    "narayanan-145.6b": ( 80, 12288, "145.6"),
    "narayanan-310.1b": ( 96, 16384, "310.1"),
    "narayanan-529.6b": (105, 20480, "529.6"),
    "narayanan-1t":     (128, 25600, "1008.0"),
    "gpt3-2.7b":        ( 32,  2560, "2.7"),
    "gpt3-175b":        ( 96, 12288, "174.6"),
    "mt-nlg-530b":      (105, 20480, "530"),
}
GPUS = {  # the numbers of devices that the papers ran on
    "megatron-1.2b": 64, "megatron-2.5b": 128, "megatron-4.2b": 256, "megatron-8.3b": 512,
    "narayanan-1.7b": 32, "narayanan-3.6b": 64, "narayanan-7.5b": 128, "narayanan-18.4b": 256,
    "narayanan-39.1b": 512, "narayanan-76.1b": 1024, "narayanan-145.6b": 1536,
    "narayanan-310.1b": 1920, "narayanan-529.6b": 2520, "narayanan-1t": 3072,
    "gpt3-175b": 384, "mt-nlg-530b": 2240, "llama-3.1-405b": 8192,
    "mixtral-8x7b": 64, "mixtral-8x22b": 128, "qwen2-57b-a14b": 64,
}
ACTIVE = {"mixtral-8x7b": "12.9", "mixtral-8x22b": "39.2", "qwen2-57b-a14b": "14.2"}
# fmt: on


def test_every_preset_is_held_to_a_published_count():
    assert set(preset_names()) == {*RELEASED, *PRINTED, *BERTS, "tiny"}


def test_a_released_model_has_the_parameters_of_its_checkpoint():
    assert {name: count_parameters(load_config(name).model) for name in RELEASED} == RELEASED


def test_a_paper_s_bert_has_the_parameters_that_the_paper_prints():
    counts = {name: count_parameters(load_config(name).model) for name in BERTS}
    assert {name: f"{count / 1e9:.1f}" for name, count in counts.items()} == BERTS


def test_a_paper_s_gpt_has_the_parameters_that_the_paper_prints(subtests):
    for name, (layers, hidden, printed) in PRINTED.items():
        model = load_config(name).model
        tables = (model.vocab_size + model.max_seq_len) / (12 * layers * hidden)
        formula = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + tables)
        final_norm = 2 * hidden  # the one thing that the formula leaves out
        decimals = len(printed.partition(".")[2])
        with subtests.test(name):
            assert (model.num_layers, model.hidden_size) == (layers, hidden)
            assert count_parameters(model) == round(formula) + final_norm
            assert f"{count_parameters(model) / 1e9:.{decimals}f}" == printed


def test_a_mixture_of_experts_has_its_published_active_parameters():
    counts = {name: count_active(load_config(name).model) for name in ACTIVE}
    assert {name: f"{count / 1e9:.1f}" for name, count in counts.items()} == ACTIVE


def test_a_preset_breaks_no_rule_on_its_published_devices_and_reads_back_with_its_source(subtests):
    for name in preset_names():
        config = load_config(name)
        p = config.parallel
        fewest = math.lcm(p.tp * p.cp * p.pp, p.ep * p.etp * p.pp)
        text = files("mtcli").joinpath("presets", f"{name}.toml").read_text()
        with subtests.test(name):
            assert problems(config, fewest) == []
            assert problems(config, GPUS.get(name, fewest)) == []
            assert validate(tomllib.loads(dump_toml(config))) == (config, [])
            assert text.startswith("# ")
            assert name == "tiny" or "arXiv:" in text or "released" in text or "v0.1" in text


def test_a_run_can_take_a_model_from_a_preset_and_change_one_size():
    table = {"model": {"preset": "gpt2-345m", "vocab_size": 51200}}
    config, found = validate(table)
    assert found == []
    assert isinstance(config, RunConfig)
    assert config.model == load_config("gpt2-345m", ["model.vocab_size=51200"]).model
