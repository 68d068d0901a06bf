"""What the Keras adapter must do, as checks that every rank of one launch runs in turn.

``TOGETHER`` run with all ranks at once, ``ALONE`` over a cluster of one, where the wrapped training
must give bit for bit what the plain one gives. Starting TensorFlow is what takes time, so all
checks share one launch; see ``keras_worker.py``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import bytescheduler.tensorflow as bs  # before TensorFlow and Keras

# isort: split
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras import optimizers as ko

from bytescheduler.exceptions import (
    ConfigurationError,
    RankMismatchError,
    UsageError,
)
from bytescheduler.tensorflow.variables import GatedVariable
from bytescheduler.transports.tensorflow_collective import TensorFlowTransport

STEPS = 50
BATCH = 8
RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 8)).astype("float32")
Y = RNG.normal(size=(64, 2)).astype("float32")
Check = Callable[[], None]
OWN_GATES = 64  # bytes per chunk: less than any layer has, so that none shares its gate


def alone(optimizer: Any, model: Any, **options: Any) -> Any:
    """Wrap for a cluster of one."""
    cluster = bs.Cluster(addresses=("127.0.0.1:1",), rank=0)
    transport = TensorFlowTransport(cluster)
    return bs.ScheduledOptimizer(optimizer, model, transport=transport, **options)


def dense(seed: int = 1) -> Any:
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [keras.Input((8,)), layers.Dense(8, activation="relu"), layers.Dense(2)]
    )


def difference(one: Any, other: Any) -> float:
    pairs = zip(one.get_weights(), other.get_weights(), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


# -- with all ranks


def digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    count = STEPS * BATCH * bs.world_size()
    rows = np.arange(count) % len(bunch.images)
    return (bunch.images[rows, ..., None] / 16).astype("float32"), bunch.target[rows]


def cnn(seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(16, activation="tanh"),
            layers.Dense(10),
        ]
    )


def share(array: np.ndarray) -> np.ndarray:
    """This rank's part of every joined batch."""
    parts = array.reshape(-1, bs.world_size(), BATCH, *array.shape[1:])
    return parts[:, bs.rank()].reshape(-1, *array.shape[1:])


def as_a_single_process(
    make: Callable[[], Any], *, seed: int | None = None, **options: Any
) -> None:
    """The weights after 50 steps are those of one process with the joined batch."""
    images, labels = digits()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    single = cnn(1)
    ours = cnn(1 + bs.rank() if seed is None else seed)  # rank 0's must become everybody's
    single.compile(optimizer=make(), loss=loss, jit_compile=False)
    batch = BATCH * bs.world_size()
    single.fit(images, labels, batch_size=batch, verbose=0, shuffle=False)
    optimizer = bs.ScheduledOptimizer(make(), ours, **options)
    ours.compile(optimizer=optimizer, loss=loss, jit_compile=False)
    ours.fit(share(images), share(labels), batch_size=BATCH, verbose=0, shuffle=False)
    assert int(np.asarray(optimizer.iterations)) == STEPS
    assert difference(single, ours) < 1e-5
    optimizer.close()


def sgd_with_momentum() -> None:
    as_a_single_process(lambda: ko.SGD(0.05, momentum=0.9), partition_size=1024)


def adam() -> None:
    as_a_single_process(lambda: ko.Adam(1e-3), partition_size="4KiB", credit_size="8KiB")


def adamw() -> None:
    as_a_single_process(lambda: ko.AdamW(1e-3), mode="fifo")


def global_norm_and_barrier() -> None:
    as_a_single_process(lambda: ko.AdamW(1e-3, global_clipnorm=0.1), mode="barrier")


