"""What one client takes, measured: the resources to give each client in Flower's Ray simulation."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import torch

from flwr_regs.experiments.experiment import Run
from flwr_regs.experiments.run.estimate import try_out

MARGIN = 1.2
"""The memory that is asked for, over what was seen: an allocator's needs differ from round to round."""
STEPS = 100
"""A GPU's shares are rounded up to a multiple of 1 / STEPS."""


@dataclass(frozen=True)
class Taken:
    """What one client took.

    Attributes
    ----------
    seconds : float
        Of its second round.
    resident : int
        The most bytes that the process has had in memory, with torch and the data.
    gpu_used, gpu_total : int
        The most bytes in use on the GPU, with the process' CUDA context; the GPU's bytes. 0 without one.
    """

    seconds: float
    resident: int
    gpu_used: int = 0
    gpu_total: int = 0

    @property
    def gpus(self) -> float:
        """The share of a GPU to ask for: its memory with a margin, rounded up; 0 without a GPU."""
        if not self.gpu_total:
            return 0.0
        return min(math.ceil(STEPS * MARGIN * self.gpu_used / self.gpu_total) / STEPS, 1.0)

    def text(self, clients: int) -> str:
        """Return what was measured, and the option of ``flwr run`` for so many clients."""
        option = "client-resources-num-cpus=1"
        memory = "there is no CUDA GPU here, so none is asked for; memory bounds the clients"
        if self.gpu_total:
            used, total = self.gpu_used / 2**20, self.gpu_total / 2**20
            memory = (
                f"{used:,.0f} of the GPU's {total:,.0f} MiB, and a fifth more to be safe: "
                f"{int(1 / self.gpus)} clients at a time on a GPU"
            )
            option += f" client-resources-num-gpus={self.gpus:g}"
        return (
            f"one client: {self.seconds:.2g} s a round, {self.resident / 2**20:,.0f} MiB of memory "
            f"for its process\n{memory}\n"
            f'--federation-config "num-supernodes={clients} {option}"'
        )


def measure(run: Run) -> Taken:
    """Train one client of a run for two rounds, and return what it took.

    On a GPU, all that is in use there counts: measure where nothing else runs. Raises RuntimeError if the
    run would fail.
    """
    entry = try_out(run)
    spent = sum(entry["seconds"].get(name, 0.0) for name in ("clients", "probe"))
    return Taken(spent / len(entry["cohort"]), _resident(), *_gpu())


def _resident() -> int:
    """Return the most bytes that this process has had in memory; 0 where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _gpu() -> tuple[int, int]:
    """Return the most bytes in use on the GPU, and its bytes; (0, 0) without a CUDA GPU."""
    if not torch.cuda.is_available():
        return 0, 0
    free, total = torch.cuda.mem_get_info()
    given_back = torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()
    return total - free + given_back, total
