"""The graph around one model and its optimizer: gates, posts and updates.

Every method runs while a graph is being built, or in eager mode at once; what runs inside a step
is in ``runtime.py``. Gates and posts are stateful ``numpy_function`` nodes, which TensorFlow keeps
in program order, so gradients are posted in the reverse of the forward order: the order in which
backward produces them. Variables of one layer share a gate and a post, and so do neighbouring
layers whose gradients travel in one chunk: none of them is sent, or comes back, before the others.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from bytescheduler.core import ParameterSpec, Plan
from bytescheduler.exceptions import UsageError
from bytescheduler.tensorflow.runtime import Resolve, Runtime
from bytescheduler.tensorflow.servers import refuse_wrong_order
from bytescheduler.tensorflow.updates import StepState, is_separable, update
from bytescheduler.tensorflow.variables import (
    Traces,
    after_the_data,
    gate,
    is_taped,
    outside_the_model,
    refuse_strategy,
    refuse_xla,
    ungate,
)
from bytescheduler.transports import Transport, create

__all__ = ["Adapter"]


class Adapter:
    """Builds the graph of gates, posts and updates around one model and its optimizer."""

    def __init__(
        self,
        optimizer: Any,
        model: Any,
        transport: str | Transport,
        resolve: Resolve,
        whole_update: bool,
    ) -> None:
        self.optimizer = optimizer
        self._variables = list(model.trainable_variables)
        if not optimizer.built:
            optimizer.build(self._variables)
        self._whole = whole_update or not is_separable(optimizer, self._variables)
        self._position = {
            optimizer._var_key(variable): index for index, variable in enumerate(self._variables)
        }
        self._step = StepState(optimizer)
        self._traces = Traces()
        self._read: dict[int, None] = {}  # variables that a forward has read, in that order
        self._updating = False
        self._closed = False
        if transport == "kvstore":
            refuse_wrong_order()
        opened = create(transport) if isinstance(transport, str) else transport
        self.runtime = Runtime(
            [_spec(variable) for variable in self._variables],
            {v.dtype: tf.as_dtype(v.dtype).as_numpy_dtype for v in self._variables},
            opened,
        )
        try:
            self._share([*model.weights, *optimizer.variables], resolve)
        except BaseException:
            self.runtime.close()
            raise
        self._units, self._unit_of = _units(self._variables, self.runtime.first_plan())
        gate(self._variables, self._on_use)
        _forget_traces(model)
        atexit.register(self.runtime.close)

    # -- the three moments: a variable is used, gradients are applied, all must be current

    def _on_use(self, index: int) -> None:
        """Gate a variable's unit: in eager mode at once, else in the graph that is being built."""
        if self._updating or self._closed:
            return
        if is_taped():
            self._read.setdefault(index)
        if not self._whole:
            self._gate(self._unit_of[index])

    @tf.autograph.experimental.do_not_convert
    def apply(self, gradients: Any, variables: Any) -> None:
        """Post gradients, in the order in which backward produces them."""
        if self._closed:
            raise UsageError("this ScheduledOptimizer was closed; wrap the model again")
        refuse_strategy()
        refuse_xla()
        by_index = self._by_index(gradients, variables)
        with tf.init_scope():
            self.runtime.start(self._forward_order())
        self.synchronize()  # what this forward did not use still has the last step's update due
        with outside_the_model(), self._quiet():
            if self._whole:
                self._apply_whole(by_index)
            else:
                self._apply_later(by_index)
        self._traces.clear()

    def synchronize(self) -> None:
        """Make every variable current, in eager mode or in the graph that is being built."""
        if not (self._closed or self._updating or self._whole):
            for unit in range(len(self._units)):
                self._gate(unit)

    def close(self) -> None:
        """Undo the constructor."""
        if self._closed:
            return
        if not self.runtime.failed:
            self.synchronize()
        self._closed = True
        ungate(self._variables)
        self.runtime.close()
        atexit.unregister(self.runtime.close)

    # -- inside

    def _gate(self, unit: int) -> None:
        indices = self._units[unit]
        if tf.executing_eagerly():
            if self.runtime.is_pending(indices):
                self._update(indices)
            return
        graph = tf.compat.v1.get_default_graph()
        if not self._traces.covers(graph, unit):
            refuse_strategy()
            refuse_xla()
            self._update(indices)
            self._traces.add(graph, unit)

    def _update(self, indices: Sequence[int]) -> None:
        """Wait for averages, then update the variables that have one."""
        with outside_the_model(), after_the_data(), self._quiet():
            present, gradients = self._collect(partial(self.runtime.collect, indices), indices)
            tf.cond(
                tf.reduce_all(present > 0),
                partial(self._update_all, indices, gradients),
                partial(self._update_some, indices, gradients, present),
            )

    def _update_all(self, indices: Sequence[int], gradients: Sequence[Any]) -> Any:
        for index, gradient in zip(indices, gradients, strict=True):
            variable = self._variables[index]
            update(self.optimizer, self._step, variable, tf.reshape(gradient, variable.shape))
        return tf.constant(0)

    def _update_some(self, indices: Sequence[int], gradients: Sequence[Any], present: Any) -> Any:
        for position, index in enumerate(indices):
            tf.cond(
                present[position] > 0,
                partial(self._update_all, [index], [gradients[position]]),
                lambda: tf.constant(0),
            )
        return tf.constant(0)

    def _apply_later(self, gradients: dict[int, Any]) -> None:
        self._post(gradients)
        ended = _call(_returning_zero(self.runtime.end_step), [], [tf.int32])
        with tf.control_dependencies(ended):
            self._step.record(self.optimizer)
            self.optimizer._iterations.assign_add(1)
        for unit in self._ungated(gradients):
            self._update(self._units[unit])

    def _ungated(self, gradients: dict[int, Any]) -> list[int]:
        """Units with gradients of what no forward has read: that was traced before the wrapping.

        Such a graph has no gate, so its weights must be current when the step ends.
        """
        return sorted({self._unit_of[index] for index in gradients if index not in self._read})

    def _apply_whole(self, gradients: dict[int, Any]) -> None:
        self._post(gradients)
        everything = range(len(self._variables))
        present, averages = self._collect(self._end_and_collect, everything)
        averages = [
            tf.reshape(average, variable.shape) if index in gradients else average
            for index, (average, variable) in enumerate(zip(averages, self._variables, strict=True))
        ]
        here = sorted(gradients)
        elsewhere = [index for index in everything if index not in gradients]
        if not elsewhere:
            self._apply_averages(averages, here)
            return
        tf.cond(
            tf.reduce_any(tf.gather(present, elsewhere) > 0),
            partial(self._apply_elsewhere_too, present, averages, here, elsewhere),
            partial(self._apply_averages, averages, here),
        )

    def _apply_averages(self, averages: Sequence[Any], indices: Sequence[int]) -> Any:
        self.optimizer.apply(
            [averages[index] for index in indices], [self._variables[index] for index in indices]
        )
        return tf.constant(0)

    def _apply_elsewhere_too(
        self,
        present: Any,
        averages: Sequence[Any],
        here: Sequence[int],
        elsewhere: Sequence[int],
    ) -> Any:
        """Other ranks used variables that this one did not; those that none used count as zero."""
        filled = list(averages)
        for index in elsewhere:
            variable = self._variables[index]
            filled[index] = tf.cond(
                present[index] > 0,
                partial(tf.reshape, averages[index], variable.shape),
                partial(tf.zeros, variable.shape, averages[index].dtype),
            )
        return self._apply_averages(filled, sorted([*here, *elsewhere]))

    def _end_and_collect(self) -> list[Any]:
        self.runtime.end_step()
        return self.runtime.collect(range(len(self._variables)))

    def _post(self, gradients: dict[int, Any]) -> None:
        for unit in reversed(self._forward_units()):
            indices = [index for index in self._units[unit] if index in gradients]
            if indices:
                post = partial(_post_all, self.runtime, indices)
                _call(post, [gradients[index] for index in indices], [tf.int32])

    def _collect(
        self, collect: Callable[[], list[Any]], indices: Sequence[int]
    ) -> tuple[Any, list[Any]]:
        dtypes = [tf.as_dtype(self._variables[index].dtype) for index in indices]
        present, *gradients = _call(collect, [], [tf.int32, *dtypes])
        return present, gradients

    def _by_index(self, gradients: Any, variables: Any) -> dict[int, Any]:
        """Dense gradients, each in its variable's dtype, by position; None ones left out."""
        chosen = self._variables if variables is None else list(variables)
        result: dict[int, Any] = {}
        for gradient, variable in zip(gradients, chosen, strict=True):
            index = self._position.get(self._key(variable))
            if index is None:
                raise UsageError(
                    f"{variable.path} was not a trainable variable of the model when it was "
                    "wrapped; close() this ScheduledOptimizer and wrap the model with a new "
                    "optimizer"
                )
            if gradient is not None:
                result[index] = tf.cast(
                    tf.convert_to_tensor(gradient), self._variables[index].dtype
                )
        if not result:
            raise UsageError("no gradient was given for any variable; did the loss use the model?")
        return result

    def _key(self, variable: Any) -> Any:
        with self._quiet():
            return self.optimizer._var_key(variable)

    def _forward_units(self) -> list[int]:
        read = [self._unit_of[index] for index in self._read]
        return list(dict.fromkeys([*read, *range(len(self._units))]))

    def _forward_order(self) -> list[int]:
        return [index for unit in self._forward_units() for index in self._units[unit]]

    def _share(self, variables: Sequence[Any], resolve: Resolve) -> None:
        values = [np.asarray(variable) for variable in variables]
        for variable, value in zip(variables, self.runtime.share(values, resolve), strict=True):
            variable.assign(value)

    @contextmanager
    def _quiet(self) -> Generator[None]:
        """While our own operations read variables, the gates let them pass."""
        before, self._updating = self._updating, True
        try:
            yield
        finally:
            self._updating = before


