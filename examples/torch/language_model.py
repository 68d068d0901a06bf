"""Train a small transformer to predict characters of Python's own documentation.

    torchrun --nproc-per-node 2 examples/torch/language_model.py --epochs 2

The output layer is tied to the embedding: its gradient is complete last and needed first. Gradients
of two batches are accumulated per step and clipped; with ``--bf16`` the forward pass runs in mixed
precision, with ``--checkpoint`` activations are computed again in the backward pass.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import bytescheduler.torch as bs

ACCUMULATED = 2  # batches per step


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30, help="steps per epoch")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per rank and batch")
    parser.add_argument("--length", type=int, default=64, help="characters per sequence")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--bf16", action="store_true", help="mixed precision")
    parser.add_argument("--checkpoint", action="store_true", help="activation checkpointing")
    parser.add_argument("--compile", action="store_true", help="compile each block")
    return parser.parse_args()


def text() -> torch.Tensor:
    """All topics of ``help()`` as bytes, shape (characters,)."""
    joined = "\n".join(topics[name] for name in sorted(topics))
    return torch.tensor(list(joined.encode("ascii", "replace")), dtype=torch.long)


class Block(nn.Module):
    """Attention to what came before, and two dense layers; both around a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.dense = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.before(hidden)
        hidden = hidden + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        return hidden + self.dense(hidden)


class Transformer(nn.Module):
    def __init__(self, width: int, layers: int, length: int, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(128, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 128, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.05)
        mask = torch.full((length, length), float("-inf")).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of shape (sequences, characters, 128)."""
        hidden = self.embedding(tokens) + self.position
        for block in self.blocks:
            if self.recompute:
                hidden = checkpoint(block, hidden, self.mask, use_reentrant=False)
            else:
                hidden = block(hidden, self.mask)
        return self.head(self.norm(hidden))


def batch(
    characters: torch.Tensor, args: argparse.Namespace, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(
        len(characters) - args.length - 1, (args.batch_size, 1), generator=generator
    )
    window = characters[starts + torch.arange(args.length + 1)]
    return window[:, :-1], window[:, 1:]


def main() -> None:
    args = arguments()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)  # each rank draws its own sequences
    characters = text()

    torch.manual_seed(0)
    model = Transformer(args.width, args.layers, args.length, recompute=args.checkpoint)
    if args.compile:
        for block in model.blocks:
            block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    optimizer = bs.ScheduledOptimizer(optimizer, model)  # the added line
    precision = torch.autocast("cpu", torch.bfloat16) if args.bf16 else nullcontext()

    for epoch in range(1, args.epochs + 1):
        total = 0.0
        for _ in range(args.steps):
            optimizer.zero_grad()
            for part in range(ACCUMULATED):
                tokens, following = batch(characters, args, generator)
                last = part == ACCUMULATED - 1
                with nullcontext() if last else optimizer.no_sync(), precision:
                    logits = model(tokens).float()
                    loss = F.cross_entropy(logits.flatten(0, 1), following.flatten())
                    (loss / ACCUMULATED).backward()
                total += loss.item() / ACCUMULATED
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if rank == 0:
            bits = total / args.steps / torch.log(torch.tensor(2.0)).item()
            print(f"epoch {epoch}: {bits:.3f} bits per character", flush=True)

    optimizer.unwrap()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
