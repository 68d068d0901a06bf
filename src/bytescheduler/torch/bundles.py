"""Many small tensors as few flat ones, to send each kind in one message."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["Bundle", "bundle"]


class Bundle:
    """Tensors of one dtype and device, copied into one flat tensor.

    Attributes:
        raw: what to send; bytes where engines do not know the dtype.
    """

    def __init__(self, members: list[torch.Tensor]) -> None:
        self._members = members
        self._flat = torch.cat([member.detach().reshape(-1) for member in members])
        boolean = self._flat.dtype is torch.bool
        self.raw = self._flat.view(torch.uint8) if boolean else self._flat

    def adopt(self) -> None:
        """Copy the flat values back into the tensors."""
        parts = self._flat.split([member.numel() for member in self._members])
        with torch.no_grad():
            for member, part in zip(self._members, parts, strict=True):
                member.copy_(part.view(member.shape))


def bundle(tensors: Iterable[torch.Tensor]) -> list[Bundle]:
    """Group ``tensors`` by dtype and device, in order of appearance; empty ones are left out."""
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return [Bundle(members) for members in groups.values()]