def embeddings_as_a_single_process() -> None:
    """Ranks that use different rows: as one process with the joined batch, on dense gradients."""
    joined = np.random.default_rng(3).integers(0, 35, size=(5, bs.world_size(), 4, 8))
    keras.utils.set_random_seed(1)
    single, ours = embedding(), embedding()
    ours.set_weights(single.get_weights())
    plain = ko.Adam(0.01)
    optimizer = bs.ScheduledOptimizer(ko.Adam(0.01), ours)
    for batch in joined:
        targets = np.tile(Y[:4], (bs.world_size(), 1))
        embedding_step(single, plain, batch.reshape(-1, 8), targets, densify=True)
        embedding_step(ours, optimizer, batch[bs.rank()], Y[:4])
    assert difference(single, ours) < 1e-5
    optimizer.close()


def mode_auto() -> None:
    as_a_single_process(lambda: ko.SGD(0.05, momentum=0.9), mode="auto")


def over_parameter_servers() -> None:
    """Servers number the workers by themselves, so all begin with the same weights."""
    make = partial(ko.SGD, 0.05, momentum=0.9)
    as_a_single_process(make, seed=1, transport="kvstore", partition_size="4KiB")


class Branch(keras.Model):
    """Rank 0 never uses ``other``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other, self.never = layers.Dense(4), layers.Dense(4), layers.Dense(4)

    def build(self, shape: Any) -> None:
        for layer in (self.first, self.other, self.never):
            layer.build(shape)
        self.built = True

    def call(self, x: Any) -> Any:
        return self.first(x) + (self.other(x) if bs.rank() else 0.0)


def _branch_step(model: Any, optimizer: Any) -> None:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(X) ** 2)
    optimizer.apply_gradients(
        zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
    )


def unused_on_some_ranks(optimizer: Any, partition_size: int | None = None) -> None:
    """What one rank uses is updated on all; what none uses is left alone by decay too."""
    model = Branch()
    model.build((None, 8))
    scheduled = bs.ScheduledOptimizer(optimizer, model, partition_size=partition_size)
    before = [weight.copy() for weight in model.get_weights()]
    step = tf.function(_branch_step)
    for _ in range(3):
        step(model, scheduled)
    after = model.get_weights()
    assert all(np.abs(a - b).max() > 1e-4 for a, b in zip(before[:4], after[:4], strict=True))
    assert all((a == b).all() for a, b in zip(before[4:], after[4:], strict=True))
    texts = scheduled._adapter.runtime.transport.exchange(b"".join(a.tobytes() for a in after))
    assert len(set(texts)) == 1, "the ranks' weights differ"
    scheduled.close()


def unused_on_some_ranks_later() -> None:
    for size in (None, OWN_GATES):
        unused_on_some_ranks(ko.AdamW(0.01, weight_decay=0.1), size)


def unused_on_some_ranks_whole() -> None:
    unused_on_some_ranks(ko.SGD(0.1, global_clipnorm=1.0))


def two_models_take_turns() -> None:
    models = [dense(1), dense(2)]
    optimizers = [bs.ScheduledOptimizer(ko.Adam(0.01), model) for model in models]
    plain = [dense(1), dense(2)]
    others = [ko.Adam(0.01), ko.Adam(0.01)]
    for chosen, makers in ((models, optimizers), (plain, others)):
        first, second = chosen
        for _ in range(4):
            for model, optimizer in zip(chosen, makers, strict=True):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((first(X) - second(X)) ** 2)
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizer.apply(gradients, model.trainable_variables)
    for ours, theirs in zip(models, plain, strict=True):
        assert difference(ours, theirs) < 1e-6
    for optimizer in optimizers:
        optimizer.close()


def other_models_on_other_ranks() -> None:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), layers.Dense(2, name=f"dense{bs.rank()}")])
    raises(RankMismatchError, lambda: bs.ScheduledOptimizer(ko.SGD(0.1), model), "same model")


def other_optimizers_on_other_ranks() -> None:
    model = keras.Sequential([keras.Input((8,)), layers.Dense(2, name="dense")])
    kind = ko.Adam if bs.rank() else ko.SGD
    raises(RankMismatchError, lambda: bs.ScheduledOptimizer(kind(0.1), model), "same optimizer")
    optimizer = bs.ScheduledOptimizer(ko.SGD(0.1), model)  # nothing was left behind
    _mse_step(model, optimizer)
    optimizer.close()


def _mse_step(model: Any, optimizer: Any, x: Any = X, y: Any = Y) -> Any:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


# -- alone: bit for bit what plain Keras gives


def fit(model: Any, optimizer: Any, targets: Any = Y, **options: Any) -> Any:
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False, **options)
    return model.fit(
        X,
        targets,
        batch_size=16,
        epochs=3,
        verbose=0,
        shuffle=False,
        validation_data=(X, targets),
    ).history


def as_plain(
    make_model: Callable[[], Any],
    make: Callable[[], Any],
    *,
    partition_size: int | None = None,
    **options: Any,
) -> None:
    keras.utils.set_random_seed(1)
    plain = make_model()
    keras.utils.set_random_seed(1)
    ours = make_model()
    targets = [Y] * len(ours.outputs) if len(getattr(ours, "outputs", [0])) > 1 else Y
    keras.utils.set_random_seed(2)
    expected = fit(plain, make(), targets, **options)
    keras.utils.set_random_seed(2)
    optimizer = alone(make(), ours, partition_size=partition_size)
    history = fit(ours, optimizer, targets, **options)
    assert difference(plain, ours) < 1e-6
    np.testing.assert_allclose(history["val_loss"], expected["val_loss"], rtol=1e-5)
    for one, other in zip(plain.optimizer.variables, optimizer.variables, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), atol=1e-6)
    optimizer.close()


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "nesterov": lambda: ko.SGD(0.1, momentum=0.9, nesterov=True),
    "clipnorm": lambda: ko.AdamW(0.01, clipnorm=0.5),
    "clipvalue_schedule_scale": lambda: ko.Adam(
        ko.schedules.ExponentialDecay(0.1, 2, 0.5),
        weight_decay=0.01,
        loss_scale_factor=8.0,
        clipvalue=0.1,
    ),
    "global_clipnorm": lambda: ko.Adam(0.01, global_clipnorm=0.1),
    "ema": lambda: ko.SGD(0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3),
    "accumulation": lambda: ko.Adam(0.1, gradient_accumulation_steps=3),
    "shared_state": lambda: ko.Nadam(0.1),
    "loss_scale": lambda: ko.LossScaleOptimizer(
        ko.Adam(0.01), initial_scale=64.0, dynamic_growth_steps=3
    ),
    "rmsprop": lambda: ko.RMSprop(0.01, centered=True, momentum=0.5),
}


def constrained() -> Any:
    limit = keras.constraints.MaxNorm(0.5)
    return keras.Sequential(
        [keras.Input((8,)), layers.Dense(8, kernel_constraint=limit), layers.Dense(2)]
    )


def shared_layer() -> Any:
    inputs, twice = keras.Input((8,)), layers.Dense(8, activation="tanh")
    return keras.Model(inputs, layers.Dense(2)(twice(twice(inputs))))


def nested() -> Any:
    inner = keras.Sequential([keras.Input((8,)), layers.Dense(8), layers.BatchNormalization()])
    inputs = keras.Input((8,))
    return keras.Model(inputs, layers.Dense(2)(inner(inputs)))


def two_outputs() -> Any:
    inputs = keras.Input((8,))
    hidden = layers.Dense(4)(inputs)
    return keras.Model(inputs, [layers.Dense(2)(hidden), layers.Dense(2)(hidden)])


def recurrent() -> Any:
    inputs = keras.Input((8,))
    return keras.Model(inputs, layers.Dense(2)(layers.LSTM(5)(layers.Reshape((4, 2))(inputs))))


def attention() -> Any:
    inputs = keras.Input((8,))
    steps = layers.Reshape((4, 2))(inputs)
    attended = layers.MultiHeadAttention(2, 2)(steps, steps)
    return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(attended)))


def dropout() -> Any:
    return keras.Sequential(
        [keras.Input((8,)), layers.Dense(8), layers.Dropout(0.5, seed=3), layers.Dense(2)]
    )


class Tied(keras.Model):
    """Reads a child's weight before the child is called, and again as a head."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out, self.unused = layers.Dense(8), layers.Dense(2), layers.Dense(3)

    def build(self, shape: Any) -> None:
        for layer in (self.hidden, self.out, self.unused):
            layer.build((None, 8))
        self.built = True

    def call(self, x: Any) -> Any:
        y = tf.matmul(x, self.hidden.kernel)
        return self.out(self.hidden(y) + tf.matmul(y, self.hidden.kernel, transpose_b=True))


