"""The server: trains with any method of the package, and writes the history and the final model."""

from pathlib import Path
from tempfile import TemporaryFile

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from safetensors.torch import save_file
from task import build, strategy

from flwr_regs import JsonLines

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train as the run's config says."""
    config = context.run_config
    torch.set_num_threads(1)
    out, checkpoints = str(config["out"]), str(config["checkpoint-dir"])
    if config["resume"] and not checkpoints:
        raise ValueError("resume=true needs the checkpoint-dir of the run that ended")
    if out:  # a folder that cannot be written ends the run before it trains
        Path(out).mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=out).close()
    trained = strategy(
        str(config["method"]),
        seed=7,
        min_replies=int(config["min-replies"]),
        max_weight=float(config["max-weight"]),
        fraction_evaluate=float(config["fraction-evaluate"]),
        wait_timeout=float(config["wait-timeout"]),
        deadline=float(config["deadline"]) or None,
        on_round=JsonLines(Path(out, "history.jsonl")) if out else None,
        checkpoint_dir=checkpoints or None,
    )
    result = trained.start(
        grid=grid,
        initial_arrays=ArrayRecord(build().state_dict()),
        num_rounds=int(config["num-server-rounds"] or config["rounds"]),
        timeout=float(config["timeout"]),
        train_config=ConfigRecord(
            {
                "lr": float(config["learning-rate"] or config["lr"]),
                "local-epochs": int(config["local-epochs"]),
            }
        ),
        resume_from=checkpoints if config["resume"] else None,
    )
    if out:
        save_file(result.arrays.to_torch_state_dict(), Path(out, "model.safetensors"))