def _forget_traces(model: Any) -> None:
    """Have Keras trace the model's steps anew, since older graphs do not know these gates."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.Model):
            layer.train_function = layer.test_function = layer.predict_function = None


def _units(variables: Sequence[Any], plan: Plan) -> tuple[list[list[int]], list[int]]:
    """Group variables by owner, and owners by chunk: one gate and one post per group."""
    owners: dict[str, list[int]] = {}
    for index, variable in enumerate(variables):
        owners.setdefault(variable.path.rpartition("/")[0], []).append(index)
    units: list[list[int]] = []
    before: set[int] = set()  # chunks of the last owner
    for indices in owners.values():
        chunks = {chunk for index in indices for chunk in plan.chunks_of[index]}
        if len(chunks) == 1 and chunks == before:
            units[-1] += indices
        else:
            units.append(indices)
        before = chunks
    unit_of = [0] * len(variables)
    for unit, indices in enumerate(units):
        for index in indices:
            unit_of[index] = unit
    return units, unit_of


def _spec(variable: Any) -> ParameterSpec:
    dtype = tf.as_dtype(variable.dtype)
    numel = int(np.prod(variable.shape, dtype=np.int64))
    return ParameterSpec(name=variable.path, numel=numel, itemsize=dtype.size, buffer=dtype.name)


def _call(function: Callable[..., Any], inputs: Sequence[Any], dtypes: Sequence[Any]) -> Any:
    """Run a Python function: at once in eager mode, else whenever the graph gets there."""
    if tf.executing_eagerly():
        return function(*(tensor.numpy() for tensor in inputs))
    return tf.numpy_function(function, inputs, dtypes)


def _post_all(runtime: Runtime, indices: Sequence[int], *gradients: Any) -> Any:
    runtime.post(indices, gradients)
    return [np.int32(0)]


def _returning_zero(function: Callable[[], None]) -> Callable[[], Any]:
    def call() -> Any:
        function()
        return [np.int32(0)]

    return call
