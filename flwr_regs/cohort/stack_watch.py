"""What torch's functions do otherwise under ``torch.func.vmap`` than for one client. Plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flwr_regs.cohort.batch_plan import CannotStack

_ASKS = [vars(torch._C.TensorBase)[name].__get__ for name in ("requires_grad", "grad_fn")]


class Watch(TorchFunctionMode):
    """Sees each call of a torch function in its block: mends it, or raises CannotStack.

    A step costs some microseconds more. So a round's first step is watched, and the others if `always`.

    Parameters
    ----------
    model : nn.Module
        The stack's. Its own parameters are not those of any member, and nothing should read them.

    Attributes
    ----------
    always : bool
        Whether a function was called whose arguments have to be checked each time.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._own = {id(t) for t in (*model.parameters(), *model.buffers())}
        self._seed = torch.default_generator.initial_seed()
        self.always = any(isinstance(m, nn.Embedding) for m in model.modules())

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Return what the function returns."""
        kwargs = kwargs or {}
        if func in _ASKS:
            return _asked(func(*args), args[0])
        if getattr(func, "__name__", "") == "__get__":
            return func(*args, **kwargs)
        if torch.default_generator.initial_seed() != self._seed:
            raise CannotStack("its model or method seeds torch's random generator")
        self._check(args)
        self._check(kwargs.values())
        if func is nn.functional.embedding:
            self.always = True
            return _embedded(func, *args, **kwargs)
        if func is nn.functional.one_hot:
            self.always = True
            _check_classes(*args, **kwargs)
        return func(*args, **kwargs)

    def _check(self, values: Any) -> None:
        for value in values:
            if type(value) is torch.Generator:  # a Number refuses isinstance
                raise CannotStack("its model or method has a random generator of its own")
            if id(value) in self._own:
                raise CannotStack("its loss or method reads the model by itself")
            if type(value) in (list, tuple):
                self._check(value)


def _asked(found: Any, tensor: Tensor) -> Any:
    """Return whether a tensor requires a gradient, as found; raise CannotStack if vmap hides that."""
    if not found and _bare(tensor).requires_grad:
        raise CannotStack("its model or method asks whether a tensor requires a gradient")
    return found


def _embedded(
    func: Callable[..., Tensor], indices: Tensor, weight: Tensor, padding_idx: int | None = None,
    *args: Any, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """Return an embedding. Under vmap torch forgets ``padding_idx``, and reads other members' rows."""
    rows = weight.shape[0]
    bare = _bare(indices)
    if bare.numel() and not 0 <= int(bare.min()) <= int(bare.max()) < rows:
        raise CannotStack(f"an index of an embedding is out of range, which has {rows} rows")
    output = func(indices, weight, None, *args, **kwargs)
    if padding_idx is None:
        return output
    is_padding = (indices == padding_idx % rows).unsqueeze(-1)
    return torch.where(is_padding, output.detach(), output)


def _check_classes(tensor: Tensor, num_classes: int = -1) -> None:
    """Raise CannotStack for a class that does not exist; under vmap torch does not check."""
    bare = _bare(tensor)
    if bare.numel() and not 0 <= int(bare.min()) <= int(bare.max()) < num_classes:
        raise CannotStack(f"one_hot gets other classes than 0 to {num_classes - 1}")


def _bare(tensor: Tensor) -> Tensor:
    """Return the tensor of all members that is behind one member's."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
