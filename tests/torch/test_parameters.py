"""Parameters of every kind: shared, read by others, derived, odd in owner, shape, layout, dtype."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from cases import (
    MODES,
    Case,
    Rows,
    adam,
    batches,
    check_case,
    classify,
    differences,
    keywords,
    outcome,
    sgd,
)
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import bytescheduler.torch as bs

pytestmark = pytest.mark.multiprocess
CASES: dict[str, Case] = {}
DOUBLE: dict[str, Any] = {"reference": "single", "tolerance": 1e-12}


def in_double(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0].double()), batch[1])


# -- shared by several modules, used several times, or recomputed


class Tied(nn.Module):
    """Encoder and decoder are one matrix; the same layer is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(8, 8, bias=False)
        self.again = nn.Linear(8, 8)
        self.decode = nn.Linear(8, 8)
        self.decode.weight = self.encode.weight
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.again(torch.tanh(self.encode(x))))
        return self.head(torch.tanh(self.decode(torch.tanh(self.again(hidden)))))


class SharedModule(nn.Module):
    """One module object under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.other = self.one
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.other(torch.tanh(self.one(x)))))


class Checkpointed(Rows):
    """Activations are computed again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = checkpoint(self._middle, hidden, use_reentrant=self.reentrant)
        return self.head(hidden)

    def _middle(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(hidden))


class WholeCheckpointed(Rows):
    """Everything is computed again, the first layer too."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=self.reentrant)


CASES |= {
    "tied": Case(model=Tied),
    "shared module": Case(model=SharedModule),
    **{
        f"{model.__name__}, {'re-entrant' if reentrant else 'not re-entrant'}": Case(
            model=partial(model, reentrant), reference="single"
        )
        for model in (Checkpointed, WholeCheckpointed)
        for reentrant in (True, False)
    },
}


# -- read by a module that never calls the owner


class ReadByParent(nn.Module):
    """The forward of the root uses the weights of children that are never called."""

    def __init__(self, *, late: bool) -> None:
        super().__init__()
        self.late = late
        self.steps = 0
        self.store = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        a, b = self.store["a"], self.store["b"]
        if self.late and self.steps < 3:  # the path changes after the order was learned
            return b(torch.tanh(a(x)))
        return F.linear(torch.tanh(F.linear(x, a.weight, a.bias)), b.weight, b.bias)


class Functional(nn.Module):
    """``functional_call`` on a child, with its own parameters handed in."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Rows()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(self.inner, dict(self.inner.named_parameters()), (x,))


class SiblingReads(nn.Module):
    """The first layer uses, beside its own, the weight of the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x) + x @ self.last.weight.t())
        return self.head(torch.tanh(self.last(hidden)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0])


class WeightsInLoss(Rows):
    """A penalty on weights, computed outside of any module's forward."""


def with_penalty(model: Any, batch: Any) -> torch.Tensor:
    penalty = sum(p.square().sum() for p in model.parameters())
    return F.cross_entropy(model(batch[0].double()), batch[1]) + 0.01 * penalty


CASES |= {
    "read by the root": Case(model=partial(ReadByParent, late=False)),
    "read by the root, later": Case(model=partial(ReadByParent, late=True)),
    "functional call": Case(model=Functional),
    "read by a sibling": Case(model=SiblingReads),
    "attention": Case(model=Attention),
    "penalty on weights": Case(model=partial(Rows, torch.float64), loss=with_penalty, **DOUBLE),
}


# -- derived from other parameters


class Normed(Rows):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.first = norm(self.first)
        self.second = norm(self.second)


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


class Parametrized(Rows):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrize.register_parametrization(self.second, "weight", Symmetric())


CASES |= {
    "weight norm": Case(model=partial(Normed, parametrizations.weight_norm)),
    "spectral norm": Case(model=partial(Normed, parametrizations.spectral_norm)),
    "orthogonal": Case(
        model=partial(Normed, parametrizations.orthogonal), optimizer=lambda p: sgd(p)
    ),
    "spectral norm, by hook": Case(model=partial(Normed, nn.utils.spectral_norm)),
    "custom parametrization": Case(model=Parametrized),
}


# -- odd in owner or shape


