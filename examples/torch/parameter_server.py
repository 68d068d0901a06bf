"""A PyTorch model on parameter servers: MXNet's servers average, PyTorch trains.

    bytescheduler launch --servers 2 --workers 2 -- python examples/torch/parameter_server.py

There is no process group; the rank comes from the transport.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import bytescheduler.torch as bs
from bytescheduler.transports.kvstore import KVStoreTransport

HELD_OUT = 297


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="per worker")
    args = parser.parse_args()
    torch.set_num_threads(1)

    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
    labels = torch.tensor(digits.target)

    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(144, 10)
    )
    transport = KVStoreTransport()  # the name "kvstore" does as well; here the rank is needed
    rank, workers = transport.rank, transport.world_size
    optimizer = bs.ScheduledOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, transport=transport
    )
    order = torch.Generator().manual_seed(0)
    batch = args.batch_size * workers
    for epoch in range(args.epochs):
        shuffled = torch.randperm(len(images) - HELD_OUT, generator=order)
        for start in range(0, len(shuffled) - batch + 1, batch):
            mine = shuffled[start + rank : start + batch : workers]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
            optimizer.step()
        with torch.no_grad():
            correct = model(images[-HELD_OUT:]).argmax(1) == labels[-HELD_OUT:]
        if rank == 0:
            print(f"epoch {epoch + 1}: accuracy {correct.float().mean():.3f}", flush=True)


if __name__ == "__main__":
    main()
