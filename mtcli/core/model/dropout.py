"""Dropout with the same masks on every layout."""

from torch import Tensor, nn

from mtcli.kernels.dropout import DropoutStream, dropout


class Dropout(nn.Module):
    """Dropout with a mask that is a function of (seed, site, token number, column) alone."""

    def __init__(self, stream: DropoutStream) -> None:
        super().__init__()
        self.stream = stream

    @property
    def active(self) -> bool:
        """Whether the probability is above 0."""
        return self.stream.active

    def forward(
        self, x_TD: Tensor, numbers_T: Tensor | None, onto_TD: Tensor | None = None
    ) -> Tensor:
        """dropout(x_TD), scaled up, added to `onto_TD` if given.

        `numbers_T` index the mask; None is no dropout.
        """
        if self.active and numbers_T is not None:
            return dropout(x_TD, numbers_T, self.stream.key, self.stream.drop, onto_TD)
        return x_TD if onto_TD is None else onto_TD + x_TD
