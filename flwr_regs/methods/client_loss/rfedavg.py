"""rFedAvg and rFedAvg+: a regulariser that pulls the clients' feature distributions together.

φ is the input of the output layer, ``δ^k`` the mean of φ over client k's data, ``φ̄`` its mean over the
batch. Local loss: ``CE + λ r_k``.

**rFedAvg** (Alg. 1)

| *Init*       an empty table
| *Broadcast*  ``w_t`` and the table of the δ seen so far (N × d)
| *Step*       ``r_k = 1/(N−1) Σ_{j≠k} ‖φ̄ − δ^j‖²``, over the others in the table; no term while it is empty
| *Upload*     ``v_k`` and ``δ^k``, computed with ``v_k``
| *Update*     as FedAvg; each upload replaces its client's row

**rFedAvg+** (Alg. 2), two exchanges per round

| *Probe*      down: ``w_t``; up: ``δ^k``, computed with ``w_t``
| *Broadcast*  ``δ̄^{−k}``, the mean over the other clients of the cohort; the model is not sent again
| *Step*       ``r_k = ‖φ̄ − δ̄^{−k}‖²``
| *Upload*     ``v_k``
| *Update*     as FedAvg

The paper leaves four points open. N is the size of the cohort (rFedAvg+), or the number of clients seen
so far (rFedAvg). A client alone in its cohort has no term. δ is computed in eval mode over all the local
data or, as an option, over its first batches. Alg. 1 begins with some δ_0; our table begins empty.

Under a robust aggregator, each client gets the aggregate of the others' δ in place of their mean (rFedAvg+)
or of the table (rFedAvg), whose gradient is that of the distance to the table's mean. While rFedAvg's table
has too few rows for the aggregator, there is no term.

Privacy (Sec. VI-B8): δ is clipped to norm C, and noise ``N(0, σ² C² / L²)`` is added, L the batch size. The
noise is drawn from the operating system's entropy, never from the run's seed, which the server knows. So
runs with noise do not repeat to the bit.

Source: Wang, Tong, Zhou, Zhang, Pan, Fan, Yang, "Distribution-regularized federated learning on
non-IID data" (2023), Alg. 1-2, Eq. 5, Sec. IV-C, VI-B8. Alg. 1 prints ``w_{cE}`` as the model for δ. The
text says the client's own model after its local steps, and we follow the text. Secs. IV-B and V-A print r_k
without the ``1/(N−1)`` of Eq. 5 and Sec. IV-C.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from flwr_regs.abilities import Addresses, Agrees, Checks, Probes
from flwr_regs.hook_contexts import Arrays, ClientContext, ServerContext, ServerStep, Slot
from flwr_regs.methods.parts.method import MethodClient, MethodStrategy
from flwr_regs.methods.parts.once import LOG, log_once
from flwr_regs.methods.parts.uploads import check_arrays, unlike_most
from flwr_regs.server.aggregate.aggregators import TooFewVectors
from flwr_regs.term import COUNT, NOT_NEGATIVE, POSITIVE, SWITCH, Ranges, Term

__all__ = [
    "FeatureTable",
    "LeaveOneOutMean",
    "RFedAvg",
    "RFedAvgClient",
    "RFedAvgPlus",
    "RFedAvgPlusClient",
]


NOBODY = -2
"""The id of a row of the table that is no single client's; -1 is that of a client without one."""


class _Means(Term, Checks, Agrees):
    """The part that both terms share: the upload is one δ, as long as the others'."""

    needs = ("features",)

    def check(self, upload: Slot, params: Arrays, server: Slot) -> None:
        size = np.size(upload.get("delta", ()))
        check_arrays(upload, {"delta": ("floats", (size,))})
        seen = [row.size for row in server.values()]
        if not size or (len(seen) > 1 and size != seen[0]):  # a single one may be the wrong one
            expected = f"{seen[0]} as before" if seen else "at least 1"
            raise ValueError(f"'delta' has {size} entries, expected {expected}")

    def agree(self, uploads: Mapping[int, Slot]) -> dict[int, str]:
        sizes = {pid: u["delta"].size for pid, u in uploads.items()}
        return unlike_most(sizes, "'delta' has {} entries", int)


