"""The flat buffers between MXNet's arrays and the exchange.

A gradient is copied into its slot and the result out of it, both by MXNet's engine, in C++ and in
its threads. A view of the gradient's own memory would save that, but MXNet may keep convolution
gradients and weights in another memory layout than their shape says, and only its own copies know.
The copy also adds up the gradients of several devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bytescheduler.core import Layout, ParameterSpec
from bytescheduler.transports._kvstore_engine import Array, Engine

__all__ = ["Staging"]


class Staging:
    """Slots for some parameters.

    Args:
        shapes, dtypes: of the parameters, by the user's key, most urgent first.

    Attributes:
        layout, buffers: for ``Exchange``; the parameters' positions are those of ``keys``.
        nbytes: bytes of all gradients.
    """

    def __init__(
        self,
        engine: Engine,
        shapes: Mapping[Any, tuple[int, ...]],
        dtypes: Mapping[Any, np.dtype[Any]],
    ) -> None:
        self.keys = list(shapes)
        self.position = {key: index for index, key in enumerate(self.keys)}
        self._mxnet = engine.mxnet
        self.layout = Layout(
            [
                ParameterSpec(
                    name=str(key),
                    numel=int(np.prod(shape, dtype=np.int64)),
                    itemsize=dtypes[key].itemsize,
                    buffer=str(dtypes[key]),
                )
                for key, shape in shapes.items()
            ]
        )
        self.nbytes = sum(spec.numel * spec.itemsize for spec in self.layout.specs)
        self.buffers: dict[str, Array] = {
            name: np.full(size, 0, name) for name, size in self.layout.sizes.items()
        }
        self.arrays = [
            engine.array(self._slot(index).reshape(shapes[key]))
            for index, key in enumerate(self.keys)
        ]

    def fill(self, position: int, gradients: Sequence[Any]) -> None:
        """Copy the sum of one parameter's gradients, one per device, into its slot."""
        slot = self.arrays[position]
        if len(gradients) == 1:
            gradients[0].copyto(slot)
        else:
            here = [gradient.as_in_context(slot.context) for gradient in gradients]
            self._mxnet.nd.ElementWiseSum(*here, out=slot)

    def empty(self, position: int, outputs: Sequence[Any]) -> None:
        """Copy one parameter's slot into arrays, one per device."""
        for output in outputs:
            self.arrays[position].copyto(output)

    def raise_flag(self, position: int) -> None:
        """Write the presence flag; sums would let it grow."""
        self.buffers[self.layout.specs[position].buffer][self.layout.flag_offset(position)] = 1

    def _slot(self, position: int) -> Array:
        spec, offset = self.layout.specs[position], self.layout.offsets[position]
        return self.buffers[spec.buffer][offset : offset + spec.numel]
