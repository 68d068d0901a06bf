"""Every kind of model and optimizer trains to the same bits as with DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, check_case, run_case
from torch import nn
from torch.nn import functional as F

from bytescheduler.transports import torch_distributed

pytestmark = pytest.mark.multiprocess
STEPS = 6


class Images(nn.Module):
    """Convolutions with batch norm; a parameter of the root itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(8 * 64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).flatten(1)) * self.scale


class Language(nn.Module):
    """Attention (reads its out_proj without calling it) and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.position = nn.ParameterList([nn.Parameter(torch.zeros(12, 32))])
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(self.embed(tokens) + self.position[0])
        return F.linear(self.norm(hidden), self.embed.weight)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, 2, batch_first=True)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Experts(nn.Module):
    """Chooses one expert per batch: the others are unused, on one rank or on both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        choice = int(x.abs().sum() * 1000) % 3  # the fourth is never used
        return self.head(F.relu(self.experts[choice](F.relu(self.first(x)))))


class OwnExperts(nn.Module):
    """After a first batch, each rank uses one expert only; the second takes long to send."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 10))
            for width in (128, 2048)
        )
        self.batches = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.first(x))
        chosen = [self.experts[min(dist.get_rank(), 1)]] if self.batches else self.experts
        self.batches += 1
        return torch.stack([expert(hidden) for expert in chosen]).sum(0)


def _images(g: torch.Generator) -> Any:
    return torch.randn(6, 1, 8, 8, generator=g), torch.randint(10, (6,), generator=g)


def _rows(g: torch.Generator) -> Any:
    return torch.randn(6, 8, generator=g), torch.randint(10, (6,), generator=g)


def _sequences(g: torch.Generator) -> Any:
    return torch.randn(6, 5, 8, generator=g), torch.randint(10, (6,), generator=g)


def _tokens(g: torch.Generator) -> Any:
    tokens = torch.randint(50, (4, 13), generator=g)
    return tokens[:, :-1], tokens[:, 1:]


def predict(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


MODELS: dict[str, dict[str, Any]] = {
    "images": {"model": Images, "batch": _images, "steps": STEPS},
    "language": {"model": Language, "batch": _tokens, "loss": predict, "steps": STEPS},
    "recurrent": {"model": Recurrent, "batch": _sequences, "steps": STEPS},
    "experts": {
        "model": Experts,
        "batch": _rows,
        "ddp": {"find_unused_parameters": True},
        "steps": STEPS,
    },
}
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=1e-2, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, 1e-2),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
}


CASES = {
    **{name: Case(optimizer=OPTIMIZERS["AdamW"], **model) for name, model in MODELS.items()},
    **{
        name: Case(optimizer=make, modes=("priority",), **MODELS["images"])
        for name, make in OPTIMIZERS.items()
    },
    **{
        f"{name}, to rounding": Case(
            optimizer=OPTIMIZERS["SGD"], modes=("priority",), tolerance=1e-4, **model
        )
        for name, model in MODELS.items()
    },
    "own experts": Case(
        optimizer=OPTIMIZERS["AdamW"],
        model=OwnExperts,
        batch=_rows,
        ddp={"find_unused_parameters": True},
        steps=4,
    ),
}


@pytest.mark.parametrize("model", MODELS)
def test_models_train_to_the_same_bits(two_ranks, model):
    check_case(two_ranks, __name__, model)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_train_to_the_same_bits(two_ranks, optimizer):
    check_case(two_ranks, __name__, optimizer)


@pytest.mark.parametrize("model", MODELS)
def test_three_ranks_agree_to_rounding(three_ranks, model):
    check_case(three_ranks, __name__, f"{model}, to rounding")


def run_with(rank: int, most_bytes: int, name: str) -> dict[str, dict[str, float]]:
    """With chunks of at most ``most_bytes`` started in any order; larger ones in one order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_distributed, "MOST_BYTES", most_bytes)
        return run_case(rank, __name__, name)


@pytest.mark.parametrize("most_bytes", [0, torch_distributed.MOST_BYTES])
def test_the_next_step_does_not_overtake_what_another_rank_needs_for_it(two_ranks, most_bytes):
    """Overtaken, that would never go: the next step's chunks wait for the other rank."""
    for found in two_ranks.run(run_with, most_bytes, "own experts"):
        assert found == {mode: {} for mode in CASES["own experts"].modes}
