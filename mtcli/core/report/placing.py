"""Who is where: each rank's place on both grids and the layers it holds."""

from itertools import accumulate
from typing import Any

from mtcli.core.cost.ranks import rank_places
from mtcli.core.cost.workload import Workload


def rank_map(work: Workload) -> list[dict[str, Any]]:
    """Each rank's place on both grids and the layers of its stages."""
    layers = list(accumulate(work.layers_of_stage, initial=0))
    return [
        {
            "rank": rank,
            **places,
            "layers": [
                layer
                for stage in work.layout.stages(places["attention"]["pp"])
                for layer in range(layers[stage], layers[stage + 1])
            ],
        }
        for rank, places in enumerate(rank_places(work.layout))
    ]
