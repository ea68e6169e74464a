"""What one client takes, measured: the resources to give each client in Flower's Ray simulation."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace

import torch
from flwr.app import ArrayRecord, ConfigRecord

from flwr_regs import StackedGrid
from flwr_regs.experiments.experiment import Run
from flwr_regs.experiments.partition.client_data import client_data_of
from flwr_regs.experiments.run.clients import ClientFactory
from flwr_regs.experiments.run.estimate import try_out
from flwr_regs.experiments.run.process_state import quiet, threads

MARGIN = 1.2
"""The memory that is asked for, over what was seen: an allocator's needs differ from round to round."""
ROUNDS = 4
"""Of a stack, with and without ``torch.compile``."""
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
    compiling : str
        What ``StackedGrid(compile=True)`` gains a cohort of the run.
    """

    seconds: float
    resident: int
    gpu_used: int = 0
    gpu_total: int = 0
    compiling: str = ""

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
            + (f"\n{self.compiling}" if self.compiling else "")
        )


def measure(run: Run) -> Taken:
    """Train one client of a run for two rounds, and return what it took.

    On a GPU, all that is in use there counts: measure where nothing else runs. Raises RuntimeError if the
    run would fail.
    """
    entry = try_out(run)
    spent = sum(entry["seconds"].get(name, 0.0) for name in ("clients", "probe"))
    return Taken(spent / len(entry["cohort"]), _resident(), *_gpu(), compiling(run))


def compiling(run: Run) -> str:
    """Return from how many rounds on ``StackedGrid(compile=True)`` pays for a run, as measured."""
    plain, compiled = (_stacked(run, compile=way) for way in (False, True))
    if plain is None or compiled is None:
        return "in a stack: clients of this run train one by one"
    (first, *later), (first_compiled, *later_compiled) = plain, compiled
    before, after = min(later), min(later_compiled)
    text = f"a cohort in a stack: {before:.2g} s a round, {after:.2g} s with compile=True"
    if after >= before:
        return f"{text}, which does not pay"
    rounds = max(math.ceil((first_compiled - first) / (before - after)), 1)
    return f"{text}, which pays from {rounds} rounds on"


def _stacked(run: Run, compile: bool) -> list[float] | None:
    """Return the seconds of some rounds in a stack; None if its clients train one by one."""
    settings = replace(run.settings, rounds=ROUNDS, drop_out=0.0)
    factory = ClientFactory(replace(run, settings=settings), client_data_of(settings))
    strategy = factory.run.strategy()
    strategy.fraction_evaluate = 0.0
    grid = StackedGrid(factory.app(), settings.num_clients, check=False, compile=compile)
    with quiet(), threads(1), torch.random.fork_rng(devices=[]):
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(factory.new_model().state_dict()),
            num_rounds=ROUNDS,
            train_config=ConfigRecord(settings.train_config),
        )
    return None if grid.fallbacks else [e["seconds"]["clients"] for e in strategy.history]


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
