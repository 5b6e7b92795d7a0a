"""Dropout that no layout changes."""

from torch import Tensor, nn

from mtcli.kernels.dropout import DropoutStream, dropout


class Dropout(nn.Module):
    """Dropout whose mask depends on (seed, site, token number, column), never on the layout."""

    def __init__(self, stream: DropoutStream) -> None:
        super().__init__()
        self.stream = stream

    @property
    def active(self) -> bool:
        """Whether anything may be zeroed."""
        return self.stream.active

    def forward(
        self, x_TD: Tensor, numbers_T: Tensor | None, onto_TD: Tensor | None = None
    ) -> Tensor:
        """x_TD with elements zeroed and the rest scaled up, added to `onto_TD` where given.

        Nothing is zeroed where numbers are None.
        """
        if self.active and numbers_T is not None:
            return dropout(x_TD, numbers_T, self.stream.key, self.stream.drop, onto_TD)
        return x_TD if onto_TD is None else onto_TD + x_TD
