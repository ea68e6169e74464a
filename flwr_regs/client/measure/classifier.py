"""The output layer of a model: found, or named by the user, and checked on a forward pass.

And its features: its input, or the output of another layer, read by hooks on the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, Self

from torch import Tensor, nn

from flwr_regs.chain import layers_of
from flwr_regs.term import Term

LOG = logging.getLogger("flwr")


def find_classifier(model: nn.Module, name: str | None = None) -> str:
    """Return the name of the output layer: `name`, or else the ``nn.Linear`` that was registered last.

    Raises ValueError if there is no such layer; the message says how to name one.
    """
    if name is not None:
        named_layer(model, name, "classifier ")
        return name
    layers: dict[str, nn.Module] = dict(model.named_modules())
    linear = [n for n, layer in layers.items() if isinstance(layer, nn.Linear)]
    if not linear:
        what = f"{type(model).__name__} has no nn.Linear as its output layer"
        raise ValueError(f"{what}: name one with classifier=, of {[n for n in layers if n]}")
    return linear[-1]


def named_layer(model: nn.Module, name: str, what: str = "") -> nn.Module:
    """Return a layer of the model; raise ValueError if there is none of that name."""
    layers: dict[str, nn.Module] = {n: layer for n, layer in model.named_modules() if n}
    if name not in layers:
        raise ValueError(f"{what}'{name}' is not a layer of {type(model).__name__}: {[*layers]}")
    return layers[name]


@cache
def announce(model: str, layer: str) -> None:
    """Log once in a process which output layer is used in a kind of model."""
    LOG.info("%s: its output layer is '%s'; name another with classifier=", model, layer)


def makes(logits: Any, produced: Any) -> bool:
    """Return whether `logits` come from a layer's output `produced`, and from no parameters beside.

    Functions without parameters may follow the layer (a softmax), and parameters with a single entry (a
    temperature). Needs the graph of a forward pass with gradients.
    """
    if logits is produced:
        return True
    if not isinstance(logits, Tensor) or not isinstance(produced, Tensor):
        return False
    if logits.untyped_storage().data_ptr() == produced.untyped_storage().data_ptr():  # a view
        return True
    layer, nodes = produced.grad_fn, [logits.grad_fn]
    for node in nodes:  # grows
        if node is None or node is layer:
            continue
        if (parameter := getattr(node, "variable", None)) is not None and parameter.numel() > 1:
            return False
        nodes += [following for following, _ in node.next_functions if following not in nodes]
    return layer is not None and layer in nodes


class Hook:
    """A hook on a module. Copies of the module do not have it, nor does a file of the module."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *given: Any) -> None:
        self._call(*given)

    def __reduce__(self) -> Any:
        return Hook, (_nothing,)


def _nothing(*_: Any) -> None:
    """Do nothing."""


