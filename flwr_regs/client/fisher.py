"""The diagonal of the empirical Fisher information, sample by sample. Plain torch."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from flwr_regs.client.batches import NO_DATA, Batches, _rows, _tensors, to_device

Tensors = dict[str, Tensor]
NLL = Callable[[Tensors, Tensor], Tensor]


def fisher_diagonal(
    model: nn.Module,
    data: Batches,
    loss_fn: Callable[[Any, Any], Tensor],
    device: str | torch.device,
    params: Tensors | None = None,
    max_samples: int | None = None,
    *,
    memory: int = 32 * 2**20,  # glibc maps larger blocks anew each time: slower on a CPU
) -> Tensors:
    """Return the mean over the samples of the squared gradient of each one's log-likelihood.

    That of a sample is ``−loss_fn(model(x), y)`` on it as a batch of one, with the model in eval mode. The
    model, already on `device`, and torch's random state are left as they were; a loader's own generator
    moves on. There is an entry, in its dtype or a wider one, for each parameter with
    ``requires_grad=True``: zeros where no loss reaches it.

    Parameters
    ----------
    data : iterable of (inputs, targets)
        Passed over once: tensors or nested dicts, lists and tuples of them, all of a batch equally long.
    params : dict[str, Tensor], optional
        Where to take the gradients; what it lacks is the model's own.
    max_samples : int, optional
        Stop after so many samples; with a shuffling loader they are a random subset.
    memory : int
        Bytes for the gradients of samples computed together; those of one may take more.

    Raises ValueError without data or trainable parameters, for a `max_samples` below 1, for unequal
    lengths, and for a loss that is not a scalar.

    Source: Ma et al., "Towards heterogeneous clients with elastic federated learning" (2021), Eq. 2.
    """
    if max_samples is not None and max_samples < 1:
        raise ValueError(f"max_samples must be at least 1 or None, not {max_samples}")
    own = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not own:
        raise ValueError(f"{type(model).__name__} has no parameter with requires_grad=True")
    params = {n: (params or own).get(n, p).detach() for n, p in own.items()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}  # for a forward that writes to them
    wide = {n: torch.promote_types(p.dtype, torch.float32) for n, p in own.items()}  # not half
    total = {n: torch.zeros_like(p, dtype=wide[n]) for n, p in own.items()}
    chunk = max(1, memory // sum(p.nbytes for p in own.values()))
    limit = sys.maxsize if max_samples is None else max_samples
    seen, together = 0, True
    with _kept(model, torch.device(device)):
        for batch in data:
            lengths = {t.shape[:1] for t in _tensors(batch)}
            if len(lengths) != 1 or () in lengths:
                raise ValueError(f"the tensors of a batch must be equally long, not {lengths}")
            batch = to_device(batch, device)

            def nll(p: Tensors, row: Tensor, batch: Any = batch) -> Tensor:
                inputs, targets = _rows(batch, row[None])  # type: ignore[arg-type]
                loss = loss_fn(functional_call(model, (p, buffers), (inputs,)), targets)
                if loss.ndim:
                    raise ValueError(f"loss_fn must return a scalar, not shape {tuple(loss.shape)}")
                return loss

            n = min(lengths.pop()[0], limit - seen)
            for i in range(0, n, chunk):  # not vmap's own chunk_size: that keeps all the chunks
                rows = torch.arange(i, min(i + chunk, n), device=device)
                together = _add_squares(total, nll, params, rows, together)
            seen += n
            if seen == limit:
                break
    if not seen:
        raise ValueError(NO_DATA)
    return {n: t / seen for n, t in total.items()}


def _add_squares(total: Tensors, nll: NLL, params: Tensors, rows: Tensor, together: bool) -> bool:
    """Add the samples' squared gradients to `total`; return whether that went `together`."""
    why = ""
    if together:
        try:
            grads = vmap(grad(nll), in_dims=(None, 0))(params, rows)
        except Exception as e:  # if it is the model's own, it comes again below
            why = f"{type(e).__name__}: {e}".partition("\n")[0]
        else:
            for n, g in grads.items():
                for one in g:  # g.square().sum(0) is slower and takes as much memory again
                    total[n].addcmul_(one, one)
            return True
    with torch.backends.cudnn.flags(enabled=False):  # its RNNs have no backward in eval mode
        for row in rows:
            leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
            if not (loss := nll(leaves, row)).requires_grad:
                continue  # it reaches no parameter
            found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
            for n, g in zip(leaves, found, strict=True):
                if g is not None:
                    one = g.to_dense()  # an embedding's may be sparse
                    total[n].addcmul_(one, one)
    if why:  # a warning, not a log: Python shows it once, not for each client and round
        warnings.warn(f"Fisher information one sample at a time: vmap failed ({why})", stacklevel=3)
    return False


@contextmanager
def _kept(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Eval mode with gradients; then the modules' attributes and torch's random state come back."""
    before = [(vars(m), dict(vars(m))) for m in model.modules()]  # flags, and what a forward stores
    try:
        gpus = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=gpus), torch.enable_grad():
            model.eval()
            yield
    finally:
        for now, then in before:
            now.clear()
            now.update(then)