def subclassed() -> Any:
    model = Tied()
    model.build((None, 8))
    return model


MODELS: dict[str, Callable[[], Any]] = {
    make.__name__: make
    for make in (
        constrained,
        shared_layer,
        nested,
        two_outputs,
        recurrent,
        attention,
        dropout,
        subclassed,
    )
}


def every_optimizer_feature() -> None:
    for name, make in OPTIMIZERS.items():
        with_context(name, lambda make=make: as_plain(constrained, make))


def every_kind_of_model() -> None:
    for name, make in MODELS.items():
        with_context(name, partial(as_plain, make, lambda: ko.AdamW(0.01)))
    for make in (shared_layer, nested, subclassed):
        train = partial(as_plain, make, lambda: ko.AdamW(0.01), partition_size=OWN_GATES)
        with_context(f"{make.__name__}, own gates", train)


def neighbours_share_a_gate_where_one_chunk_holds_them() -> None:
    for size, gates in ((None, 1), (OWN_GATES, 2)):
        optimizer = alone(ko.SGD(0.1), dense(), partition_size=size)
        assert len(optimizer._adapter._units) == gates
        optimizer.close()


def run_eagerly_and_several_steps_per_execution() -> None:
    as_plain(dense, lambda: ko.Adam(0.01), run_eagerly=True)
    as_plain(dense, lambda: ko.Adam(0.01), steps_per_execution=3)