@dataclass(frozen=True)
class FeatureTable(_Means, Addresses):
    """rFedAvg's regulariser: distance to the table of all clients' δ (Alg. 1).

    Parameters
    ----------
    lam : float
        Strength λ ≥ 0; 0 is FedAvg.
    delta_batches : int, optional
        Compute δ over this many batches instead of the whole local data.
    """

    name: ClassVar[str] = "rfedavg"
    robust: ClassVar[bool] = True
    keeps_delta: ClassVar[bool] = True
    excludes: ClassVar[tuple[str, ...]] = ("rfedavg-plus",)
    ranges: ClassVar[Ranges] = {"lam": NOT_NEGATIVE, "delta_batches": COUNT}
    lam: float
    delta_batches: int | None = None

    def broadcast(self, server: Slot, ctx: ServerContext) -> Slot:
        if not server or ctx.robust:
            return {}
        ids = sorted(server, key=int)
        return {"ids": np.array([int(i) for i in ids]), "table": np.stack([server[i] for i in ids])}

    def broadcast_to(self, pid: int, server: Slot, ctx: ServerContext) -> Slot:
        others = {int(i): {"delta": row} for i, row in server.items() if int(i) != pid}
        if not others or not ctx.robust:
            return {}
        try:
            centre = ctx.aggregated(dict(sorted(others.items())))["delta"]
        except TooFewVectors as error:
            LOG.warning("'%s' has no term yet: %s", self.name, error)
            return {}
        return {"ids": np.array([NOBODY]), "table": centre[None]}

    def loss(self, base: Any, params: Arrays, ctx: ClientContext) -> Any:
        table = ctx.broadcast.get("table", [None])
        if not _fits(table[0], self.name, ctx):
            return base
        distances = ((ctx.features.mean(0) - table) ** 2).sum(-1)  # ‖φ̄ − δ^j‖²
        others = (ctx.broadcast["ids"] != ctx.client_id).to(distances.dtype)
        return base + self.lam * (distances * others).sum() / others.sum().clamp(min=1)

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        end = {n: ctx.start[n] + d for n, d in delta.items()}  # v_k: the model may still be shifted
        return delta, {"delta": ctx.mean_features(end, self.delta_batches)}, {}

    def update(self, server: Slot, delta: Arrays, uploads: Any, ctx: ServerContext) -> ServerStep:
        new = {str(pid): u["delta"] for pid, u in uploads.items()}
        sizes = {d.shape for d in new.values()}  # one: they agree; a row of another shape was wrong
        kept = {pid: d for pid, d in server.items() if not sizes or d.shape in sizes}
        return {**kept, **new}, delta


