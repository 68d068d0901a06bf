"""Every engine of the contract suite: how a rank opens it, and what its buffers are.

A new transport is one function here, named in ``OPENERS``, and a launcher in ``launchers.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from contract import Bench

from bytescheduler.transports.base import Transport


def _numpy_make(size: int, dtype: str) -> np.ndarray:
    return np.zeros(size, dtype)


def _numpy_write(buffer: np.ndarray, values: Any) -> None:
    buffer[:] = values


def _numpy_read(buffer: np.ndarray) -> np.ndarray:
    return buffer.astype(np.float64)


def _torch_make(size: int, dtype: str) -> Any:
    import torch

    return torch.zeros(size, dtype=getattr(torch, dtype))


def _torch_write(buffer: Any, values: Any) -> None:
    import torch

    buffer.copy_(torch.from_numpy(np.ascontiguousarray(values)))


def _torch_read(buffer: Any) -> np.ndarray:
    return buffer.double().numpy()


NUMPY: dict[str, Any] = {"make": _numpy_make, "write": _numpy_write, "read": _numpy_read}
TORCH: dict[str, Any] = {"make": _torch_make, "write": _torch_write, "read": _torch_read}


def fake(rank: int, world_size: int, networks: Any) -> Bench:
    """A rank in a thread; ``networks`` gives the network of each group."""
    return Bench(
        rank=rank,
        world_size=world_size,
        open_group=lambda number: networks[number].transports()[rank],
        dtypes=("float16", "float32", "float64"),
        idle_share=None,  # ranks share one process
        **NUMPY,
    )


def torch() -> Bench:
    import torch.distributed as dist

    from bytescheduler.transports.torch_distributed import TorchDistributedTransport

    dist.init_process_group("gloo")

    def open_group(number: int) -> Transport:
        return TorchDistributedTransport(dist.new_group())

    return Bench(
        rank=dist.get_rank(), world_size=dist.get_world_size(), open_group=open_group, **TORCH
    )


def mpi() -> Bench:
    from mpi4py import MPI

    from bytescheduler.transports.mpi import MpiTransport

    return Bench(
        rank=MPI.COMM_WORLD.Get_rank(),
        world_size=MPI.COMM_WORLD.Get_size(),
        open_group=lambda number: MpiTransport(),
        dtypes=("float16", "float32", "float64"),
        **NUMPY,
    )


def mpi_torch() -> Bench:
    """The same engine with tensors, which have bfloat16."""
    from mpi4py import MPI

    from bytescheduler.transports.mpi import MpiTransport

    return Bench(
        rank=MPI.COMM_WORLD.Get_rank(),
        world_size=MPI.COMM_WORLD.Get_size(),
        open_group=lambda number: MpiTransport(MPI.COMM_WORLD),
        **TORCH,
    )


def horovod() -> Bench:
    import horovod.torch as hvd

    from bytescheduler.transports.horovod import HorovodTransport

    first = HorovodTransport()  # initialises Horovod with our defaults
    bench = Bench(
        rank=hvd.rank(),
        world_size=hvd.size(),
        open_group=lambda number: HorovodTransport(),
        engine_spins=True,  # Horovod's own loop wakes in every cycle, work or not
        **TORCH,
    )
    first.close()
    return bench


def kvstore() -> Bench:
    from bytescheduler.transports.kvstore import KVStoreTransport

    first = KVStoreTransport()
    bench = Bench(
        rank=first.rank,
        world_size=first.world_size,
        open_group=lambda number: KVStoreTransport(),
        dtypes=("float16", "float32", "float64"),
        **NUMPY,
    )
    first.close()
    return bench


def kvstore_torch() -> Bench:
    """The same engine with tensors."""
    return replace(kvstore(), **TORCH)


def byteps() -> Bench:
    from bytescheduler.transports.byteps import BytePSTransport

    first = BytePSTransport()
    bench = Bench(
        rank=first.rank,
        world_size=first.world_size,
        open_group=lambda number: BytePSTransport(),
        many=300,  # BytePS polls: slow where workers and servers share two cores
        seeds=3,
        idle_share=None,
        **TORCH,
    )
    first.close()
    return bench


def tensorflow() -> Bench:
    import bytescheduler.tensorflow as bs
    from bytescheduler.transports.tensorflow_collective import TensorFlowTransport

    def make(size: int, dtype: str) -> np.ndarray:
        import ml_dtypes  # comes with TensorFlow

        return np.zeros(size, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    def write(buffer: np.ndarray, values: Any) -> None:
        buffer[...] = np.asarray(values).astype(buffer.dtype)

    return Bench(
        rank=bs.rank(),
        world_size=bs.world_size(),
        open_group=lambda number: TensorFlowTransport(),
        make=make,
        write=write,
        read=lambda buffer: buffer.astype(np.float64),
        many=1000,
    )


OPENERS: dict[str, Callable[[], Bench]] = {
    "torch": torch,
    "mpi": mpi,
    "mpi-torch": mpi_torch,
    "horovod": horovod,
    "tensorflow": tensorflow,
    "byteps": byteps,
    "kvstore": kvstore,
    "kvstore-torch": kvstore_torch,
}