def dtype_policies() -> None:
    for policy, make in (
        ("mixed_float16", OPTIMIZERS["loss_scale"]),
        ("mixed_bfloat16", OPTIMIZERS["ema"]),
        ("float64", OPTIMIZERS["nesterov"]),
    ):
        keras.config.set_dtype_policy(policy)
        try:
            with_context(policy, lambda make=make: as_plain(dense, make))
        finally:
            keras.config.set_dtype_policy("float32")


def data_of_unknown_length_loses_nothing() -> None:
    """The step that finds no data must neither count nor swallow an update."""
    plain, ours = dense(), dense()
    fit(plain, ko.Adam(0.01))
    optimizer = alone(ko.Adam(0.01), ours)
    ours.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16).filter(lambda x, y: True)
    ours.fit(data, epochs=3, verbose=0)
    assert int(np.asarray(optimizer.iterations)) == 12
    assert difference(plain, ours) < 1e-6
    optimizer.close()


def embedding() -> Any:
    inputs = keras.Input((8,), dtype="int32")
    rows = layers.Flatten()(layers.Embedding(70, 3)(inputs))
    return keras.Model(inputs, layers.Dense(2)(rows))


def embedding_step(model: Any, optimizer: Any, ids: Any, y: Any, *, densify: bool = False) -> None:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(ids, training=True) - y) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    assert any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)
    if densify:
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
    optimizer.apply(gradients, model.trainable_variables)


