"""A small transformer on text that ships with Python: its own documentation strings."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator

import torch
from torch import Tensor, nn

MODULES = ("argparse", "collections", "ctypes", "datetime", "decimal", "fractions", "inspect")
MODULES += ("itertools", "logging", "os", "pathlib", "pickle", "random", "re", "socket", "string")
VOCABULARY = 256


def documentation() -> Tensor:
    """Bytes of the documentation strings of some modules and what they hold, one after another."""
    pages: list[str] = []
    for name in MODULES:
        module = importlib.import_module(name)
        members = [
            module,
            *(value for _, value in sorted(vars(module).items(), key=lambda x: x[0])),
        ]
        pages += [text for member in members if isinstance(text := inspect.getdoc(member), str)]
    data = "\n".join(pages).encode()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


class SmallTransformer(nn.Module):
    """A language model over bytes: embedding, encoder blocks, head."""

    def __init__(self, *, width: int = 128, blocks: int = 4, context: int = 64) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, VOCABULARY)
        mask = nn.Transformer.generate_square_subsequent_mask(context)
        self.register_buffer("mask", mask, persistent=False)
        self.register_buffer("places", torch.arange(context), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, context, 256) of ``tokens`` (batch, context)."""
        x = self.embedding(tokens) + self.position(self.places)
        for block in self.blocks:
            x = block(x, src_mask=self.mask)
        return self.head(x)


def windows(data: Tensor, context: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Endless batches (batch, context + 1) of random places in the text."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(context + 1)
    while True:
        starts = torch.randint(len(data) - context - 1, (batch, 1), generator=generator)
        yield data[starts + offsets]
