"""How EFL's sums travel: dense or their largest entries alone, in 32 or in 16 bits.

A message holds two numbers for each of the n entries of the model's parameters: U, never negative, and V.

Dense, it has ``U.<parameter>`` and ``V.<parameter>``. With a density q, the parameters, sorted by name, are
one vector, and only the ``k = max(⌊n q⌋, 1)`` entries of largest U travel, of equal ones the first:

| key      | type      | shape      | what                                                    |
|----------|-----------|------------|---------------------------------------------------------|
| `U`, `V` | float     | k          | the entries' values, by ascending position              |
| `low`    | uint8     | k          | their positions, modulo 256                             |
| `counts` | int16     | ⌈n / 256⌉  | how many of them are in each block of 256 positions     |

So a position takes little more than a byte, and the size of a message depends on n and q alone. All other
entries are 0.

In 32 bits, the values are float32. In 16 bits they are float16, beside ``scale``: float32, two numbers by
which U and V are multiplied, so that float16's range is no limit. Values below 2⁻⁴¹ of the largest become
0. An entry is rounded to 11 binary digits if it is above 2⁻³⁰ of the largest, and less finely below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from flwr_regs.methods.parts.ternary import entries_kept
from flwr_regs.methods.parts.uploads import check_arrays, joined
from flwr_regs.term import Arrays, Slot
from flwr_regs.wire.arrays import LARGEST, check_finite

BLOCK = 256
HALF_MAX = 65504.0
"""The largest float16."""
LEAST_SCALE = 2.0**-126


@dataclass(frozen=True)
class SumsCode:
    """The code of U and V, torch tensors by ``"U.<parameter>"`` and ``"V.<parameter>"``.

    Attributes
    ----------
    half : bool
        Whether values travel in 16 bits.
    density : float, optional
        The fraction of entries that travels; None: all.
    """

    half: bool = False
    density: float | None = None

    def encode(self, sums: Arrays) -> Slot:
        """Return the message of `sums`, float32; runs under ``torch.func.vmap``."""
        if self.density is not None:
            sums = _largest(sums, self.density)
        if not self.half:
            return sums
        scales, out = {}, dict(sums)
        for s in "UV":
            values = {key: a for key, a in sums.items() if key[0] == s}
            top = torch.stack([a.abs().amax() for a in values.values() if a.numel()]).amax()
            scales[s] = (top / HALF_MAX).clamp(min=LEAST_SCALE)
            out |= {key: (a / scales[s]).to(torch.float16) for key, a in values.items()}
        return {**out, "scale": torch.stack([*scales.values()])}

    def decode(self, slot: Slot, like: Arrays) -> Arrays:
        """Return the sums in float32, with an entry for each parameter of `like`; torch, under vmap too."""
        values = {key: a for key, a in slot.items() if key[0] in "UV"}
        if self.half:
            scale = dict(zip("UV", slot["scale"], strict=True))
            values = {key: a.to(torch.float32) * scale[key[0]] for key, a in values.items()}
        if self.density is None:
            return values
        at = _positions(slot["low"], slot["counts"])
        shapes = {n: like[n].shape for n in sorted(like)}
        sizes = [shape.numel() for shape in shapes.values()]
        out: Slot = {}
        for s in "UV":
            flat = values[s].new_zeros(sum(sizes)).scatter(0, at, values[s])
            parts = zip(shapes.items(), flat.split(sizes), strict=True)
            out |= {f"{s}.{n}": part.reshape(shape) for (n, shape), part in parts}
        return out

    def checked(self, slot: Slot, params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the sums of a message that travelled, in numpy; raise ValueError if it is none.

        Its keys, dtypes and shapes are compared before anything is decoded.
        """
        if not self.half and self.density is None:
            return dict(slot)
        blank = partial(torch.empty, dtype=torch.float32, device="meta")  # shapes alone
        like = {n: blank(p.shape) for n, p in params.items()}
        expected = self.encode(joined(U=like, V=like))
        kinds = {k: (str(a.dtype).removeprefix("torch."), (*a.shape,)) for k, a in expected.items()}
        check_arrays(slot, kinds)
        if self.half and not (slot["scale"] > 0).all():
            raise ValueError(f"'scale' is {slot['scale']}, expected positive numbers")
        if self.density is not None:
            low, counts = slot["low"], slot["counts"].astype(np.int64)
            if (counts < 0).any() or counts.sum() != low.size:
                raise ValueError(f"'counts' must add up to {low.size}, none of them negative")
            at, n = np.repeat(np.arange(counts.size), counts), sum(p.size for p in params.values())
            at = at * BLOCK + low
            if (np.diff(at) <= 0).any() or (at.size and at[-1] >= n):
                raise ValueError(f"positions in 'low' and 'counts' must ascend and be below {n}")
        # copies: it may be read-only
        tensors = {key: torch.tensor(a, device="cpu") for key, a in slot.items()}
        sums = {key: a.numpy() for key, a in self.decode(tensors, like).items()}
        check_finite(sums, "the decoded sums", largest=LARGEST)  # the scale can make them larger
        return sums


def _largest(sums: Arrays, density: float) -> Arrays:
    """Return the entries of largest U, and where they are."""
    names = sorted(key[2:] for key in sums if key[0] == "U")
    u, v = (torch.cat([sums[f"{s}.{n}"].reshape(-1) for n in names]) for s in "UV")
    k = entries_kept(u.shape[0], density)
    at = u.sort(descending=True, stable=True).indices[:k].sort().values
    counts = torch.zeros(-(-u.shape[0] // BLOCK), dtype=torch.int64, device=u.device)
    return {
        "U": u.gather(0, at),
        "V": v.gather(0, at),
        "low": (at % BLOCK).to(torch.uint8),
        "counts": counts.scatter_add(0, at // BLOCK, torch.ones_like(at)).to(torch.int16),
    }


def _positions(low: Any, counts: Any) -> Any:
    """Return the positions, given how many are in each block; without a shape that depends on values."""
    ends = counts.to(torch.int64).cumsum(0)
    passed = torch.zeros(low.shape[0] + 1, dtype=torch.int64, device=low.device)
    blocks = passed.scatter_add(0, ends, torch.ones_like(ends)).cumsum(0)[:-1]
    return blocks * BLOCK + low