class Lists(nn.Module):
    """Parameters in containers and in the root, a scalar, an empty one, a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.none = nn.Parameter(torch.empty(0, 8))
        self.row = nn.Parameter(torch.ones(1))
        self.weights = nn.ParameterList([torch.randn(8, 8) / 8 for _ in range(3)])
        self.named = nn.ParameterDict({"out": torch.randn(4, 8), "bias": torch.zeros(4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.cat([x, self.none]) * self.scale + self.row
        for weight in self.weights:
            hidden = torch.tanh(hidden @ weight)
        return F.linear(hidden, self.named["out"], self.named["bias"])


class Root(nn.Module):
    """No child at all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class Nothing(nn.Module):
    """An empty parameter that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0))
        self.inner = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


CASES |= {
    "lists and dictionaries": Case(model=Lists),
    "root only": Case(model=Root),
    "one layer": Case(model=partial(nn.Linear, 8, 4)),
    "one scalar": Case(
        model=partial(nn.PReLU, 1), loss=lambda model, batch: model(batch[0]).square().mean()
    ),
    "unused empty": Case(model=Nothing, ddp={"find_unused_parameters": True}),
    "large beside small": Case(model=lambda: nn.Sequential(nn.Linear(8, 500), nn.Linear(500, 4))),
}


# -- layouts and dtypes


class Strided(nn.Module):
    """Parameters that are transposed, cut from something larger, or broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(8, 16).t())
        self.sliced = nn.Parameter(torch.randn(16, 32)[:, ::2])
        self.narrow = nn.Parameter(torch.randn(8, 16)[2:6])
        self.permuted = nn.Parameter(torch.randn(2, 3, 4).permute(2, 0, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(F.linear(x, self.transposed))
        hidden = torch.tanh(F.linear(hidden, self.sliced))
        return F.linear(hidden, self.narrow) * self.permuted.sum((1, 2))


def channels_last() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 2),
        nn.Flatten(),
    )  # fmt: skip
    return model.to(memory_format=torch.channels_last)


def pictures(g: torch.Generator) -> Any:
    x = torch.randn(6, 2, 2, 2, generator=g).to(memory_format=torch.channels_last)
    return x, torch.randint(4, (6,), generator=g)


class Mixed(nn.Module):
    """Each layer computes in a dtype of its own."""

    DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=dtype) for dtype in self.DTYPES)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return self.head(x.float())


def in_dtype(model: Any, batch: Any, *, dtype: torch.dtype) -> torch.Tensor:
    return F.cross_entropy(model(batch[0].to(dtype)).double(), batch[1])


CASES |= {
    "strided": Case(model=Strided),
    "channels last": Case(model=channels_last, batch=pictures),
    "mixed dtypes": Case(model=Mixed),
    "mixed dtypes, AdamW": Case(model=Mixed, optimizer=adam),
}
CASES |= {
    f"all {dtype}, {make.__name__}": Case(
        model=partial(Rows, dtype), loss=partial(in_dtype, dtype=dtype), optimizer=make
    )
    for dtype in Mixed.DTYPES
    for make in (sgd, adam)
}


# -- sparse


class Tables(nn.Module):
    """Embeddings with sparse gradients, and a dense head."""

    def __init__(self, dense: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 8, sparse=True)
        self.bags = nn.EmbeddingBag(30, 8, sparse=True)
        self.head = nn.Linear(8, 4).requires_grad_(dense)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.words(tokens).mean(1) + self.bags(tokens)))


def tokens(g: torch.Generator) -> Any:
    return torch.randint(30, (6, 5), generator=g), torch.randint(4, (6,), generator=g)


CASES |= {
    "sparse, SGD": Case(model=Tables, batch=tokens, optimizer=partial(torch.optim.SGD, lr=0.1)),
    "sparse, SparseAdam": Case(
        model=partial(Tables, dense=False),
        batch=tokens,
        arrange=lambda model: torch.optim.SparseAdam(
            [model.words.weight, model.bags.weight], lr=0.1
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_training_gives_the_same_bits(two_ranks, name):
    check_case(two_ranks, __name__, name)


def sparse_with_adam(rank: int, mode: str) -> Any:
    """Two optimizers over one model, as SparseAdam needs."""
    wrapped: list[Any] = []

    def wrap(optimizer: Any, model: Any) -> Any:
        wrapped.append(bs.ScheduledOptimizer(optimizer, model, **keywords(mode)))
        return wrapped[-1]

    data = batches(rank, 5, tokens)
    expected = train_tables(data, DistributedDataParallel, lambda optimizer, _: optimizer)
    actual = train_tables(data, lambda model: model, wrap)
    for optimizer in wrapped:
        optimizer.unwrap()
    return differences(expected, actual)


def train_tables(data: list[Any], spread: Any, wrap: Any) -> Any:
    torch.manual_seed(0)
    model = Tables()
    trained = spread(model)
    tables = [model.words.weight, model.bags.weight]
    optimizers = [
        wrap(torch.optim.SparseAdam(tables, lr=0.1), model),
        wrap(adam(model.head.parameters()), model),
    ]
    for batch in data:
        for optimizer in optimizers:
            optimizer.zero_grad()
        classify(trained, batch).backward()
        for optimizer in optimizers:
            optimizer.step()
    return outcome(model)


@pytest.mark.parametrize("mode", MODES)
def test_sparse_and_dense_parameters_with_an_optimizer_each(two_ranks, mode):
    assert two_ranks.run(sparse_with_adam, mode) == [{}, {}]


def test_weight_norm_by_hook_of_older_models(two_ranks):
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(nn.Linear(2, 2))
    assert two_ranks.run(older_weight_norm) == [{mode: {} for mode in MODES}] * 2


def older_weight_norm(rank: int) -> Any:
    import warnings

    from cases import train_ddp, train_ours

    warnings.simplefilter("ignore", FutureWarning)
    case = Case(model=partial(Normed, nn.utils.weight_norm))
    expected = train_ddp(case, rank)
    return {mode: differences(expected, train_ours(case, rank, mode=mode)) for mode in MODES}
