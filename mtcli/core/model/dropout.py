"""Dropout that no layout changes."""

from torch import Tensor, nn

from mtcli.kernels.dropout import dropout
from mtcli.kernels.random import stream_key


class Dropout(nn.Module):
    """Dropout whose mask depends on (seed, site, token number, column), never on the layout."""

    def __init__(self, site: str, drop: float, seed: int) -> None:
        super().__init__()
        self.drop = drop
        self.key = stream_key(seed, "dropout", site)

    def forward(
        self, x_TD: Tensor, numbers_T: Tensor | None, onto_TD: Tensor | None = None
    ) -> Tensor:
        """x_TD with elements zeroed and the rest scaled up, added to `onto_TD` where given.

        Nothing is zeroed where numbers are None.
        """
        if self.drop > 0.0 and numbers_T is not None:
            return dropout(x_TD, numbers_T, self.key, self.drop, onto_TD)
        return x_TD if onto_TD is None else onto_TD + x_TD
