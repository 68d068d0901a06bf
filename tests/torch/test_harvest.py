"""Gradients are brought chunk by chunk, and none is left behind when backward ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from bytescheduler.core import Layout, ParameterSpec
from bytescheduler.torch.harvest import Harvest

LAYERS = 6
TWO_LAYERS = 2 * 64  # bytes of a chunk: a slot takes a cache line


@dataclass(eq=False)
class NotedSlot:
    """What a harvest needs of a slot."""

    index: int
    noted: bool = False
    closes_chunk: bool = True


@dataclass
class Field:
    """Scalar layers in a row, hooked as a session does it; ``brought`` is what came when."""

    brought: list[list[int]] = field(default_factory=list)
    one_by_one: bool = False

    def __post_init__(self) -> None:
        self.weights = [nn.Parameter(torch.ones(1)) for _ in range(LAYERS)]
        self.slots: list[Any] = [NotedSlot(index) for index in range(LAYERS)]
        self.harvest = Harvest(self._bring, stream=None, one_by_one=self.one_by_one)
        specs = [ParameterSpec(name=str(i), numel=1, itemsize=4) for i in range(LAYERS)]
        self.plan = Layout(specs).cut(TWO_LAYERS)
        for weight, slot in zip(self.weights, self.slots, strict=True):
            weight.register_post_accumulate_grad_hook(lambda _, slot=slot: self.harvest.note(slot))

    def _bring(self, slots: list[Any]) -> None:
        assert not any(slot.noted for slot in slots)
        self.brought.append([slot.index for slot in slots])

    def backward(self, *order: int) -> list[list[int]]:
        """A pass through these layers, gradients coming in that order; then a round ends."""
        self.brought.clear()
        self.loss(*order).backward()
        brought = list(self.brought)
        self.harvest.learn(self.plan, self.slots)
        return brought

    def loss(self, *order: int) -> torch.Tensor:
        value = torch.ones(1, requires_grad=True) * 1
        for index in reversed(order):
            value = value * self.weights[index]
        return value.sum()


def test_the_cut_is_as_these_tests_take_it():
    assert [len(chunk.spans) for chunk in Field().plan.chunks] == [2, 2, 2]


def test_one_by_one_until_the_order_is_known_then_chunk_by_chunk():
    there = Field()
    assert there.backward(5, 4, 3, 2, 1, 0) == [[5], [4], [3], [2], [1], [0]]
    assert there.backward(5, 4, 3, 2, 1, 0) == [[5, 4], [3, 2], [1, 0]]


def test_always_one_by_one_for_who_wants_to_know_when_each_came():
    there = Field(one_by_one=True)
    for _ in range(3):
        assert there.backward(5, 4, 3, 2, 1, 0) == [[5], [4], [3], [2], [1], [0]]


def test_another_order_is_brought_at_the_latest_when_backward_ends_and_then_known():
    there = Field()
    there.backward(5, 4, 3, 2, 1, 0)
    assert there.backward(0, 1, 2, 3, 4, 5) == [[0], [1, 2], [3, 4], [5]]
    assert there.backward(0, 1, 2, 3, 4, 5) == [[0, 1], [2, 3], [4, 5]]


def test_a_pass_without_any_last_of_a_chunk_is_brought_when_it_ends():
    there = Field()
    there.backward(5, 4, 3, 2, 1, 0)
    assert there.backward(5, 3) == [[5, 3]]
    assert there.backward(4, 2, 0) == [[4], [2], [0]]  # nothing was known of them


def test_another_plan_counts_from_the_next_round():
    there = Field()
    there.backward(5, 4, 3, 2, 1, 0)
    specs = [ParameterSpec(name=str(i), numel=1, itemsize=4) for i in range(LAYERS)]
    there.plan = Layout(specs).cut(3 * 64)
    there.backward(5, 4, 3, 2, 1, 0)
    assert there.backward(5, 4, 3, 2, 1, 0) == [[5, 4, 3], [2, 1, 0]]


def test_what_a_failed_pass_has_left_is_brought_before_the_next_one():
    there = Field()
    there.backward(5, 4, 3, 2, 1, 0)
    there.brought.clear()

    def fail(_: torch.Tensor) -> None:
        raise ValueError("in backward")

    loss = there.loss(5, 4, 3, 2, 1, 0)
    handle = there.weights[2].register_hook(fail)
    with pytest.raises(ValueError, match="in backward"):
        loss.backward()
    handle.remove()
    assert there.brought == [[5, 4]]
    there.brought.clear()
    there.loss(5, 4).backward()
    assert there.brought == [[3], [5, 4]]


def test_what_fails_when_backward_ends_is_raised_by_backward():
    there = Field()
    there.backward(5, 4, 3, 2, 1, 0)
    there.harvest = Harvest(fail_to_bring, stream=None, one_by_one=False)
    with pytest.raises(ValueError, match="cannot be sent"):
        there.loss(5, 3).backward()


def fail_to_bring(_: list[Any]) -> None:
    raise ValueError("cannot be sent")


def test_a_gradient_that_comes_twice_in_one_pass_is_brought_twice():
    there = Field()
    there.backward(5, 4, 3, 2, 1, 0)
    there.brought.clear()
    x = torch.ones(1, requires_grad=True)
    inner: Any = checkpoint(lambda y: y * there.weights[5], x, use_reentrant=True)
    (inner * there.weights[5]).sum().backward()
    assert there.brought == [[5], [5]]


@given(
    st.lists(st.lists(st.integers(0, LAYERS - 1), unique=True, min_size=1), min_size=1, max_size=6)
)
def test_every_gradient_of_every_pass_is_brought_once_and_in_order(passes):
    there = Field()
    for order in passes:
        brought = there.backward(*order)
        assert [index for batch in brought for index in batch] == order
