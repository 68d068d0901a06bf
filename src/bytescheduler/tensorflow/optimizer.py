"""``ScheduledOptimizer``: a Keras optimizer whose gradients travel in priority order.

``apply`` posts gradients as the backward pass produces them and updates nothing. Each layer's
variables are updated when they are read next, usually in the following forward pass, by which time
their averages have mostly arrived (see ``adapter.py``). What needs all gradients at once, such as
clipping by global norm, makes ``apply`` wait for them and update at once, as Keras does.

Towards Keras the object is the user's own optimizer: every attribute that is not defined here,
``__class__`` among them, is that of the wrapped one. So hyper-parameters can be read and set,
callbacks find what they look for, and a saved model loads where this package is not installed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import keras
import tensorflow as tf

from bytescheduler.core import Settings, resolve_settings
from bytescheduler.exceptions import ConfigurationError, UsageError
from bytescheduler.tensorflow.adapter import Adapter
from bytescheduler.tensorflow.variables import refuse_strategy
from bytescheduler.transports import Transport

__all__ = ["ScheduledOptimizer"]


class ScheduledOptimizer(keras.optimizers.Optimizer):
    """Wraps the ``optimizer`` that trains ``model``, on every worker (collective).

    Rank 0's weights and optimizer state become everybody's. Each worker must be fed its own share
    of the data, and the same number of steps.

    Args:
        optimizer: any Keras optimizer, third-party ones too.
        model: a built Keras model; all its trainable variables are exchanged.
        transport: name of a registered transport (``tensorflow``, ``kvstore``), or an open one.
        partition_size, credit_size: bytes, or texts like ``4MiB``.
        mode: ``priority``, ``fifo``, ``barrier`` or ``auto``.
        trace: path of a timeline to write.
        whole_update: update all variables together at the end of ``apply``, for an optimizer whose
            ``update_step`` depends on other variables. Detected where Keras's own pipeline is
            overridden or clips by global norm.

    Raises:
        ConfigurationError: a setting, the optimizer or ``TF_CONFIG`` breaks a rule.
        UsageError: the model is not built or is wrapped already, a distribution strategy is active
            or owns the model or the optimizer, the optimizer belongs to another model, or
            TensorFlow had started before ``bytescheduler.tensorflow`` was imported.
        RankMismatchError: the ranks' models or optimizers differ.
    """

    def __init__(
        self,
        optimizer: Any,
        model: Any,
        *,
        transport: str | Transport = "tensorflow",
        partition_size: int | str | None = None,
        credit_size: int | str | None = None,
        mode: str | None = None,
        trace: str | None = None,
        whole_update: bool = False,
    ) -> None:
        resolve = partial(
            resolve_settings,
            partition_size=partition_size,
            credit_size=credit_size,
            mode=mode,
            trace=trace,
        )
        resolve()  # what is wrong with them is said before anything is opened
        _check(optimizer, model)
        adapter = Adapter(optimizer, model, transport, resolve, whole_update)
        object.__setattr__(self, "_adapter", adapter)

    def __getattribute__(self, name: str) -> Any:
        if name in _OWN:
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "_adapter").optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._adapter.synchronize()
        setattr(self._adapter.optimizer, name, value)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Post ``grads``; the variables are updated before they are used next."""
        self._adapter.apply(grads, trainable_variables)

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        """Like ``apply``, for (gradient, variable) pairs; returns ``iterations``."""
        gradients, variables = zip(*grads_and_vars, strict=True)
        self._adapter.apply(gradients, variables)
        return self._adapter.optimizer._iterations

    def synchronize(self) -> None:
        """Wait for all averages and apply all updates that are due.

        Raises:
            TransportError: the exchange failed or was closed.
        """
        self._adapter.synchronize()

    def close(self) -> None:
        """Apply what is due, stop exchanging, leave the model as if it had never been wrapped.

        Needed before ``model.export`` (the gates cannot be part of a SavedModel) and before the
        model is wrapped again. May be called twice.
        """
        self._adapter.close()

    @property
    def settings(self) -> Settings:
        """The sizes and the mode in force."""
        return self._adapter.runtime.settings

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self._adapter.runtime.transport.rank

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self._adapter.runtime.transport.world_size

    @property
    def variables(self) -> list[Any]:
        """The optimizer's variables, current."""
        self._adapter.synchronize()
        return self._adapter.optimizer.variables

    def save_own_variables(self, store: Any) -> None:
        """Save the wrapped optimizer's state, as Keras asks for it."""
        self._adapter.synchronize()
        self._adapter.optimizer.save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Load the wrapped optimizer's state, as Keras asks for it."""
        self._adapter.synchronize()
        self._adapter.optimizer.load_own_variables(store)

    def set_weights(self, weights: Any) -> None:
        """Set the optimizer's variables."""
        self._adapter.synchronize()
        self._adapter.optimizer.set_weights(weights)

    def finalize_variable_values(self, var_list: Any) -> None:
        """Overwrite variables by their moving averages where the optimizer keeps them."""
        self._adapter.synchronize()
        self._adapter.optimizer.finalize_variable_values(var_list)


_OWN = frozenset(
    name
    for name in vars(ScheduledOptimizer)
    if name not in ("__module__", "__doc__", "__init__", "__getattribute__", "__setattr__")
) | {"_adapter"}


def _check(optimizer: Any, model: Any) -> None:
    if keras.backend.backend() != "tensorflow":
        raise ConfigurationError(
            f"Keras must run on TensorFlow here, its backend is {keras.backend.backend()!r}; "
            "set KERAS_BACKEND=tensorflow"
        )
    if isinstance(optimizer, ScheduledOptimizer):
        raise UsageError("this optimizer is a ScheduledOptimizer already; pass the Keras optimizer")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigurationError(
            f"optimizer must be a keras.optimizers.Optimizer object, got {optimizer!r}; pass for "
            "example keras.optimizers.Adam(1e-3)"
        )
    if not getattr(model, "built", False):
        raise UsageError(
            f"the model must be built before its optimizer is wrapped, {model!r} is not; give it "
            "an Input, call model.build(input_shape) or call it once on a batch"
        )
    if not model.trainable_variables:
        raise UsageError(f"{model!r} has no trainable variables; unfreeze what is to be trained")
    _check_strategy(optimizer, model)
    _check_ownership(optimizer, model)


def _check_strategy(optimizer: Any, model: Any) -> None:
    refuse_strategy()
    plain = type(tf.distribute.get_strategy())  # outside of all scopes there is the default one
    owners = {
        "the optimizer": optimizer._distribution_strategy,
        "the model": model.distribute_strategy,
    }
    for owner, strategy in owners.items():
        if type(strategy) is not plain:
            raise UsageError(
                f"{owner} was made in the scope of a {type(strategy).__name__}, and "
                "ScheduledOptimizer takes the strategy's place: it averages the gradients itself; "
                "make model and optimizer outside of strategy.scope()"
            )


def _check_ownership(optimizer: Any, model: Any) -> None:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return
    if model.dtype_policy.name == "mixed_float16":
        raise ConfigurationError(
            "under mixed_float16 Keras would scale each worker's loss by itself; wrap the scaled "
            "optimizer: ScheduledOptimizer(keras.optimizers.LossScaleOptimizer(optimizer), model)"
        )
    if optimizer.built and set(optimizer._trainable_variables_indices) != {
        optimizer._var_key(variable) for variable in model.trainable_variables
    }:
        raise UsageError(
            f"{optimizer.name} was built for other variables, probably another model's; give "
            "every model an optimizer of its own"
        )
