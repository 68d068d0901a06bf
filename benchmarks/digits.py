"""Real data and a real model that are at hand everywhere: scikit-learn's 1,797 digits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

SIDE = 8
CLASSES = 10
TEST_SHARE = 0.2
SHUFFLE_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """Images (n, 1, 8, 8) in [0, 1] and labels (n,)."""

    images: Tensor
    labels: Tensor

    def batches(self, size: int, seed: int) -> list[tuple[Tensor, Tensor]]:
        """Whole batches in an order that ``seed`` decides."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self.images), generator=generator)
        whole = order[: len(order) // size * size].view(-1, size)
        return [(self.images[rows], self.labels[rows]) for rows in whole]


def load_digits(rank: int, world_size: int) -> tuple[Digits, Digits]:
    """This rank's share of the training set, and the whole test set."""
    from sklearn import datasets

    found = datasets.load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(found.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SHUFFLE_SEED))
    test, train = order.split(
        [int(len(images) * TEST_SHARE), len(images) - int(len(images) * TEST_SHARE)]
    )
    mine = train[: len(train) // world_size * world_size][rank::world_size]
    return (
        Digits(images=images[mine], labels=labels[mine]),
        Digits(images=images[test], labels=labels[test]),
    )


def make_network(seed: int, width: int = 32) -> nn.Module:
    """A small VGG: convolutions take the time, dense layers have the parameters."""
    torch.manual_seed(seed)
    flat = 2 * width * (SIDE // 2) ** 2
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(flat, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, CLASSES),
    )


def accuracy(model: nn.Module, data: Digits) -> float:
    """Share of right answers."""
    model.eval()
    with torch.no_grad():
        right = (model(data.images).argmax(1) == data.labels).float().mean()
    model.train()
    return float(right)
