"""The user's Keras optimizer, applied to one variable at a time.

``Optimizer.apply`` does more than ``update_step``: it unscales, clips, decays, accumulates, keeps
moving averages and applies constraints. All of it works per variable, apart from the bookkeeping
that ``apply`` does for the whole list at the end of a step. So a variable is updated by the user's
own ``apply`` on a *view* of the optimizer that shares all its state and differs in what concerns
the list: it knows this variable's moving average and accumulator only, and its iteration count and
learning rate are those of the step that the gradient belongs to.

Considered instead: calling ``update_step`` and doing the rest again here (drifts from Keras), one
optimizer per variable (other checkpoints, other slot names).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import keras

__all__ = ["StepState", "is_separable", "update"]

# What must be Keras's own for updates of single variables to add up to one of them all.
PIPELINE: Final = (
    "apply",
    "_backend_apply_gradients",
    "_backend_update_step",
    "_clip_gradients",
    "_apply_weight_decay",
    "_update_model_variables_moving_average",
    "_overwrite_model_variables_with_average_value",
)


class _Frozen(keras.Variable):
    """An iteration count that the optimizer may read but not advance."""

    def assign_add(self, value: Any) -> Any:
        return self.value


class StepState:
    """Iteration and learning rate as they were when ``apply`` was called."""

    def __init__(self, optimizer: Any) -> None:
        iterations = optimizer._iterations
        self.iterations = _Frozen(0, dtype=iterations.dtype, trainable=False, name="iterations")
        self.learning_rate = keras.Variable(
            0.0, dtype=keras.backend.floatx(), trainable=False, name="learning_rate"
        )

    def record(self, optimizer: Any) -> None:
        """Keep the present values for the updates that follow."""
        self.iterations.assign(optimizer._iterations)
        self.learning_rate.assign(optimizer.learning_rate)


def is_separable(optimizer: Any, variables: Sequence[Any]) -> bool:
    """Whether updating variables one by one gives what ``optimizer.apply`` gives for all."""
    kind = type(optimizer)
    return (
        not optimizer.global_clipnorm
        and all(
            getattr(kind, name) is getattr(keras.optimizers.Optimizer, name) for name in PIPELINE
        )
        and not any(variable.overwrite_with_gradient for variable in variables)
    )


def update(optimizer: Any, state: StepState, variable: Any, gradient: Any) -> None:
    """Apply ``optimizer`` to one variable, as at the step in ``state``."""
    _view(optimizer, state, variable).apply([gradient], [variable])


def _view(optimizer: Any, state: StepState, variable: Any) -> Any:
    view = object.__new__(type(optimizer))
    index = optimizer._get_variable_index(variable)
    members: dict[str, Any] = vars(view)  # past __setattr__, which would track variables twice
    members.update(vars(optimizer))
    members["_iterations"] = state.iterations
    members["_learning_rate"] = state.learning_rate
    members["_trainable_variables"] = [variable]
    if optimizer.use_ema:
        members["_model_variables_moving_average"] = [
            optimizer._model_variables_moving_average[index]
        ]
    if optimizer.gradient_accumulation_steps:
        accumulators = optimizer._accumulated_gradients
        members["_accumulated_gradients"] = [
            accumulator if position == index else None
            for position, accumulator in enumerate(accumulators)
        ]
    return view
