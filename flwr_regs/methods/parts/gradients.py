"""Gradients that a client uploads: one array for each trained parameter."""

from __future__ import annotations

from flwr_regs.term import Arrays, Slot


def check_like(params: Arrays, upload: Slot) -> None:
    """Raise ValueError unless `upload` has an array of floats for each parameter, of its shape."""
    if upload.keys() != params.keys():
        raise ValueError(f"arrays {sorted(upload)}, expected {sorted(params)}")
    for n, p in params.items():
        if upload[n].shape != p.shape or upload[n].dtype.kind != "f":
            found = f"{upload[n].dtype} {upload[n].shape}"
            raise ValueError(f"'{n}' is {found}, expected floats {p.shape}")
