"""The pull that EFL and FedCurv share: to the clients' last models, weighted by Fisher information."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from flwr_regs.abilities import Checks
from flwr_regs.hook_contexts import Arrays, ClientContext, ServerContext, ServerStep, Slot
from flwr_regs.methods.parts.once import unstable, warn_once
from flwr_regs.methods.parts.uploads import Sums, check_arrays, joined, under
from flwr_regs.term import COUNT, NOT_NEGATIVE, SWITCH, Ranges, Term
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import LARGEST, check_finite


@dataclass(frozen=True)
class FisherSums(Term, Sums, Checks):
    """A pull to the clients' last models, weighted by their Fisher information: EFL's and FedCurv's.

    Clients upload ``u_k``, and the server sums ``u_k`` and ``v̂_k = u_k ⊙ v_k``. It computes v̂_k from the
    update, ``u_k ⊙ (w_t + Δ_k)``, equal up to float32's rounding. Where it does not get v_k (a later term
    changes the update, or it travels in half precision), the clients upload v̂_k too.
    """

    keeps_delta: ClassVar[bool] = True
    times: ClassVar[float] = 1.0
    """The pull is this many times ``λ (U ⊙ v − V)``."""
    ranges: ClassVar[Ranges] = {"lam": NOT_NEGATIVE, "fisher_samples": COUNT, "implicit": SWITCH}
    lam: float
    fisher_samples: int | None = None
    implicit: bool = False

    def acts(self, hook: str) -> bool:
        return super().acts(hook) and (self.lam != 0 or hook not in ("finish", "fold"))

    def broadcast(self, server: Slot, ctx: ServerContext) -> Slot:
        return {key: a for key, a in server.items() if key.startswith(("U.", "V."))}

    def sums(self, name: str, ctx: ClientContext) -> tuple[Any, Any]:
        """Return one parameter's U and V that pull this client."""
        return ctx.broadcast[f"U.{name}"], ctx.broadcast[f"V.{name}"]

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        if not ctx.broadcast:
            return grads
        strength, out = self.times * self.lam, {}
        for n, g in grads.items():
            if f"U.{n}" not in ctx.broadcast:  # this client alone trains it: the server names it
                return grads
            u, v = self.sums(n, ctx)
            pull = (u * params[n]).sub_(v).mul_(strength)  # EFL: the derivative of Eq. 3
            out[n] = pull.to(g.dtype).add_(g)
            if self.implicit:
                wide = u.to(torch.promote_types(u.dtype, g.dtype))
                out[n] = (out[n] / (1 + ctx.lr * strength * wide)).to(g.dtype)
        return out

    def uploaded(self, client_sums: Slot, ctx: ClientContext) -> Slot:
        """Return what of `measured` the server cannot compute."""
        plain = ctx.delta_is_sent and keys.HALF_KEY not in ctx.config
        return {k: a for k, a in client_sums.items() if k.startswith("U.") or not plain}

    def measured(self, delta: Arrays, ctx: ClientContext) -> Slot:
        """Return this client's ``u_k`` and ``v̂_k``, in float32; nothing if λ is 0."""
        if self.lam == 0:
            return {}
        end = {n: ctx.start[n] + d for n, d in delta.items()}  # v_k
        fisher = ctx.fisher(end, self.fisher_samples)
        u = {n: fisher[n].to(torch.float32) for n in end}
        return joined(U=u, V={n: (u[n] * w).to(torch.float32) for n, w in end.items()})

    def check(self, upload: Slot, params: Arrays, server: Slot) -> None:
        both = any(key.startswith("V.") for key in upload)  # all of them, or none
        kinds = ("UV" if both else "U") if self.lam else ""
        floats = {n: ("float32", p.shape) for n, p in params.items()}
        check_arrays(upload, joined(**dict.fromkeys(kinds, floats)))
        if negative := [n for n, a in under(upload, "U.").items() if (a < 0).any()]:
            raise ValueError(f"'U.{negative[0]}' holds negative squares")

    def tolerance(self, upload: Slot, lr: float | None) -> float:
        """Squares: 1,000² times. But 10 times if the pull by this client's alone is no stable step."""
        scale = dict(zip("UV", upload.get("scale", (1, 1)), strict=True))
        sizes = [abs(a).max(initial=0) * scale[k[0]] for k, a in upload.items() if k[0] in "UV"]
        pull = (lr or 0.0) * self.times * self.lam * float(max(sizes, default=0))
        return 10.0 if pull >= 2 and not self.implicit else 1e6

    def addends(self, pid: int, delta: Arrays, upload: Slot, ctx: ServerContext) -> Slot:
        u, v = under(upload, "U."), under(upload, "V.")
        if u and not v:  # as the client rounds it
            v = {n: (u[n] * (ctx.params[n] + d)).astype(np.float32) for n, d in delta.items()}
            check_finite(v, "its Fisher information times the model", largest=LARGEST)
        return joined(U=u, V=v)

    def adds(self, key: str) -> bool:
        return key.startswith(("U.", "V."))

    def update(self, server: Slot, delta: Arrays, uploads: Slot, ctx: ServerContext) -> ServerStep:
        new = {key: total.astype(np.float32) for key, total in uploads.items()}  # U, V
        largest = max((a.max(initial=0) for a in under(new, "U.").values()), default=0)
        most = 2 / (ctx.lr * self.times * largest) if largest else np.inf
        strong = self.lam > most and not self.implicit
        text = unstable(self.name, "lam", self.lam, most, "η and U are") if strong else ""
        return new | warn_once("warned", server, text), delta
