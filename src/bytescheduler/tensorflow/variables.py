"""Variables that tell when they are read: the gates of the Keras adapter.

A layer's forward reads its variables through ``keras.Variable.value``, and so does everything else
that needs them: a parent that uses a child's weight without calling it, a tied head, callbacks,
``get_weights``, checkpoints, evaluation. A gate at the read therefore misses none of them and needs
no list of layers that behave oddly. In a ``tf.function`` the gate's operations are added to the
graph just before the read; TensorFlow keeps reads and writes of one variable in program order.

Considered instead: wrapping each layer's ``call`` (misses weights that are read from outside),
a ``StatelessScope`` (assignments inside it are collected and not done), other ``tf.Variable``
objects behind the Keras ones (the optimizer's tables are keyed by them).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import in_stateless_scope
from tensorflow.python.eager import record
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops.control_flow_v2_func_graphs import CondBranchFuncGraph

from bytescheduler.exceptions import ConfigurationError, UsageError

__all__ = [
    "GatedVariable",
    "Traces",
    "after_the_data",
    "gate",
    "is_taped",
    "outside_the_model",
    "refuse_strategy",
    "refuse_xla",
    "ungate",
]


ITERATOR_OPS: Final = ("IteratorGetNext", "IteratorGetNextSync")
AUTOCAST: Final = "autocast_scope"
HANDLES: Final = (tf.resource, tf.variant)


class GatedVariable(keras.Variable):
    """A Keras variable whose readers and writers first call ``bytescheduler_gate``."""

    bytescheduler_gate: Callable[[], None]

    @property
    def value(self) -> Any:
        """The value, current."""
        if not in_stateless_scope():
            self.bytescheduler_gate()
        return super().value

    def _direct_assign(self, value: Any) -> None:
        self.bytescheduler_gate()
        super()._direct_assign(value)


def gate(variables: Sequence[Any], on_use: Callable[[int], None]) -> None:
    """Make every variable call ``on_use(position)`` before it is read or written.

    Raises:
        UsageError: one of them is gated already.
        ConfigurationError: one of them is not a plain Keras variable.
    """
    for variable in variables:
        if isinstance(variable, GatedVariable):
            raise UsageError(
                f"a model has one ScheduledOptimizer, and {variable.path} has one already; use "
                "that one, or close() it first"
            )
        if type(variable) is not keras.Variable:
            raise ConfigurationError(
                f"trainable variables must be plain keras.Variable objects, got {variable.path} "
                f"of {type(variable)}; create it with add_weight"
            )
    for position, variable in enumerate(variables):
        variable.bytescheduler_gate = lambda position=position: on_use(position)
        variable.__class__ = GatedVariable


def ungate(variables: Sequence[Any]) -> None:
    """Undo ``gate``."""
    for variable in variables:
        if isinstance(variable, GatedVariable):
            variable.__class__ = keras.Variable
            del variable.bytescheduler_gate


class Traces:
    """Remembers which gates a graph under construction contains already.

    A gate counts for the graph that holds it and for the branches of conditions in it. It does not
    count for the body of a loop or for another ``tf.function``, which may run again when the value
    has been posted anew.
    """

    def __init__(self) -> None:
        self._gated: dict[Any, set[int]] = {}

    def clear(self) -> None:
        """Everything was posted anew: later reads need a gate of their own."""
        self._gated.clear()

    def add(self, graph: Any, unit: int) -> None:
        """``unit`` has a gate in ``graph``."""
        self._gated.setdefault(graph, set()).add(unit)

    def covers(self, graph: Any, unit: int) -> bool:
        """Whether a read of ``unit`` in ``graph`` comes after a gate for certain."""
        while unit not in self._gated.get(graph, ()):
            if not isinstance(graph, CondBranchFuncGraph):
                return False
            graph = graph.outer_graph
        return True


@contextmanager
def outside_the_model() -> Generator[None]:
    """Run operations that are no part of the forward: not differentiated, not autocast."""
    scope = global_state.get_global_attribute(AUTOCAST)
    global_state.set_global_attribute(AUTOCAST, None)  # AutocastScope(None) would mean float32
    try:
        with record.stop_recording():
            yield
    finally:
        global_state.set_global_attribute(AUTOCAST, scope)


@contextmanager
def after_the_data() -> Generator[None]:
    """Run operations only when this step's data is there.

    At the end of a data set of unknown length the step that finds none is begun and given up. A
    gate that had run by then would have handed out a gradient to an update that is cancelled.
    """
    if tf.executing_eagerly():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    fetches = [op for op in graph.get_operations() if op.type in ITERATOR_OPS]
    arguments = [tensor for tensor in graph.inputs if tensor.dtype not in HANDLES]
    with tf.control_dependencies([*fetches, *arguments]):
        yield


def is_taped() -> bool:
    """Whether what is read now may be differentiated: it is, or is traced, under a tape."""
    return bool(record.could_possibly_record())


def refuse_strategy() -> None:
    """Raise UsageError in the scope of a distribution strategy, or in one of its replicas."""
    if tf.distribute.has_strategy():
        raise UsageError(
            "a tf.distribute strategy is active, and ScheduledOptimizer takes its place: it "
            "averages the gradients itself; build, wrap and train the model outside of "
            "strategy.scope() and strategy.run()"
        )


def refuse_xla() -> None:
    """Raise ConfigurationError where the graph under construction is one for XLA."""
    if tf.executing_eagerly():
        return
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise ConfigurationError(
            "gradients cannot be sent from inside an XLA program, and jit_compile is on (it is "
            "Keras's default); pass jit_compile=False to model.compile or tf.function"
        )
