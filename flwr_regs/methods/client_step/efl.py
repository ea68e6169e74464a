"""EFL: an elastic term, compression both ways, incomplete clients.

The **elastic term** pulls each parameter towards the clients' last values, in proportion to how well
their data determine it:

| *Init*       nothing: round 1 is FedAvg's
| *Broadcast*  ``U = Σ_k u_k`` and ``V = Σ_k v̂_k`` over the last round's replies, as float32
| *Step*       ``v ← v − η (∇f_k(v) + λ (U ⊙ v − V))``
| *Upload*     ``u_k = diag F_k(v_k)`` and, if the update is compressed, ``v̂_k = u_k ⊙ v_k``, as float32
| *Update*     as FedAvg; keeps the sums ``U`` and ``V``

**Sparse ternary compression** both ways, with residuals, is a term of its own: ternary.py.

**Incomplete clients** weigh more: a client that took ``s_k`` of its E steps gets ``p_k^τ = (E / s_k) p_k``
(Sec. 4.2; not renormalised). A client with ``s_k = 0`` is left out.

F is the empirical Fisher information: for each sample the squared gradient of its log-likelihood, averaged
over the client's samples, in eval mode.

``implicit=True`` is our addition, not the paper's: ``v ← v − η (∇f_k(v) + λ (U ⊙ v − V)) / (1 + η λ U)``,
element by element. This is the implicit Euler step of the pull, ``v' = v − η (∇f_k(v) + λ (U ⊙ v' − V))``,
stable for every λ. The explicit step is stable while ``η λ max U < 2``; a λ beyond that gives one warning.

**How the sums travel** is by option, ours too: in 16 bits, every n rounds, the entries of largest Fisher
information alone (``sums_bits``, ``sums_every``, ``sums_density``; fisher_code.py has the code).

Sources: Ma, Lu, Lu, Li, Yi, Cui, "Towards heterogeneous clients with elastic federated learning" (2021),
Alg. 1-2, Eqs. 2-6, Sec. 4. fedcurv.py has Shoham et al.'s term, which leaves out the client's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, ClassVar

import numpy as np
import torch

from flwr_regs.abilities import Addresses
from flwr_regs.hook_contexts import Arrays, ClientContext, ServerContext, ServerStep, Slot
from flwr_regs.methods.parts.fisher_code import SumsCode
from flwr_regs.methods.parts.fisher_sums import FisherSums
from flwr_regs.methods.parts.method import MethodClient, MethodStrategy
from flwr_regs.methods.parts.ternary import SparseTernary
from flwr_regs.methods.parts.uploads import check_arrays, under
from flwr_regs.term import COUNT, FRACTION, Range, Ranges

__all__ = ["EFL", "EFLClient", "Elastic"]

NOTES = ("warned", "due", "made", "age", "holders")
"""Keys of slots beside the sums."""


@dataclass(frozen=True)
class Elastic(FisherSums, Addresses):
    """The gradient of ``λ/2 Σ_i (v − v_i)ᵀ diag(F_i) (v − v_i)``, the v_i of the last round (Eq. 2).

    Parameters
    ----------
    lam : float
        Strength λ ≥ 0. With 0 it is FedAvg, and no Fisher information is computed or sent.
    fisher_samples : int, optional
        Compute the Fisher information over at most this many of a client's samples. None: exactly, over
        all. On label-sorted digits and MNIST, 100 kept the accuracy, 30 not on both: see docs/efl.md.
    implicit : bool
        Take the pull's step implicitly (ours, not the paper's). It divides all that stands on the term's
        left. Right of all other forces (FedADC's momentum too), with SGD without momentum, the step is the
        implicit Euler step of the pull. A term on its right acts after that step. With client momentum it
        is stable, but no longer that step; with an adaptive optimiser nothing is exact.
    sums_bits : {16, 32}, optional
        The bits of each number of u_k and v̂_k, U and V, as they travel. None: 32.
    sums_every : int, optional
        Clients compute and upload u_k and v̂_k in rounds 1, 1 + n, 1 + 2n, … The rounds in between use the
        last U and V. Each client receives these once, and keeps them; one that lost them goes without for a
        round. None: every round.
    sums_density : float, optional
        The fraction of the model's entries, in (0, 1], that travels of u_k and v̂_k, and of U and V: those
        of largest u_k and U. Elsewhere both are 0: where a client sends nothing, it does not count in the
        pull, and where the server sends nothing, there is no pull. What is left out is not made up for
        later. None: all.

    Notes
    -----
    `sums_bits`, `sums_every` and `sums_density` are ours, not the paper's, and go together.
    """

    name: ClassVar[str] = "elastic"
    ranges: ClassVar[Ranges] = {
        **FisherSums.ranges,
        "sums_bits": Range("16 or 32", lambda v: v in (16, 32), Integral),
        "sums_every": COUNT,
        "sums_density": FRACTION,
    }
    sums_bits: int | None = None
    sums_every: int | None = None
    sums_density: float | None = None

    @property
    def elementwise(self) -> bool:
        return self.sums_density is None  # positions are in the whole model

    @property
    def _code(self) -> SumsCode:
        return SumsCode(self.sums_bits == 16, self.sums_density)

    @property
    def _every(self) -> int:
        return (self.sums_every or 1) if self.lam else 1

    @property
    def _keeps(self) -> bool:
        """Whether clients keep the sums: not every round has new ones."""
        return self._every > 1

    def _due(self, server: Slot) -> bool:
        """Whether this round's clients upload u_k and v̂_k."""
        return bool(server.get("age", self._every) >= self._every)

    def broadcast(self, server: Slot, ctx: ServerContext) -> Slot:
        if not self._keeps:
            return sums_of(server)
        made = {"made": server["made"]} if "made" in server else {}
        return made | ({"due": np.asarray(True)} if self._due(server) else {})

    def broadcast_to(self, pid: int, server: Slot, ctx: ServerContext) -> Slot:
        if not self._keeps or np.isin(pid, server.get("holders", [])):
            return {}
        return sums_of(server)

    def _in_use(self, ctx: ClientContext) -> Slot:
        """Return the message that pulls this client: that of this round, or the one that it kept."""
        slot = ctx.broadcast if not self._keeps or sums_of(ctx.broadcast) else ctx.client
        return {key: a for key, a in slot.items() if key != "due"}

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        slot, newest = self._in_use(ctx), ctx.broadcast.get("made")
        if not (message := sums_of(slot)) or (self._keeps and newest is None):
            return grads
        sums = self._code.decode(message, grads)
        if self._keeps:  # an older message does not count
            sums = {key: a * (slot["made"] == newest) for key, a in sums.items()}
        return super().correct(grads, params, replace(ctx, broadcast=sums))

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        upload: Slot = {}
        if self.lam and (not self._keeps or "due" in ctx.broadcast):
            client_sums = self.measured(delta, ctx)
            plain = self._code == SumsCode()
            upload = self.uploaded(client_sums, ctx) if plain else self._code.encode(client_sums)
        if not self._keeps:
            return delta, upload, {}
        kept = {key: a.clone() for key, a in self._in_use(ctx).items()}
        kept = kept or {"made": torch.zeros((), dtype=torch.int64, device="cpu")}
        return delta, {**upload, "holds": kept["made"].clone()}, kept

    def check(self, upload: Slot, params: Arrays, server: Slot) -> None:
        sums = {key: a for key, a in upload.items() if key != "holds" or not self._keeps}
        if self._keeps:
            holds = {key: a for key, a in upload.items() if key not in sums}
            check_arrays(holds, {"holds": ("int64", ())})
        if self._due(server):
            super().check(self._code.checked(sums, params) if self.lam else sums, params, server)
        elif sums:
            raise ValueError(f"arrays {sorted(sums)}, expected 'holds' alone in this round")

    def addends(self, pid: int, delta: Arrays, upload: Slot, ctx: ServerContext) -> Slot:
        sums = {key: a for key, a in upload.items() if key != "holds"}
        holds = {f"holds.{pid}": upload["holds"]} if self._keeps else {}
        decoded = self._code.checked(sums, delta) if sums else {}
        return super().addends(pid, delta, decoded, ctx) | holds

    def update(self, server: Slot, delta: Arrays, uploads: Slot, ctx: ServerContext) -> ServerStep:
        sums = {key: a for key, a in uploads.items() if self.adds(key)}
        if self._keeps and not sums:
            said = {int(pid): made for pid, made in under(uploads, "holds.").items()}
            holders = {*np.asarray(server.get("holders", []), np.int64).tolist()} - said.keys()
            holders |= {pid for pid, made in said.items() if made == server["made"]}
            return {**server, "age": server["age"] + 1, "holders": np.array(sorted(holders))}, delta
        new, delta = super().update(server, delta, sums, ctx)
        if message := sums_of(new):
            notes = {key: a for key, a in new.items() if key not in message}
            tensors = {key: torch.from_numpy(np.asarray(a)) for key, a in message.items()}
            new = notes | {key: a.numpy() for key, a in self._code.encode(tensors).items()}
        if self._keeps:
            new |= {"age": np.asarray(1), "made": np.asarray(ctx.round)}
        return new, delta


def sums_of(slot: Slot) -> Slot:
    """Return the entries of a slot that are the sums, as they travel, and no note beside them."""
    return {key: a for key, a in slot.items() if key not in NOTES}


class EFL(MethodStrategy):
    """Elastic federated learning: the elastic term, compression both ways, scaled incomplete clients.

    Parameters
    ----------
    lam : float
        Strength λ of the elastic term.
    density_up, density_down : float, optional
        See :class:`SparseTernary`.
    sums_bits, sums_every, sums_density : int, int, float, optional
        See :class:`Elastic`. Without them, the elastic term's sums add twice the model's size each way
        (up only once without `density_up`), unless ``lam=0``, and undo what SparseTernary saves.
    fisher_samples, implicit : int, bool
        See :class:`Elastic`.
    incomplete : {"scale", "average", "drop"}
        See :class:`flwr_regs.RegStrategy`; the paper uses ``"scale"``.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(
        self,
        lam: float,
        density_up: float | None = None,
        density_down: float | None = None,
        fisher_samples: int | None = None,
        incomplete: str = "scale",
        *,
        implicit: bool = False,
        sums_bits: int | None = None,
        sums_every: int | None = None,
        sums_density: float | None = None,
        **kwargs: Any,
    ) -> None:
        elastic = Elastic(lam, fisher_samples, implicit, sums_bits, sums_every, sums_density)
        coded = SparseTernary(density_up, density_down)
        super().__init__([elastic, coded], incomplete=incomplete, **kwargs)


class EFLClient(MethodClient):
    """The client of :class:`EFL`."""

    terms = (Elastic, SparseTernary)
