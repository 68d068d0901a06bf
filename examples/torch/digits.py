"""Train a small convolutional network on the digits that ship with scikit-learn.

    torchrun --nproc-per-node 2 examples/torch/digits.py --epochs 5

What makes it distributed: a process group, a sampler that gives each rank its share of the data,
and one line that wraps the optimizer.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import bytescheduler.torch as bs


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--loaders", type=int, default=0, help="processes that load data")
    parser.add_argument("--backend", default="nccl" if torch.cuda.is_available() else "gloo")
    return parser.parse_args()


def data() -> tuple[TensorDataset, TensorDataset]:
    """Training and test set: images of shape (1, 8, 8) between 0 and 1, labels 0 to 9."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def network() -> nn.Module:
    def block(inputs: int, outputs: int) -> nn.Sequential:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())

    return nn.Sequential(
        block(1, 32), block(32, 64), nn.MaxPool2d(2), block(64, 64), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def accuracy(model: nn.Module, test: TensorDataset, device: torch.device) -> float:
    images, labels = (tensor.to(device) for tensor in test.tensors)
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).float().mean()
    model.train()
    return float(right)


def main() -> None:
    args = arguments()
    dist.init_process_group(args.backend)
    rank = dist.get_rank()
    device = torch.device("cpu")
    if args.backend == "nccl":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)

    train, test = data()
    sampler: DistributedSampler[TensorDataset] = DistributedSampler(train, seed=1)
    loader = DataLoader(
        train, args.batch_size, sampler=sampler, drop_last=True, num_workers=args.loaders
    )
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    optimizer = bs.ScheduledOptimizer(optimizer, model)  # the added line
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps=max(1, args.epochs * len(loader))
    )

    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        loss = torch.zeros(())
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            schedule.step()
        if rank == 0:  # evaluation on one rank alone is fine
            right = accuracy(model, test, device)
            print(f"epoch {epoch}: loss {loss.item():.4f}, test accuracy {right:.1%}", flush=True)

    optimizer.unwrap()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
