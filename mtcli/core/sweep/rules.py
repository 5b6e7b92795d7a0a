"""Refuses what an array of models does not train, each with its reason. Imports no torch."""

from collections.abc import Iterator, Sequence

from mtcli.core.config.errors import MtcliError, Problem
from mtcli.core.config.rules import ENGINE_RULES, require
from mtcli.core.config.schema import RunConfig

SHARDED = {
    "tp": "shards layers over ranks, and an array's layers are batched on one",
    "cp": "shards sequences over ranks, and an array's models are small enough without",
    "pp": "shards blocks over ranks, whose idle time an array has no use for",
    "ep": "shards experts over ranks, and an array's experts are batched on one",
    "etp": "shards experts over ranks, and an array's experts are batched on one",
    "vpp": "cuts a pipeline finer, and an array has none",
}


def array_problems(config: RunConfig, world: int) -> Iterator[Problem]:
    """Lists what keeps a config's models out of an array on `world` ranks."""
    p, train = config.parallel, config.train
    for axis, reason in SHARDED.items():
        size = getattr(p, axis)
        if size > 1:
            hint = f"set parallel.{axis}=1; --nproc N are dp ranks of the array"
            yield Problem(f"{axis}={size} {reason}", hint, f"parallel.{axis}")
    if p.zero and world > 1:
        message = f"zero={p.zero} shards one model's state, and ranks replicate an array's"
        yield Problem(message, "set parallel.zero=0", "parallel.zero")
    if config.sync.method != "all_reduce":
        message = f"sync.method={config.sync.method!r} exchanges replicas of one model"
        yield Problem(message, "all_reduce", "sync.method")
    if config.model.has_router_biases and not config.lora.rank:
        moved = config.model.router_bias_update_rate > 0.0
        field = "router_bias_update_rate" if moved else "router_biases"
        message = "biases of routers are one model's, and are moved by its loads"
        hint = "model.aux_loss_coeff balances experts; adapters (lora.rank) share the biases"
        yield Problem(message, hint, f"model.{field}")
    for field, (is_set, message, hint) in _of_one_model(config).items():
        if is_set:
            yield Problem(message, hint, field)
    if train.precision == "fp8":
        yield Problem("batched GEMMs have no scales of float8", "bf16", "train.precision")


def _of_one_model(config: RunConfig) -> dict[str, tuple[object, str, str]]:
    """Returns, by field, (whether it is set, why it is of a model that trains alone, a hint)."""
    train, reselect = config.train, config.data.reselect_every
    return {
        "data.reselect_every": (
            reselect,
            f"reselect_every={reselect} chooses by one model's weights",
            "set data.reselect_every=0",
        ),
        "train.patience": (
            train.patience,
            f"patience={train.patience} ends one model's run, and an array's go on together",
            "train.patience = 0, and --hyperband or --median",
        ),
        "eval": (
            config.eval,
            f"{len(config.eval)} [[eval]] tables evaluate one model's weights",
            "leave [[eval]] out, and `mtcli eval` each trial",
        ),
        "phase": (
            config.phase,
            f"{len(config.phase)} phases change one model's batches",
            "leave [[phase]] out",
        ),
        "train.ema": (
            train.ema,
            f"ema={train.ema:g} averages one model's weights",
            "set train.ema=0",
        ),
        "train.freeze": (
            train.freeze,
            "frozen weights are each model's, and those of an array are all trained",
            "train the runs one by one",
        ),
        "train.cuda_graphs": (
            train.cuda_graphs,
            "CUDA graphs replay one model's micro-batches",
            "set train.cuda_graphs=false",
        ),
    }


def require_array(config: RunConfig | None, problems: Sequence[Problem], world: int) -> RunConfig:
    """Returns the config. Raises MtcliError with earlier `problems`, those of `array_problems` on
    `world` ranks, and all other rules that the config breaks."""
    if config is None:
        raise MtcliError(*problems)
    alone = config.parallel.model_copy(update=dict.fromkeys(SHARDED, 1))
    found_problems = [*problems, *array_problems(config, world)]
    config = config.model_copy(update={"parallel": alone})
    return require(config, world, *ENGINE_RULES, load_problems=found_problems)


# FLOP of a GEMM beside which launches on a CPU cost nothing: 3 ms of an AVX-512 core.
SMALL_GEMM = 2**28


def largest_gemm(config: RunConfig) -> int:
    """FLOP of the largest GEMM of one micro-batch's forward: of the MLP or the logits."""
    model, batch = config.model, config.batch
    tokens = batch.micro_batch_size * batch.seq_len
    return 2 * tokens * model.hidden_size * max(model.ffn_hidden_size, model.vocab_size)


def trains_in_turn(config: RunConfig, device: str) -> bool:
    """Whether models train faster one after another than as an array: on a CPU that one model's
    GEMMs fill. Never with adapters, as an array holds their base once."""
    return device == "cpu" and not config.lora.rank and largest_gemm(config) >= SMALL_GEMM