def train_embeddings(make: Callable[[], Any], batches: Sequence[Any]) -> dict[str, Any]:
    """Models trained by the scheduled optimizer, by Keras, and by Keras on dense gradients."""
    keras.utils.set_random_seed(1)
    models = {kind: embedding() for kind in ("ours", "keras", "dense")}
    for model in models.values():
        model.set_weights(models["ours"].get_weights())
    for kind, model in models.items():
        optimizer = alone(make(), model) if kind == "ours" else make()
        for ids in batches:
            embedding_step(model, optimizer, ids, Y[: len(ids)], densify=kind == "dense")
        if kind == "ours":
            optimizer.close()
    return models


EMBEDDING_OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: ko.Adam(0.01),
    "adamw": lambda: ko.AdamW(0.01),
    "adagrad": lambda: ko.Adagrad(0.01),
    "rmsprop": lambda: ko.RMSprop(0.01),
    "clipnorm": lambda: ko.SGD(0.1, clipnorm=0.1),
}


def sparse_gradients_are_summed() -> None:
    """Ids that come up twice in a batch: as Keras on the dense sum, and for plain SGD as Keras."""
    repeated = [RNG.integers(0, 35, size=(4, 8)) for _ in range(4)]
    for name, make in EMBEDDING_OPTIMIZERS.items():
        models = train_embeddings(make, repeated)
        with_context(name, lambda m=models: _close(difference(m["ours"], m["dense"])))
        assert difference(models["ours"], models["keras"]) > 1e-4, f"{name}: Keras has changed"
    models = train_embeddings(lambda: ko.SGD(0.1, momentum=0.9), repeated)
    _close(difference(models["ours"], models["keras"]))


def sparse_gradients_of_distinct_ids_are_as_in_keras() -> None:
    distinct = [RNG.permutation(70)[:32].reshape(4, 8) for _ in range(4)]
    for name, make in EMBEDDING_OPTIMIZERS.items():
        models = train_embeddings(make, distinct)
        with_context(name, lambda m=models: _close(difference(m["ours"], m["keras"])))


def wrapped_after_keras_traced_its_steps() -> None:
    """``predict`` has a graph without gates by then; it must not go on with old weights."""
    model = dense()
    model.compile(loss="mse", jit_compile=False)
    model.predict(X, verbose=0)
    model.evaluate(X, Y, verbose=0)
    optimizer = alone(ko.SGD(0.1), model)
    _mse_step(model, optimizer)
    predicted = model.predict(X, verbose=0)
    np.testing.assert_allclose(predicted, model(X), atol=1e-6)
    _mse_step(model, optimizer)
    loss = model.evaluate(X, Y, verbose=0)
    np.testing.assert_allclose(loss, np.mean((model(X) - Y) ** 2), rtol=1e-5)
    optimizer.close()


def wrapped_after_the_forward_was_traced() -> None:
    """A forward that was traced before has no gates: its weights are updated within ``apply``."""
    ways = product((_traced_whole, _traced_in_part), (lambda function: function, tf.function))
    for trace, decorate in ways:
        models = []
        for wrap in (lambda optimizer, model: optimizer, alone):
            model = dense()
            forward = trace(model)
            forward(X)
            optimizer = wrap(ko.Adam(0.01), model)
            model.get_weights()  # a read, but no forward

            def step(
                forward: Any = forward, model: Any = model, optimizer: Any = optimizer
            ) -> None:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((forward(X) - Y) ** 2)
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizer.apply(gradients, model.trainable_variables)

            once = decorate(step)
            for _ in range(4):
                once()
            models.append(model)
        _close(difference(*models))


def _traced_whole(model: Any) -> Callable[[Any], Any]:
    return tf.function(partial(model, training=True))


def _traced_in_part(model: Any) -> Callable[[Any], Any]:
    """The first layer in a graph of its own, the second one, which shares its gate, outside."""
    first, second = model.layers
    traced = tf.function(first)
    return lambda x: second(traced(x))


