"""What the ``kvstore`` transport needs of MXNet beyond its Python API.

MXNet's dependency engine runs an operation when everything that it reads or writes is ready. Two of
its C functions, exported by the stock wheel, let Python take part:

* ``when_ready``: a callback that the engine runs once all earlier operations on some arrays are
  done. So a chunk's completion is seen without a thread that blocks for it.
* ``hold``: an operation that keeps arrays busy until another thread says so. Whatever reads them,
  a layer's forward for example, waits inside the engine; the Python thread does not.

Callbacks run on the engine's threads for urgent work. One trampoline serves all of them, with a
number as its argument: nothing is created per call that C would have to keep alive.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bytescheduler import _mxnet_import

__all__ = ["Array", "Engine", "Release", "Store"]

Array = npt.NDArray[Any]
Release = Callable[[], None]

_CPU: Final = 1
_URGENT: Final = 3  # FnProperty::kCPUPrioritized
_SYNC: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
_ASYNC: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


class _Context(ctypes.Structure):
    _fields_ = (("device", ctypes.c_int), ("number", ctypes.c_int32))


class _OnComplete(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)),
        ("engine", ctypes.c_void_p),
        ("operation", ctypes.c_void_p),
    )


_numbers = count(1)
_callbacks: dict[int, Callable[[], None]] = {}
_holds: dict[int, Callable[[Release], None]] = {}


@_SYNC
def _run_callback(context: int, number: int) -> None:
    _callbacks.pop(number)()


@_ASYNC
def _run_hold(context: int, on_complete: int, number: int) -> None:
    source = ctypes.cast(on_complete, ctypes.POINTER(_OnComplete)).contents
    complete = _OnComplete(source.function, source.engine, source.operation)

    def release() -> None:
        complete.function(complete.engine, complete.operation, None)

    _holds.pop(number)(release)


class Engine:
    """MXNet's dependency engine, for arrays in CPU memory."""

    def __init__(self) -> None:
        self.mxnet = _mxnet_import.load()
        self.library = self.mxnet.base._LIB
        self.check = self.mxnet.base.check_call
        self._context = _Context(_CPU, 0)
        self._property = ctypes.c_int(_URGENT)

    def array(self, view: Array) -> Any:
        """Return an MXNet array over the memory of ``view``, which must be contiguous."""
        return self.mxnet.nd.from_numpy(view.view(), zero_copy=True)

    def when_ready(
        self, callback: Callable[[], None], *, read: Sequence[Any] = (), written: Sequence[Any] = ()
    ) -> None:
        """Call ``callback`` once from an engine thread.

        Args:
            read: waits for earlier operations that write these arrays.
            written: waits for earlier operations that read or write these arrays.
        """
        number = next(_numbers)
        _callbacks[number] = callback
        self.check(
            self.library.MXEnginePushSyncND(
                _run_callback, *self._operands(number, read, written), b"ByteSchedulerNotify"
            )
        )

    def hold(self, begin: Callable[[Release], None], arrays: Sequence[Any]) -> None:
        """Call ``begin(release)`` when ``arrays`` are ready; keep them busy until ``release()``.

        ``begin`` runs on an engine thread and must be quick; ``release`` may be called from any.
        """
        number = next(_numbers)
        _holds[number] = begin
        self.check(
            self.library.MXEnginePushAsyncND(
                _run_hold,
                *self._operands(number, (), arrays),
                b"ByteSchedulerHold",
                ctypes.c_bool(False),
            )
        )

    def _operands(self, number: int, read: Sequence[Any], written: Sequence[Any]) -> list[Any]:
        return [
            ctypes.c_void_p(number),
            None,
            ctypes.byref(self._context),
            handles(read),
            len(read),
            handles(written),
            len(written),
            ctypes.byref(self._property),
            0,
        ]


class Store:
    """A distributed MXNet KVStore with integer keys; usable from several threads.

    Priorities are MXNet's: larger is more urgent.
    """

    def __init__(self, engine: Engine, kvstore: Any) -> None:
        self.engine = engine
        self.kvstore = kvstore
        self.rank = int(kvstore.rank)
        self.workers = int(kvstore.num_workers)
        self._lock = threading.Lock()  # KVStoreDist keeps unguarded maps

    def create(self, keys: Sequence[int], arrays: Sequence[Any]) -> None:
        """Collective, blocking: make keys exist on the servers, with worker 0's content.

        MXNet's own ``init`` does the same, but cannot be guarded against other threads without
        stopping them while it waits for a late worker.
        """
        if self.rank == 0:
            done = threading.Event()
            for key, array in zip(keys, arrays, strict=True):
                self.push(key, array)
            self.engine.when_ready(done.set, written=arrays)
            done.wait()
        self.barrier()

    def push(self, key: int, array: Any, priority: int = 0) -> None:
        """Send ``array``; the first push of a key by anybody creates it."""
        self._call("MXKVStorePush", (key,), (array,), priority)

    def pull(self, key: int, array: Any, priority: int = 0) -> None:
        """Overwrite ``array`` with what the server holds; answered at once."""
        self._call("MXKVStorePull", (key,), (array,), priority)

    def push_pull(self, keys: Sequence[int], arrays: Sequence[Any], priority: int) -> None:
        """Send each array, and overwrite it with the result that all workers' arrays give."""
        numbers, pointers = (ctypes.c_int * len(keys))(*keys), handles(arrays)
        with self._lock:
            self.engine.check(
                self.engine.library.MXKVStorePushPull(
                    self.kvstore.handle,
                    ctypes.c_uint(len(keys)),
                    numbers,
                    ctypes.c_uint(len(keys)),
                    numbers,
                    pointers,
                    pointers,
                    ctypes.c_int(priority),
                )
            )

    def barrier(self) -> None:
        """Wait for all workers."""
        self.engine.check(self.engine.library.MXKVStoreBarrier(self.kvstore.handle))

    def free(self) -> None:
        """Leave the job: waits for all workers; rank 0 stops the servers."""
        self.engine.check(self.engine.library.MXKVStoreFree(self.kvstore.handle))
        self.kvstore.handle = type(self.kvstore.handle)()

    def _call(
        self, function: str, keys: Sequence[int], arrays: Sequence[Any], priority: int
    ) -> None:
        with self._lock:
            self.engine.check(
                getattr(self.engine.library, function)(
                    self.kvstore.handle,
                    ctypes.c_uint(len(keys)),
                    (ctypes.c_int * len(keys))(*keys),
                    handles(arrays),
                    ctypes.c_int(priority),
                )
            )


def handles(arrays: Sequence[Any]) -> Any:
    """The C array of the arrays' handles."""
    return (ctypes.c_void_p * len(arrays))(*[array.handle for array in arrays])


def zeros(elements: int, dtype: Any = np.float32) -> Array:
    """Return a contiguous array of zeros whose pages are there."""
    return np.full(elements, 0, dtype)
