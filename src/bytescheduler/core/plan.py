"""The plan: how parameters map to chunks.

Gradients of one dtype and device share one flat buffer, laid out in forward order; a chunk is a
slice of it. So splitting a large tensor and fusing small ones are the same operation, and changing
the partition size only cuts the same buffer anew. Chunks of all buffers are numbered in the order
in which the next forward pass needs them: the number *is* the priority, smaller is sooner.

Under priority the first chunks of a buffer are smaller and grow to the partition size (1/8, 1/4,
1/2 of it): the next forward begins with them, and waits for the whole of the first. Their elements
come last from backward, so a large first chunk would also be ready last.

Behind each parameter's elements its slot holds one more, the *presence flag*: 1 where the rank
produced a gradient, 0 where it did not. It is averaged along with the gradient, so every rank
learns for free whether *any* rank used the parameter, which a rank that did not use it needs to
know before it applies weight decay or momentum. On request two elements more, behind the flag of
the first parameter in forward order, are the *signal*: what ranks tell each other with a round
(``lockstep.py``).

Considered instead: one tensor per message (cannot fuse), buckets of whole tensors (cannot split),
a bitmap of used parameters as a collective of its own (one more round trip per iteration).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

__all__ = ["Chunk", "Layout", "ParameterSpec", "Plan", "Span", "slices"]

ALIGNMENT = 64  # bytes; a slot starts on a cache line
HEAD = 8  # the first chunk is this part of a whole one
FEW = 4
ROUND = 16  # equal pieces are multiples of it
SIGNAL = 2  # elements


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """What the plan must know of one parameter.

    Attributes:
        name: as the user's model calls it.
        numel: number of elements; 0 is allowed.
        itemsize: bytes per element.
        buffer: name of its flat buffer; parameters of one dtype and device share one.
    """

    name: str
    numel: int
    itemsize: int
    buffer: str = "flat"


class Span(NamedTuple):
    """The part of one parameter's slot that lies in a chunk."""

    parameter: int
    elements: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """The unit that is sent: ``buffer[start:stop]``, in elements.

    Attributes:
        index: number in the plan, which is its priority; smaller is needed sooner.
        nbytes: what it takes from the credit.
        spans: the parameters that it overlaps.
    """

    index: int
    buffer: str
    start: int
    stop: int
    nbytes: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Chunks in order of need, and for each parameter the chunks that overlap it."""

    partition_size: int
    chunks: tuple[Chunk, ...]
    chunks_of: tuple[tuple[int, ...], ...]


class Layout:
    """Where each parameter's slot lies in its flat buffer.

    Args:
        specs: the parameters; their positions are their identities.
        order: positions in forward order; each exactly once. Registration order by default.
        signal: whether to leave room for the signal.

    Attributes:
        offsets: element offset of each parameter's slot in its buffer.
        slots: elements of each slot: gradient, presence flag, signal, padding.
        sizes: elements of each buffer.
        signal: the buffer of the signal and its element offset there; None without one.
    """

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        order: Sequence[int] | None = None,
        *,
        signal: bool = False,
    ) -> None:
        self.specs = tuple(specs)
        self.order = tuple(range(len(specs)) if order is None else order)
        if sorted(self.order) != list(range(len(self.specs))):
            raise ValueError(f"order must name each of {len(specs)} parameters once, got {order}")
        self.sizes: dict[str, int] = {}
        first = self.order[0] if signal and self.specs else None
        self.slots = tuple(
            _slot_elements(spec, 1 + SIGNAL if index == first else 1)
            for index, spec in enumerate(self.specs)
        )
        offsets = [0] * len(self.specs)
        for index in self.order:
            buffer = self.specs[index].buffer
            offsets[index] = self.sizes.get(buffer, 0)
            self.sizes[buffer] = offsets[index] + self.slots[index]
        self.offsets = tuple(offsets)
        self.signal = first if first is None else (specs[first].buffer, self.flag_offset(first) + 1)
        self._rank = {index: position for position, index in enumerate(self.order)}

    def flag_offset(self, parameter: int) -> int:
        """Element offset of the presence flag of ``parameter`` in its buffer."""
        return self.offsets[parameter] + self.specs[parameter].numel

    def cut(self, partition_size: int, *, growing: bool = False) -> Plan:
        """Cut every buffer into equal chunks of at most ``partition_size`` bytes.

        If ``growing``, the first ones are smaller.
        """
        pieces = [
            (self._need(spans[0].parameter, start), buffer, start, stop, itemsize, spans)
            for buffer in self.sizes
            for start, stop, itemsize, spans in self._slices(buffer, partition_size, growing)
        ]
        pieces.sort(key=lambda piece: piece[0])
        chunks = tuple(
            Chunk(
                index=index,
                buffer=buffer,
                start=start,
                stop=stop,
                nbytes=(stop - start) * itemsize,
                spans=spans,
            )
            for index, (_, buffer, start, stop, itemsize, spans) in enumerate(pieces)
        )
        chunks_of: list[list[int]] = [[] for _ in self.specs]
        for chunk in chunks:
            for span in chunk.spans:
                chunks_of[span.parameter].append(chunk.index)
        return Plan(
            partition_size=partition_size,
            chunks=chunks,
            chunks_of=tuple(tuple(indices) for indices in chunks_of),
        )

    def _slices(
        self, buffer: str, partition_size: int, growing: bool
    ) -> Iterator[tuple[int, int, int, tuple[Span, ...]]]:
        members = [index for index in self.order if self.specs[index].buffer == buffer]
        itemsize = self.specs[members[0]].itemsize
        step = max(1, partition_size // itemsize)
        first = 0
        for start, stop in slices(self.sizes[buffer], step, growing=growing):
            while self._end(members[first]) <= start:
                first += 1
            yield start, stop, itemsize, tuple(self._spans(members, first, start, stop))

    def _spans(self, members: Sequence[int], first: int, start: int, stop: int) -> Iterator[Span]:
        for index in islice(members, first, None):
            offset = self.offsets[index]
            if offset >= stop:
                return
            yield Span(index, min(stop, self._end(index)) - max(start, offset))

    def _end(self, parameter: int) -> int:
        return self.offsets[parameter] + self.slots[parameter]

    def _need(self, parameter: int, start: int) -> tuple[int, int]:
        return self._rank[parameter], start - self.offsets[parameter]


def slices(total: int, step: int, *, growing: bool) -> Iterator[tuple[int, int]]:
    """Cut ``total`` into equal pieces of at most ``step``; if ``growing``, begin with smaller ones.

    Those double up to ``step``. There are none where the pieces are few: then the wire is fast,
    and each message counts, which is also why no small remainder is left for the last.
    """
    start = 0
    if growing and total > FEW * step:
        size = max(1, step // HEAD)
        while size < step:
            yield start, start + size
            start, size = start + size, 2 * size
    count = -(-(total - start) // step)
    size = min(step, -(-(total - start) // (count * ROUND)) * ROUND) if count else step
    for begin in range(start, total, size):
        yield begin, min(begin + size, total)


def _slot_elements(spec: ParameterSpec, extra: int) -> int:
    unit = max(1, ALIGNMENT // spec.itemsize)
    return -(-(spec.numel + extra) // unit) * unit