def overlap_is_kept_where_the_forward_has_gates() -> None:
    """The counterpart of the check above: no update within ``apply`` in any usual loop."""
    for kind in ("function", "eager", "forward_only"):
        model = dense()
        optimizer = alone(ko.Adam(0.01), model)
        loops(kind, model, optimizer)
        count = len(model.trainable_variables)
        assert optimizer._adapter.runtime.is_pending(range(count)), kind
        optimizer.close()


def loops(kind: str, model: Any, optimizer: Any) -> None:
    """Three passes over the data, written in different ways."""

    def step(x: Any, y: Any) -> Any:
        return _mse_step(model, optimizer, x, y)

    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)
    forward = tf.function(lambda x: model(x, training=True))

    @tf.function
    def loop_over_data() -> None:
        for x, y in data:
            step(x, y)

    @tf.function
    def unrolled(x: Any, y: Any) -> None:
        step(x[:8], y[:8])
        step(x[8:], y[8:])

    @tf.function
    def loop_inside(x: Any, y: Any) -> None:
        for i in tf.range(2):
            step(x[8 * i : 8 * i + 8], y[8 * i : 8 * i + 8])

    def forward_only(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((forward(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    bodies: dict[str, Callable[..., Any]] = {
        "function": tf.function(step),
        "eager": step,
        "unrolled": unrolled,
        "loop_inside": loop_inside,
        "forward_only": forward_only,
    }
    for _ in range(3):
        if kind == "loop_over_data":
            loop_over_data()
            continue
        for x, y in data:
            bodies[kind](x, y)


def custom_loops() -> None:
    for kind in ("function", "eager", "unrolled", "loop_inside", "forward_only", "loop_over_data"):
        plain, ours = dense(), dense()
        loops(kind, plain, ko.Adam(0.01))
        optimizer = alone(ko.Adam(0.01), ours)
        loops(kind, ours, optimizer)
        with_context(kind, lambda a=plain, b=ours: _close(difference(a, b)))
        optimizer.close()


def _close(value: float) -> None:
    assert value < 1e-6, value


class Peek(keras.callbacks.Callback):
    """Looks at the weights after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append([weight.copy() for weight in self.model.get_weights()])


def callbacks_see_current_weights_and_set_the_learning_rate() -> None:
    seen = []
    for wrap in (lambda optimizer, model: optimizer, alone):
        model, peek = dense(), Peek()
        optimizer = wrap(ko.SGD(0.1, momentum=0.9), model)
        model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
        callbacks = [peek, keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)]
        model.fit(X, Y, batch_size=16, epochs=3, verbose=0, shuffle=False, callbacks=callbacks)
        seen.append(peek.seen)
    for plain, ours in zip(*seen, strict=True):
        for one, other in zip(plain, ours, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)


def saved_and_loaded_at_any_moment() -> None:
    model = dense()
    optimizer = alone(ko.AdamW(0.01), model)
    fit(model, optimizer)
    assert isinstance(model.optimizer, ko.AdamW)
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder) / "model.keras")
        plain = keras.models.load_model(Path(folder) / "model.keras")
        assert type(plain.optimizer) is ko.AdamW
        fit(plain, plain.optimizer)
        fit(model, optimizer)
        assert difference(plain, model) < 1e-6
        model.save_weights(Path(folder) / "model.weights.h5")
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        path = checkpoint.save(str(Path(folder) / "checkpoint"))
        fit(model, optimizer)
        assert difference(plain, model) > 1e-6
        checkpoint.restore(path)
        assert difference(plain, model) < 1e-6
        fit(model, optimizer)
        model.load_weights(Path(folder) / "model.weights.h5")
        assert difference(plain, model) < 1e-6
    optimizer.close()


def weights_set_between_steps_stay() -> None:
    model = dense()
    optimizer = alone(ko.SGD(0.1), model)
    _mse_step(model, optimizer)
    model.set_weights([np.ones_like(weight) for weight in model.get_weights()])
    assert all((weight == 1).all() for weight in model.get_weights())
    optimizer.close()


def closing_leaves_a_plain_model() -> None:
    model = dense()
    optimizer = alone(ko.SGD(0.1), model)
    fit(model, optimizer)
    assert isinstance(model.trainable_variables[0], GatedVariable)
    optimizer.close()
    optimizer.close()
    assert type(model.trainable_variables[0]) is keras.Variable
    raises(UsageError, lambda: _mse_step(model, optimizer), "closed")
    with tempfile.TemporaryDirectory() as folder:
        model.export(folder, verbose=False)
        loaded = tf.saved_model.load(folder)
        served = loaded.serve(X[:2])
    np.testing.assert_allclose(served, model(X[:2]), rtol=1e-6)
    alone(ko.SGD(0.1), model).close()


def bad_input_is_refused() -> None:
    def compiled_by_xla() -> None:
        model = dense()
        model.compile(optimizer=alone(ko.SGD(0.1), model), loss="mse", jit_compile=True)
        model.fit(X, Y, verbose=0)

    def shared_optimizer() -> None:
        optimizer = ko.SGD(0.1)
        alone(optimizer, dense())
        alone(optimizer, dense())

    def wrapped_twice() -> None:
        model = dense()
        alone(ko.SGD(0.1), model)
        alone(ko.SGD(0.1), model)

    def scaled_by_keras() -> None:
        keras.config.set_dtype_policy("mixed_float16")
        try:
            alone(ko.SGD(0.1), dense())
        finally:
            keras.config.set_dtype_policy("float32")

    raises(ConfigurationError, compiled_by_xla, "jit_compile=False")
    raises(UsageError, shared_optimizer, "an optimizer of its own")
    raises(UsageError, wrapped_twice, "close")
    raises(ConfigurationError, scaled_by_keras, "LossScaleOptimizer")
    raises(ConfigurationError, lambda: alone("sgd", dense()), "keras.optimizers.Optimizer")
    unbuilt = keras.Sequential([layers.Dense(2)])
    raises(UsageError, lambda: alone(ko.SGD(0.1), unbuilt), r"model\.build")
    model = dense()
    model.trainable = False
    raises(UsageError, lambda: alone(ko.SGD(0.1), model), "no trainable variables")
    raises(ConfigurationError, lambda: alone(ko.SGD(0.1), dense(), mode="soon"), "mode")


def raises(kind: type[Exception], call: Callable[[], Any], words: str) -> None:
    with pytest.raises(kind, match=words):
        call()


def with_context(name: str, check: Callable[[], None]) -> None:
    try:
        check()
    except Exception as error:
        raise AssertionError(f"{name}: {error}") from error


TOGETHER: Sequence[Check] = (
    sgd_with_momentum,
    adam,
    adamw,
    global_norm_and_barrier,
    embeddings_as_a_single_process,
    mode_auto,
    unused_on_some_ranks_later,
    unused_on_some_ranks_whole,
    two_models_take_turns,
    other_models_on_other_ranks,
    other_optimizers_on_other_ranks,
)
ALONE: Sequence[Check] = (
    every_optimizer_feature,
    every_kind_of_model,
    neighbours_share_a_gate_where_one_chunk_holds_them,
    run_eagerly_and_several_steps_per_execution,
    dtype_policies,
    data_of_unknown_length_loses_nothing,
    sparse_gradients_are_summed,
    sparse_gradients_of_distinct_ids_are_as_in_keras,
    wrapped_after_keras_traced_its_steps,
    wrapped_after_the_forward_was_traced,
    overlap_is_kept_where_the_forward_has_gates,
    custom_loops,
    callbacks_see_current_weights_and_set_the_learning_rate,
    saved_and_loaded_at_any_moment,
    weights_set_between_steps_stay,
    closing_leaves_a_plain_model,
    bad_input_is_refused,
)
