"""The bases of a method's two public classes: the method has the name of its strategy's class."""

from __future__ import annotations

from typing import Any

from flwr_regs.flower.client import RegClient
from flwr_regs.flower.strategy import RegStrategy


class MethodStrategy(RegStrategy):
    """The strategy of a method. What is derived from it is of the same method, if it says nothing else."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if MethodStrategy in cls.__bases__:
            cls.method = cls.__name__


class MethodClient(RegClient):
    """The client of a method, named after its strategy."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if MethodClient in cls.__bases__:
            cls.method = cls.__name__.removesuffix("Client")
