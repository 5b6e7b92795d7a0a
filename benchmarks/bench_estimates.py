"""How far the closed forms of a search are from the real stages, in bytes of the fullest rank.

Draws layouts that a search tries of presets on GPUs, and rehearses each. Prints those whose
estimates are more than MARGIN off, and the quantiles of all.

    python benchmarks/bench_estimates.py [--seed 0] [--count 100]
"""

from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from arguments import Arguments, write_rows
from tqdm import tqdm

from mtcli.core.config import rules
from mtcli.core.config.errors import MtcliError
from mtcli.core.config.loading import load_config, preset_names
from mtcli.core.config.schema import RunConfig
from mtcli.core.plan.activations import MARGIN
from mtcli.core.plan.hardware import GPUS, Device
from mtcli.core.plan.predict import predict_workload
from mtcli.core.plan.search import apply, works_of
from mtcli.core.plan.workload import Workload
from mtcli.core.rehearse.request import planned

DEVICES = ("a100-80gb", "h100", "b200")


class Case(NamedTuple):
    """A layout that a search tries."""

    config: RunConfig
    world: int
    device: Device

    @property
    def words(self) -> str:
        """The model and layout in one line."""
        work = Workload.of(self.config, self.world)
        return (
            f"{self.config.model.architecture} {self.config.model.hidden_size}, {work.layout_words}"
        )

    def error(self) -> float:
        """The estimate over the rehearsed bytes of the fullest rank, less 1."""
        estimate = predict_workload(Workload.of(self.config, self.world), self.device)
        return estimate.memory.total / planned(*self).memory.total - 1


def cases(random: Random) -> Iterator[Case]:
    """Yields layouts of presets without end."""
    choice, presets = random.choice, preset_names()
    while True:
        fields = [
            f"batch.seq_len={choice([1024, 2048, 4096, 8192])}",
            f"batch.global_batch_size={choice([256, 1024])}",
            f"optimizer.name={choice(['adamw', 'adamw', 'lamb', 'sgd'])}",
            "train.precision=bf16",
        ]
        name, world = choice(presets), 2 ** choice([0, 1, 2, 3, 4, 6, 8, 10])
        device = GPUS[choice(DEVICES)]
        try:
            config = load_config(name, fields)
        except MtcliError:  # more tokens than the model has positions
            continue
        if works := works_of(config, world, device, frozenset()):
            chosen = apply(config, choice(works))
            if not rules.problems(chosen, world):
                yield Case(chosen, world, device)


def main() -> None:
    parser = Arguments(__doc__, count=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    given = parser.parse_args()
    errors = []
    drawn = zip(range(given.count), cases(Random(given.seed)), strict=False)
    for _, case in tqdm(drawn, total=given.count, unit="layout"):
        errors.append(case.error())
        if abs(errors[-1]) > MARGIN:
            tqdm.write(f"{errors[-1]:+.1%} {case.words}")
    errors.sort()
    write_rows(given.json, {"seed": given.seed, "errors": errors})
    for share in (0.0, 0.05, 0.5, 0.95, 1.0):
        print(f"{share:4.0%} of layouts: at most {errors[round(share * (len(errors) - 1))]:+.1%}")


if __name__ == "__main__":
    main()
