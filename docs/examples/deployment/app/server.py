"""The server: trains with any method of the package, and writes the history and the final model."""

import json
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from safetensors.torch import save_file

from task import build, strategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train as the run's config says."""
    config = context.run_config
    torch.set_num_threads(1)
    folder = str(config["checkpoint-dir"])
    trained = strategy(
        str(config["method"]),
        seed=7,
        min_replies=int(config["min-replies"]),
        fraction_evaluate=float(config["fraction-evaluate"]),
        deadline=float(config["deadline"]) or None,
        checkpoint_dir=folder or None,
    )
    arrays: dict[str, Any] = {}
    try:
        result = trained.start(
            grid=grid,
            initial_arrays=ArrayRecord(build().state_dict()),
            num_rounds=int(config["rounds"]),
            train_config=ConfigRecord(
                {"lr": float(config["lr"]), "local-epochs": int(config["local-epochs"])}
            ),
            resume_from=folder if config["resume"] else None,
        )
        arrays = result.arrays.to_torch_state_dict()
    finally:  # a run that fails leaves its history too
        if config["out"]:
            out = Path(str(config["out"]))
            out.mkdir(parents=True, exist_ok=True)
            (out / "history.json").write_text(json.dumps(trained.history))
            if arrays:
                save_file(arrays, out / "model.safetensors")
