"""The most memory that tensors take at the same time, counted without a GPU."""

import weakref
from collections.abc import Iterable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


class Live(TorchDispatchMode):
    """The most bytes that tensors made inside lived on at the same time."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not (tensor.is_meta or tensor.is_nested):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.known and key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.peak = max(self.peak, sum(self.sizes.values()))
            weakref.finalize(storage, self.sizes.pop, key, None)
