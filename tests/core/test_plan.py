"""Layout and cut: every element belongs to exactly one chunk, whatever the sizes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescheduler.core.plan import ALIGNMENT, Layout, ParameterSpec, Plan

BUFFERS = {"flat": 4, "half": 2, "double": 8}


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """A layout of up to a dozen parameters of three dtypes, in any forward order."""
    shapes = draw(
        st.lists(st.tuples(st.integers(0, 300), st.sampled_from(sorted(BUFFERS))), max_size=12)
    )
    specs = [
        ParameterSpec(name=f"p{i}", numel=numel, itemsize=BUFFERS[buffer], buffer=buffer)
        for i, (numel, buffer) in enumerate(shapes)
    ]
    return Layout(specs, draw(st.permutations(range(len(specs)))))


partition_sizes = st.integers(1, 3000)


def coverage(layout: Layout, plan: Plan, buffer: str) -> list[tuple[int, int]]:
    return sorted((c.start, c.stop) for c in plan.chunks if c.buffer == buffer)


@given(layouts(), partition_sizes, st.booleans())
def test_chunks_tile_every_buffer_without_gap_or_overlap(layout, partition_size, growing):
    plan = layout.cut(partition_size, growing=growing)
    for buffer, elements in layout.sizes.items():
        slices = coverage(layout, plan, buffer)
        assert slices[0][0] == 0
        assert slices[-1][1] == elements
        assert all(left[1] == right[0] for left, right in pairwise(slices))


@given(layouts(), partition_sizes, st.booleans())
def test_no_chunk_exceeds_the_partition_size_but_for_one_element(layout, partition_size, growing):
    for chunk in layout.cut(partition_size, growing=growing).chunks:
        itemsize = BUFFERS[chunk.buffer]
        assert chunk.nbytes == (chunk.stop - chunk.start) * itemsize
        assert 0 < chunk.nbytes <= max(partition_size, itemsize)


@given(layouts(), partition_sizes, st.booleans())
def test_spans_count_every_element_of_every_slot_once(layout, partition_size, growing):
    counted = [0] * len(layout.specs)
    for chunk in layout.cut(partition_size, growing=growing).chunks:
        assert sum(span.elements for span in chunk.spans) == chunk.stop - chunk.start
        for span in chunk.spans:
            assert span.elements > 0
            counted[span.parameter] += span.elements
    assert counted == list(layout.slots)


@given(layouts(), partition_sizes, st.booleans())
def test_chunks_of_a_parameter_are_those_whose_spans_name_it(layout, partition_size, growing):
    plan = layout.cut(partition_size, growing=growing)
    for parameter, indices in enumerate(plan.chunks_of):
        named = [c.index for c in plan.chunks if parameter in [s.parameter for s in c.spans]]
        assert list(indices) == named
        assert indices, "a parameter without elements still has its presence flag"


@given(layouts(), partition_sizes, st.booleans())
def test_priority_is_forward_order_across_buffers(layout, partition_size, growing):
    plan = layout.cut(partition_size, growing=growing)
    assert [chunk.index for chunk in plan.chunks] == list(range(len(plan.chunks)))
    needs = [layout.order.index(chunk.spans[0].parameter) for chunk in plan.chunks]
    assert needs == sorted(needs)
    for left, right in pairwise(plan.chunks):
        if left.buffer == right.buffer:
            assert left.start < right.start


def test_growing_chunks_double_up_to_the_partition_size():
    layout = Layout([ParameterSpec(name="p", numel=1000, itemsize=4)])
    assert len(layout.cut(1200, growing=True).chunks) == 4
    sizes = [chunk.nbytes for chunk in layout.cut(800, growing=True).chunks]
    assert sizes == [100, 200, 400, 704, 704, 704, 704, 516]


def test_no_small_remainder_is_left():
    layout = Layout([ParameterSpec(name="p", numel=1000, itemsize=4)])  # 1008 with its flag
    assert [chunk.nbytes for chunk in layout.cut(1344).chunks] == [1344] * 3
    assert [chunk.nbytes for chunk in layout.cut(1280).chunks] == [1024] * 3 + [960]


@given(layouts())
def test_slots_do_not_overlap_and_hold_the_flag_behind_the_gradient(layout):
    for buffer, itemsize in BUFFERS.items():
        members = [i for i in layout.order if layout.specs[i].buffer == buffer]
        ends = [layout.offsets[i] + layout.slots[i] for i in members]
        assert [layout.offsets[i] for i in members] == [0, *ends][: len(members)]
        for index in members:
            assert layout.offsets[index] * itemsize % ALIGNMENT == 0
            flag = layout.flag_offset(index)
            assert flag == layout.offsets[index] + layout.specs[index].numel
            assert flag < layout.offsets[index] + layout.slots[index]


@given(layouts(), partition_sizes, partition_sizes)
def test_a_new_cut_moves_no_parameter(layout, first, second):
    before = layout.offsets
    layout.cut(first)
    plan = layout.cut(second)
    assert layout.offsets == before
    assert [c.start for c in plan.chunks] == [c.start for c in layout.cut(second).chunks]


@pytest.mark.parametrize("order", [[0], [0, 0], [0, 2], [0, 1, 2]])
def test_an_order_that_is_no_permutation_is_refused(order):
    specs = [ParameterSpec(name=name, numel=1, itemsize=4) for name in "ab"]
    with pytest.raises(ValueError, match="each of 2 parameters once"):
        Layout(specs, order)


def test_an_empty_model_has_an_empty_plan():
    plan = Layout([]).cut(1 << 20)
    assert plan.chunks == ()
    assert plan.chunks_of == ()
