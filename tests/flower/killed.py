"""One run in a process of its own: ``python -m tests.flower.killed METHOD OUT [FOLDER [resume | MARKER]]``.

The model and the history are written to OUT. With a FOLDER, checkpoints are saved there; with ``resume``,
the run goes on from there. With a MARKER, the second client of round 3 makes that file and waits.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord
from safetensors.numpy import save_file
from torch import nn

import flwr_regs as fr
from flwr_regs.wire.records import from_record

METHODS: dict[str, tuple[Any, Any]] = {
    "FedADC": (lambda **s: fr.FedADC(0.9, downlink="delta", **s), fr.FedADCClient),
    "EFL": (lambda **s: fr.EFL(0.1, density_up=0.2, density_down=0.2, **s), fr.EFLClient),
    "FedCurv": (lambda **s: fr.FedCurv(0.5, **s), fr.FedCurvClient),
    "FedBN": (fr.FedBN, fr.FedBNClient),
    "RFedAvg": (lambda **s: fr.RFedAvg(0.5, **s), fr.RFedAvgClient),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def main(name: str, out: str, folder: str = "", how: str = "") -> None:
    torch.set_num_threads(1)
    strategy, client = METHODS[name]
    marker = Path(how) if how not in ("", "resume") else None

    def client_fn(context: Any) -> Any:
        k = int(context.node_config["partition-id"])
        g = torch.Generator().manual_seed(k)
        x, y = (
            torch.randn(12 + 4 * k, 6, generator=g),
            torch.randint(0, 3, (12 + 4 * k,), generator=g),
        )
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(x, y), batch_size=4, shuffle=True
        )
        made = client(model(), loader, loader, device="cpu")
        fit = made.fit

        def waiting(parameters: Any, config: Any) -> Any:
            if marker is not None and (config["server-round"], k) == (3, 1):
                marker.touch()
                time.sleep(600)
            return fit(parameters, config)

        made.fit = waiting
        return made

    run = strategy(seed=5, fraction_evaluate=0.5, checkpoint_dir=folder or None)
    run.start(
        fr.InProcessGrid(fr.client_app(client_fn), 3),
        ArrayRecord(model().state_dict()),
        num_rounds=5,
        train_config=ConfigRecord({"lr": 0.1, "local-epochs": 2}),
        resume_from=folder if how == "resume" else None,
    )
    save_file(from_record(run.arrays), out)
    history = [{k: v for k, v in entry.items() if k != "seconds"} for entry in run.history]
    Path(out).with_suffix(".json").write_text(json.dumps(history))


if __name__ == "__main__":
    main(*sys.argv[1:])
