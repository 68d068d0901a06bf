"""The ledger: rounds and elements, waiters that are woken once, failures that reach everybody."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescheduler.core.ledger import Ledger
from bytescheduler.core.plan import Span
from bytescheduler.exceptions import TransportClosedError, TransportError

PATIENCE = 10.0  # seconds until a test calls it a hang


class Call(threading.Thread):
    """Runs ``function`` and keeps its result or error."""

    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.error: BaseException | None = None
        self.result: object = None
        self._function = function
        self.start()

    def run(self) -> None:
        try:
            self.result = self._function()
        except BaseException as error:
            self.error = error

    def finish(self) -> Call:
        self.join(PATIENCE)
        assert not self.is_alive(), "a waiter hangs"
        return self


@given(
    slots=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    data=st.data(),
)
def test_a_parameter_returns_exactly_when_its_last_element_does(slots, data):
    ledger = Ledger(slots)
    pieces: list[Span] = []
    for parameter, elements in enumerate(slots):
        ledger.post([parameter])
        while elements:
            size = data.draw(st.integers(1, elements))
            pieces.append(Span(parameter, size))
            elements -= size
    left = list(slots)
    for span in data.draw(st.permutations(pieces)):
        ledger.start()
        ledger.complete([span])
        left[span.parameter] -= span.elements
        assert [ledger.returned(p) for p in range(len(slots))] == [not n for n in left]
    assert ledger.wait_returned(range(len(slots)), timeout=0)


def test_what_was_never_posted_counts_as_returned():
    assert Ledger([4]).returned(0)
    assert Ledger([4]).wait_returned([0], timeout=0)


def test_posting_again_while_in_flight_is_refused():
    ledger = Ledger([4])
    ledger.post([0])
    with pytest.raises(RuntimeError, match="in flight"):
        ledger.post([0])


def test_a_waiter_is_woken_when_all_that_it_names_is_there():
    ledger = Ledger([4, 4, 4])
    for parameter in range(3):
        ledger.post([parameter])
        ledger.start()
    call = Call(lambda: ledger.wait_returned([0, 2]))
    ledger.complete([Span(0, 4)])
    call.join(0.05)
    assert call.is_alive()
    ledger.complete([Span(2, 4)])
    assert call.finish().result is True
    assert not ledger.returned(1)


def test_a_wait_that_times_out_says_so_and_leaves_no_trace():
    ledger = Ledger([4])
    ledger.post([0])
    ledger.start()
    assert ledger.wait_returned([0], timeout=0.01) is False
    ledger.complete([Span(0, 4)])
    assert ledger.wait_returned([0], timeout=0) is True


def test_callbacks_run_once_at_the_last_element():
    ledger = Ledger([4])
    calls: list[bool] = []
    ledger.post([0], lambda: calls.append(ledger.returned(0)))
    for _ in range(2):
        ledger.start()
        ledger.complete([Span(0, 2)])
    assert calls == [True]
    ledger.fail(ValueError("late"))
    assert calls == [True]


def test_a_failure_wakes_present_and_later_waiters_with_the_first_error():
    ledger = Ledger([4, 4])
    ledger.post([0])

    def block() -> object:
        return ledger.wait_returned([0])

    call = Call(block)
    call.join(0.05)
    assert call.is_alive()
    ledger.fail(TransportError("first"))
    ledger.fail(TransportError("second"))
    assert str(call.finish().error) == "first"
    assert str(Call(block).finish().error) == "first"
    with pytest.raises(TransportError, match="first"):
        ledger.post([1])


def test_a_failure_calls_back_who_waits_for_an_average():
    ledger = Ledger([4])
    seen: list[BaseException | None] = []
    ledger.post([0], lambda: seen.append(ledger.error))
    error = TransportError("gone")
    ledger.fail(error)
    assert seen == [error]


def test_what_has_returned_may_still_be_waited_for_after_a_failure():
    ledger = Ledger([4, 4])
    ledger.post([0])
    ledger.fail(TransportError("gone"))
    assert ledger.wait_returned([1]) is True


def test_close_raises_transport_closed():
    ledger = Ledger([4])
    ledger.post([0])
    call = Call(lambda: ledger.wait_returned([0]))
    ledger.close()
    assert isinstance(call.finish().error, TransportClosedError)


def test_last_words_are_held_back_until_what_flies_has_landed():
    ledger = Ledger([4])
    ledger.post([0])
    ledger.start()
    ledger.retire(TransportError("rank 0 left"))
    assert ledger.error is None
    ledger.complete([Span(0, 4)])
    assert str(ledger.error) == "rank 0 left"
    assert ledger.wait_returned([0]) is True


def test_last_words_count_at_once_when_nothing_flies():
    ledger = Ledger([4])
    ledger.retire(TransportError("rank 0 left"))
    assert str(ledger.error) == "rank 0 left"