class Tap:
    """A hook on a layer of a model; until `close`, modules that are compiled in place run uncompiled."""

    def __init__(self, model: nn.Module, layer: nn.Module) -> None:
        self._model = model
        self._input: Any = None
        self._output: Any = None
        self._handle = layer.register_forward_hook(Hook(self._keep))
        # Compiled code may run an older hook or none: compiled modules run uncompiled meanwhile.
        self._compiled = {m: m._compiled_call_impl for m in model.modules()}
        for module in self._compiled:
            module._compiled_call_impl = None

    def _keep(self, _: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self._input, self._output = inputs[0], output

    def close(self) -> None:
        """Remove the hook, and let compiled modules run compiled again; a second time does nothing.

        Several taps on one model are closed last first.
        """
        for module, impl in self._compiled.items():
            module._compiled_call_impl = impl
        self._compiled = {}
        self._handle.remove()
        self._input = self._output = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OutputTap(Tap):
    """A hook on one layer; its output in the last forward pass is `value`.

    Parameters
    ----------
    model : nn.Module
    layer : str
        Its name. ValueError if the model has none of that name.
    """

    def __init__(self, model: nn.Module, layer: str) -> None:
        self._layer = layer
        super().__init__(model, named_layer(model, layer))

    @property
    def value(self) -> Any:
        """The output, ``(batch, d)``; ValueError if the last forward pass has not made one."""
        if not isinstance(self._output, Tensor):
            problem = "is not used" if self._output is None else "makes no tensor"
            raise ValueError(
                f"layer '{self._layer}' {problem} in the forward pass of {type(self._model).__name__}; "
                "name another layer, or call the model itself if it is torch.compile(model)"
            )
        return self._output.flatten(1)


class FeatureTap(Tap):
    """A hook on the output layer, named `layer`; its input in the last forward pass is `value`.

    Parameters
    ----------
    model : nn.Module
    classifier : str, optional
        Name of the output layer; default: the last ``nn.Linear``. ValueError if there is none.
    """

    def __init__(self, model: nn.Module, classifier: str | None = None) -> None:
        self.layer, self._named = find_classifier(model, classifier), classifier is not None
        self._why = "which classifier= names" if self._named else "its last nn.Linear"
        super().__init__(model, model.get_submodule(self.layer))
        if not self._named:
            announce(type(model).__name__, self.layer)

    @property
    def value(self) -> Any:
        """The features, ``(batch, d)``; ValueError if the last forward pass has not used the layer."""
        if self._input is None:
            raise ValueError(
                f"the forward pass of {type(self._model).__name__} does not use its output layer "
                f"'{self.layer}', {self._why}; name another with classifier=, or call the uncompiled model"
            )
        return self._input.flatten(1)

    def check(self, logits: Any) -> None:
        """Raise ValueError unless the layer makes the `logits` of the last forward pass.

        A layer that the user has named need only be used. Call it once, after the first forward pass.
        """
        _ = self.value
        if not self._named and not makes(logits, self._output):
            raise ValueError(
                f"the output of {type(self._model).__name__} is not that of its output layer "
                f"'{self.layer}', {self._why}; name the layer that makes the logits with classifier="
            )


class Taps:
    """The hooks on a model that a method's terms need; they are there until `close`.

    Parameters
    ----------
    model : nn.Module
    terms : iterable of Term
    classifier : str, optional
        As of `FeatureTap`. ValueError for a layer that the model has not.
    """

    def __init__(
        self, model: nn.Module, terms: Iterable[Term], classifier: str | None = None
    ) -> None:
        with ExitStack() as hooks:
            features = any("features" in t.needs for t in terms)
            tap = hooks.enter_context(FeatureTap(model, classifier)) if features else None
            self._features: FeatureTap | None = tap
            self._layers = {n: hooks.enter_context(OutputTap(model, n)) for n in layers_of(terms)}
            self.close = hooks.pop_all().close

    def __bool__(self) -> bool:
        return self._features is not None or bool(self._layers)

    @property
    def output_layer(self) -> str | None:
        """The name of the output layer, if the terms read features."""
        return None if self._features is None else self._features.layer

    def check(self, logits: Any) -> None:
        """Check the output layer, if the terms read features: see :meth:`FeatureTap.check`."""
        if self._features is not None:
            self._features.check(logits)

    def seen(self) -> dict[str, Any]:
        """Return what the last forward pass has shown, as fields of a context."""
        features = None if self._features is None else self._features.value
        return {"features": features, "layers": {n: t.value for n, t in self._layers.items()}}


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Leave the attributes of a model's modules as they were, and which buffers they have.

    What a forward pass stores there, perhaps under vmap, is of no use outside.
    """
    before = [(vars(m), dict(vars(m)), dict(m._buffers)) for m in model.modules()]
    try:
        yield
    finally:
        for attributes, values, buffers in before:
            attributes.clear()
            attributes.update(values)
            values["_buffers"].clear()
            values["_buffers"].update(buffers)


@contextmanager
def restored(*given: Any) -> Iterator[nn.Module]:
    """Leave a model, and a loss that is a module, as they were; what is no module does not count.

    That holds for attributes, parameters and buffers, also for those that do not travel. The block gets all
    modules as one.
    """
    model = nn.ModuleList(m for m in given if isinstance(m, nn.Module))
    held = [*model.parameters(), *model.buffers()]
    before = [(t.data, t.detach().clone()) for t in held]
    try:
        with attributes_kept(model):
            yield model
    finally:
        for tensor, (data, value) in zip(held, before, strict=True):
            tensor.data = data.copy_(value)


Modes = Mapping[nn.Module, bool]
"""Module -> whether it is in train mode."""


def modes_of(model: nn.Module) -> Modes:
    """Return the mode of each module of a model."""
    return {module: module.training for module in model.modules()}


@contextmanager
def in_modes(modes: Modes) -> Iterator[None]:
    """Put modules into these modes; then give each the mode back that it had."""
    before = {module: module.training for module in modes}
    try:
        for module, training in modes.items():
            module.training = training
        yield
    finally:
        for module, training in before.items():
            module.training = training


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode; then give each module its own mode back."""
    with in_modes(modes_of(model)):
        model.eval()
        yield
