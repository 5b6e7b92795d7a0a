"""The paper's kinds of model (HFTA, section 5) as plain torch modules, small and paper-sized."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PointNet(nn.Module):
    """Classifies point clouds [N, 3, P] (arXiv:1612.00593), with its input transform."""

    def __init__(self, widths: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        a, b, c = widths
        self.turn = nn.Sequential(*pointwise(3, a), *pointwise(a, c))
        self.turned = nn.Sequential(nn.Linear(c, b), nn.BatchNorm1d(b), nn.ReLU(), nn.Linear(b, 9))
        self.points = nn.Sequential(*pointwise(3, a), *pointwise(a, b), *pointwise(b, c)[:-1])
        self.head = nn.Sequential(
            nn.Linear(c, b), nn.BatchNorm1d(b), nn.ReLU(), nn.Linear(b, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        turn = self.turned(self.turn(x).amax(2)).view(-1, 3, 3)
        x = torch.bmm(x.transpose(2, 1), turn + torch.eye(3, device=x.device)).transpose(2, 1)
        return self.head(self.points(x).amax(2))


def pointwise(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv1d(inputs, outputs, 1), nn.BatchNorm1d(outputs), nn.ReLU()]


class Dcgan(nn.Module):
    """A generator and a discriminator of images (arXiv:1511.06434): logits of real and made ones.

    The gradient of the generator is reversed, so that one loss trains both.
    """

    def __init__(self, latent: int, width: int, doublings: int) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(doublings)]
        make = [nn.ConvTranspose2d(latent, widths[-1], 4), nn.BatchNorm2d(widths[-1]), nn.ReLU()]
        for wide, thin in zip(widths[:0:-1], widths[-2::-1], strict=True):
            make += [nn.ConvTranspose2d(wide, thin, 4, 2, 1), nn.BatchNorm2d(thin), nn.ReLU()]
        self.make = nn.Sequential(*make, nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh())
        judge = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2)]
        for thin, wide in zip(widths[:-1], widths[1:], strict=True):
            judge += [nn.Conv2d(thin, wide, 4, 2, 1), nn.BatchNorm2d(wide), nn.LeakyReLU(0.2)]
        self.judge = nn.Sequential(*judge, nn.Conv2d(widths[-1], 1, 4), nn.Flatten())

    def forward(self, z: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        made = self.make(z)
        return self.judge(real), self.judge(2 * made.detach() - made)


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.second(F.relu(self.norm1(self.first(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """Classifies small images (arXiv:1512.03385, section 4.2)."""

    def __init__(self, widths: tuple[int, ...], blocks: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()
        )
        stages, inputs = [], widths[0]
        for stage, width in enumerate(widths):
            for block in range(blocks):
                stages.append(Block(inputs, width, 2 if stage and not block else 1))
                inputs = width
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.stages(self.stem(x)), 1)
        return self.head(x.flatten(1))


class Encoder(nn.Module):
    """A transformer over tokens [N, T] with logits [N, V, T], causal or as BERT's."""

    def __init__(self, width: int, layers: int, vocab: int, length: int, causal: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, max(width // 64, 2), 4 * width, 0.0, "gelu", batch_first=True, norm_first=causal
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocab)
        mask = torch.ones(length, length, dtype=torch.bool).triu(1) if causal else None
        self.register_buffer("mask", mask)

    def forward(self, ids: Tensor) -> Tensor:
        at = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(at)
        x = self.encoder(x, mask=self.mask, is_causal=self.mask is not None)
        return self.head(x).transpose(1, 2)


class Case(NamedTuple):
    """How to make a model, its batch (inputs, targets) and its loss of outputs and targets."""

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[tuple[Tensor, ...], Tensor]]
    loss: Callable[..., Tensor]
    counts: int  # samples or tokens of one model's batch
    unit: str = "samples"
    positions: tuple[str, ...] = ()


def gan_loss(outputs: tuple[Tensor, Tensor], _: Tensor) -> Tensor:
    real, made = outputs
    return F.softplus(-real).mean() + F.softplus(made).mean()


def images(n: int, side: int, classes: int) -> tuple[tuple[Tensor], Tensor]:
    return (torch.randn(n, 3, side, side),), torch.randint(classes, (n,))


def gan_batch(n: int, latent: int, side: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    return (torch.randn(n, latent, 1, 1), torch.randn(n, 3, side, side).tanh()), torch.zeros(n)


def clouds(n: int, points: int, classes: int) -> tuple[tuple[Tensor], Tensor]:
    return (torch.randn(n, 3, points),), torch.randint(classes, (n,))


def tokens(n: int, length: int, vocab: int) -> tuple[tuple[Tensor], Tensor]:
    ids = torch.randint(vocab, (n, length + 1))
    return (ids[:, :-1],), ids[:, 1:]


def encoder(n: int, sizes: tuple[int, int, int, int], causal: bool) -> Case:
    _, _, vocab, length = sizes
    make, batch = lambda: Encoder(*sizes, causal), lambda: tokens(n, length, vocab)
    return Case(make, batch, F.cross_entropy, n * length, "tokens", ("positions",))


def pointnet(n: int, points: int, widths: tuple[int, int, int]) -> Case:
    make, batch = lambda: PointNet(widths, 16), lambda: clouds(n, points, 16)
    return Case(make, batch, F.cross_entropy, n)


def dcgan(n: int, latent: int, width: int, doublings: int) -> Case:
    side = 4 * 2**doublings
    make, batch = lambda: Dcgan(latent, width, doublings), lambda: gan_batch(n, latent, side)
    return Case(make, batch, gan_loss, n)


def resnet(n: int, side: int, widths: tuple[int, ...], blocks: int) -> Case:
    make, batch = lambda: ResNet(widths, blocks, 10), lambda: images(n, side, 10)
    return Case(make, batch, F.cross_entropy, n)


# fmt: off
TINY = {
    "pointnet": pointnet(2, 16, (8, 8, 16)),
    "dcgan": dcgan(2, 8, 8, 2),
    "resnet": resnet(2, 8, (8, 16), 1),
    "transformer": encoder(2, (8, 1, 16, 8), True),
    "bert": encoder(2, (8, 1, 16, 8), False),
}
SMALL = {
    "pointnet": pointnet(8, 128, (32, 64, 128)),
    "dcgan": dcgan(8, 16, 8, 3),
    "resnet": resnet(8, 16, (8, 16, 32), 1),
    "transformer": encoder(4, (32, 2, 256, 32), True),
    "bert": encoder(2, (64, 4, 512, 64), False),
}
PAPER = {
    "pointnet": pointnet(32, 2500, (64, 128, 1024)),
    "dcgan": dcgan(64, 100, 64, 4),
    "resnet": resnet(128, 32, (64, 128, 256, 512), 2),
    "transformer": encoder(20, (256, 2, 32768, 35), True),
    "bert": encoder(16, (512, 8, 30592, 128), False),
}
# fmt: on
