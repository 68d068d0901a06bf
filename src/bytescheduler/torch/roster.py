"""Which of the optimizer's parameters take part in the exchange, and when that changes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from bytescheduler.torch.promise import plainly
from bytescheduler.torch.slots import Named, Slot, trainable

__all__ = ["Roster"]


class Roster:
    """Watches for parameters that are frozen, thawed or added.

    Args:
        sparse: parameters that are exchanged apart from the flat buffer.

    Attributes:
        dormant: the optimizer's parameters that take no part.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, sparse: Sequence[nn.Parameter]
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._sparse = list(sparse)
        self._known = 0
        self.dormant: list[nn.Parameter] = []

    def survey(self, named: Named) -> None:
        """Note that ``named`` take part from here on."""
        taking_part = {id(p) for _, p in named} | {id(p) for p in self._sparse}
        optimized = self._optimized()
        self._known = len(optimized)
        self.dormant = [p for p in optimized if id(p) not in taking_part]

    def trainable(self) -> Named:
        """Those that should take part now, by name."""
        return trainable(self._model, self._optimizer, self._sparse)

    def changed(self, slots: Sequence[Slot]) -> bool:
        """Whether the last survey, which gave ``slots``, is out of date."""
        with plainly():
            return (
                not all(slot.parameter.requires_grad for slot in slots)
                or any(parameter.requires_grad for parameter in self.dormant)
                or len(self._optimized()) != self._known
            )

    def _optimized(self) -> list[nn.Parameter]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]
