"""TensorFlow: its own ``MultiWorkerMirroredStrategy``, and this project's Keras optimizer.

Both train the same Keras model of emulated layers in a ``tf.function`` with a ``GradientTape``, as
a user's custom loop does. A layer sleeps in a stateless ``numpy_function``, so TensorFlow orders it
by its data only, as it would a kernel on an accelerator. Strategy and optimizer need processes of
their own: the one starts TensorFlow's collectives by itself, the other has them declared before.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.device import Device
from benchmarks.job import EmulatedLayer, Job
from benchmarks.systems.base import Session, Settings, System
from benchmarks.systems.torch_base import installed

INTER_OP_THREADS = 4
"""A sleeping layer and a waiting gate hold one each; a real accelerator's kernels hold none."""
LEARNING_RATE = 0.01
PACKS = (0, 4, 16)


class KerasSystem(System):
    """A system that trains a Keras model."""

    def missing(self) -> str | None:
        return installed("tensorflow") or installed("keras")

    @abstractmethod
    def open(self, job: Job, settings: Mapping[str, Any]) -> KerasSession: ...


class KerasSession(Session):
    """One call of a compiled training step per iteration."""

    def __init__(self, step: Callable[[], Any], close: Callable[[], None]) -> None:
        self._step = step
        self._close = close

    def iterate(self) -> None:
        self._step()

    def close(self) -> None:
        self._close()


class MirroredSystem(KerasSystem):
    """TensorFlow's multi-worker strategy: all-reduce as gradients come, a barrier at the end."""

    name = "mirrored"
    engine = "mirrored"

    def sweep(self, job: Job) -> list[Settings]:
        return [{"packs": count} for count in PACKS]

    def open(self, job: Job, settings: Mapping[str, Any]) -> KerasSession:
        import tensorflow as tf

        size = job.gradient_bytes // settings["packs"] if settings["packs"] else 0
        options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=size)
        with strategy().scope():
            model, optimizer = _model(job), _optimizer(options)
            optimizer.build(model.trainable_variables)

        @tf.function
        def step() -> Any:
            return strategy().run(_train_step, args=(model, optimizer))

        return KerasSession(step, _nothing)


class ScheduledKerasSystem(KerasSystem):
    """``bytescheduler.tensorflow`` over TensorFlow's collectives."""

    name = "bytescheduler-tf"
    engine = "tensorflow"

    def sweep(self, job: Job) -> list[Settings]:
        from benchmarks.job import nearest_power_of_two

        sizes = [nearest_power_of_two(job.gradient_bytes / count) for count in (64, 32, 128)]
        return [
            {"partition_size": size, "credit_size": size * credit}
            for size in sizes
            for credit in (2, 4)
        ]

    def open(self, job: Job, settings: Mapping[str, Any]) -> KerasSession:
        import tensorflow as tf

        import bytescheduler.tensorflow as bs

        model = _model(job)
        optimizer = bs.ScheduledOptimizer(_optimizer(None), model, **settings)

        @tf.function
        def step() -> Any:
            return _train_step(model, optimizer)

        return KerasSession(step, optimizer.close)


@functools.cache
def strategy() -> Any:
    """This process's strategy; TensorFlow allows one, made before any tensor (collective)."""
    import tensorflow as tf

    limit_threads()
    return tf.distribute.MultiWorkerMirroredStrategy()


def limit_threads() -> None:
    """The same for both: kernels have one thread each, and several run at once."""
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(INTER_OP_THREADS)
    tf.config.threading.set_intra_op_parallelism_threads(1)


def _optimizer(options: Any) -> Any:
    """SGD; under a strategy with ``options`` for the all-reduce, which Keras does not pass on."""
    import keras
    import tensorflow as tf

    class Packed(keras.optimizers.SGD):
        def _all_reduce_sum_gradients(self, grads_and_vars: Any) -> Any:
            pairs = list(grads_and_vars)
            context = tf.distribute.get_replica_context()
            reduced = context.all_reduce("SUM", [g for g, _ in pairs], options=options)
            return list(zip(reduced, [v for _, v in pairs], strict=True))

    return (keras.optimizers.SGD if options is None else Packed)(LEARNING_RATE)


def _train_step(model: Any, optimizer: Any) -> Any:
    import tensorflow as tf

    # Nothing may be constant: TensorFlow would run stateless nodes once, when it folds constants.
    data = tf.random.uniform([1, 1])
    with tf.GradientTape() as tape:
        tape.watch(data)  # so that every layer has a backward
        loss = tf.reduce_sum(model(data) ** 2)
    *gradients, first = tape.gradient(loss, [*model.trainable_variables, data])
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss, first


def _model(job: Job) -> Any:
    import keras

    device = Device(job)

    class Emulated(keras.layers.Layer):
        def __init__(self, layer: EmulatedLayer) -> None:
            super().__init__(dtype="float32")
            self.profile = layer

        def build(self, shape: Any) -> None:
            numel = max(1, self.profile.numel)
            if self.profile.numel:
                self.weight = self.add_weight(shape=(numel,), initializer="zeros")

        def call(self, x: Any) -> Any:
            layer = self.profile
            if not layer.numel:
                return _without_weight(device, layer.forward_s, layer.backward_s)(x)
            operation = _with_weight(device, layer.forward_s, layer.backward_s, layer.numel)
            return operation(x, self.weight.value)

    model = keras.Sequential([keras.Input((1,)), *(Emulated(layer) for layer in job.layers)])
    model.build((None, 1))
    return model


def _with_weight(device: Device, forward_s: float, backward_s: float, numel: int) -> Any:
    import numpy as np
    import tensorflow as tf

    produced = np.full(numel, 1e-3, np.float32)

    def compute(upstream: Any) -> Any:
        device.compute(backward_s)
        return upstream, produced

    @tf.custom_gradient
    def operation(x: Any, weight: Any) -> Any:
        def backward(upstream: Any) -> tuple[Any, Any]:
            # One node yields both: a control edge alone would be optimised away.
            kinds = [x.dtype, tf.float32]
            passed, gradient = tf.numpy_function(compute, [upstream], kinds, stateful=False)
            return tf.ensure_shape(passed, x.shape), tf.ensure_shape(gradient, [numel])

        return _sleep(device, forward_s, x + weight[:1]), backward

    return lambda x, weight: operation(x, tf.convert_to_tensor(weight))


def _without_weight(device: Device, forward_s: float, backward_s: float) -> Any:
    import tensorflow as tf

    @tf.custom_gradient
    def operation(x: Any) -> Any:
        return _sleep(device, forward_s, x), lambda upstream: _sleep(device, backward_s, upstream)

    return operation


def _sleep(device: Device, seconds: float, x: Any) -> Any:
    """``x``, when the device has computed for this long."""
    import tensorflow as tf

    def compute(value: Any) -> Any:
        device.compute(seconds)
        return value

    result = tf.numpy_function(compute, [x], x.dtype, stateful=False)
    return tf.ensure_shape(result, x.shape)


def _nothing() -> None:
    """For a strategy there is nothing to undo."""