@dataclass(frozen=True)
class LeaveOneOutMean(_Means, Probes):
    """rFedAvg+'s regulariser: distance to the mean of the other clients' δ (Alg. 2).

    Parameters
    ----------
    lam : float
        Strength λ ≥ 0; 0 is FedAvg.
    noise_std : float
        σ of the Gaussian noise on δ; needs `clip_norm`.
    clip_norm : float, optional
        The norm C to which δ is clipped.
    sum_only : bool
        The server uses only the sum of the δ, and each client subtracts its own. A secure
        aggregation protocol would reveal only this sum. The trained weights are the same up to rounding.
    delta_batches : int, optional
        Compute δ over this many batches instead of the whole local data.
    """

    name: ClassVar[str] = "rfedavg-plus"
    ranges: ClassVar[Ranges] = {
        "lam": NOT_NEGATIVE,
        "noise_std": NOT_NEGATIVE,
        "clip_norm": POSITIVE,
        "sum_only": SWITCH,
        "delta_batches": COUNT,
    }
    lam: float
    noise_std: float = 0.0
    clip_norm: float | None = None
    sum_only: bool = False
    delta_batches: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_std > 0 and self.clip_norm is None:
            raise ValueError("noise_std without clip_norm protects nothing: give both")

    @property
    def robust(self) -> bool:
        return not self.sum_only  # no aggregator sees the single δ behind a sum

    def probe(self, ctx: ClientContext) -> tuple[Slot, Slot]:
        d = ctx.mean_features(ctx.start, self.delta_batches)  # δ^k with w_t
        if self.clip_norm is not None:
            d = d * torch.clamp(self.clip_norm / d.norm().clamp(min=1e-12), max=1.0)
            if self.noise_std > 0:
                generator = torch.Generator().manual_seed(secrets.randbits(63))
                noise = torch.randn(d.shape, generator=generator, dtype=d.dtype, device="cpu")
                d = d + self.noise_std * self.clip_norm / ctx.batch_size * noise.to(d.device)
        return {"delta": d}, {"delta": d} if self.sum_only else {}

    def answer(self, probes: Mapping[int, Slot]) -> dict[int, Slot]:
        if len(probes) < 2:
            return {pid: {} for pid in probes}
        total = sum(p["delta"] for p in probes.values())
        others = len(probes) - 1
        if self.sum_only:
            shared = {"sum": total, "others": np.asarray(others)}
            return dict.fromkeys(probes, shared)
        return {pid: {"mean": (total - p["delta"]) / others} for pid, p in probes.items()}

    def answer_in(self, probes: Mapping[int, Slot], ctx: ServerContext) -> dict[int, Slot]:
        if len(probes) < 2 or not ctx.robust:
            return self.answer(probes)
        others = {pid: {p: slot for p, slot in probes.items() if p != pid} for pid in probes}
        return {pid: {"mean": ctx.aggregated(rest)["delta"]} for pid, rest in others.items()}

    def loss(self, base: Any, params: Arrays, ctx: ClientContext) -> Any:
        target = ctx.broadcast.get("mean")  # δ̄^{−k}
        if "sum" in ctx.broadcast:
            if "delta" not in ctx.client:
                raise ValueError("this client has lost its own δ between the round's two exchanges")
            target = (ctx.broadcast["sum"] - ctx.client["delta"]) / ctx.broadcast["others"]
        if not _fits(target, self.name, ctx):
            return base
        return base + self.lam * ((ctx.features.mean(0) - target) ** 2).sum()


def _fits(target: Any, name: str, ctx: ClientContext) -> bool:
    """Whether there is a δ of others, as long as this client's features; logs once that it is not.

    Torch would spread a δ of length 1 over all features.
    """
    if target is None or target.shape == ctx.features[0].shape:
        return target is not None
    text = (
        f"the others' δ have {target.numel()} entries, but this model has {ctx.features[0].numel()} "
        f"features: it trains without the regulariser of '{name}' until they fit"
    )
    log_once(text, name, ctx)
    return False


class RFedAvg(MethodStrategy):
    """FedAvg with rFedAvg's regulariser; the table of δ grows with the number of clients.

    Parameters
    ----------
    lam : float
        Strength λ; the paper's 1e-4 has little effect on MNIST.
    delta_batches : int, optional
        Compute δ over this many batches instead of the whole local data.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(self, lam: float, delta_batches: int | None = None, **kwargs: Any) -> None:
        super().__init__([FeatureTable(lam, delta_batches)], **kwargs)


class RFedAvgClient(MethodClient):
    """The client of :class:`RFedAvg`."""

    terms = (FeatureTable,)


class RFedAvgPlus(MethodStrategy):
    """FedAvg with rFedAvg+'s regulariser: a second, small exchange per round, constant in N.

    Parameters are those of :class:`LeaveOneOutMean`; `**kwargs` as for
    :class:`flwr_regs.RegStrategy`.
    """

    def __init__(
        self,
        lam: float,
        noise_std: float = 0.0,
        clip_norm: float | None = None,
        *,
        sum_only: bool = False,
        delta_batches: int | None = None,
        **kwargs: Any,
    ) -> None:
        term = LeaveOneOutMean(lam, noise_std, clip_norm, sum_only, delta_batches)
        super().__init__([term], **kwargs)


class RFedAvgPlusClient(MethodClient):
    """The client of :class:`RFedAvgPlus`."""

    terms = (LeaveOneOutMean,)
