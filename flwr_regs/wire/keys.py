"""The protocol: names of records, message types and config keys.

A train message holds the ArrayRecord ``"arrays"``, one ArrayRecord ``"<term>.broadcast"`` for each term
that has one, and the ConfigRecord ``"config"``. What ``"arrays"`` holds depends on ``regs.downlink``:

- no entry: the global model;
- ``"delta"``: the last global step;
- ``"coded"``: the buffers that changed; ``regs.steps`` holds the steps in the method's code;
- ``"kept"``: nothing, because the client got the model with the round's probe.

Parameters that no client trains may be missing from the global model: clients hold them. A client sends
their digest, ``regs.frozen-digest``, with its reply. Once clients have agreed on one, messages hold it, and
a client with another digest refuses them.

With ``regs.wire-dtype``, the float32 arrays that ``regs.halves`` marks have 16 bits, in both directions
(precision.py). A reply holds ``"arrays"``, ``"<term>.upload"``, ``"metrics"`` (numbers) and ``"config"``
(``regs.method`` and other text). With a coded update in ``regs.update``, its ``"arrays"`` are only the
buffers that changed.

A ``NumPyClient`` gets the same values in its `config` and returns them in fit's metrics, with arrays
packed as safetensors bytes. Nothing is pickled. This file imports no torch: it is loaded in every
ClientApp process, before the user's `client_fn` runs.
"""

from __future__ import annotations

PROTOCOL = 4
"""Version of the layout above; a client refuses any other."""

ARRAYS = "arrays"
CONFIG = "config"
METRICS = "metrics"
STEP = "step"
MODEL = "model"
MEMORY = "memory"
IDENTIFY = "query.flwr_regs"
LABELS = "query.flwr_regs_labels"
PREFETCH = "query.flwr_regs_prefetch"
PROBE = "query.flwr_regs_probe"

METHOD_KEY = "regs.method"
PROTOCOL_KEY = "regs.protocol"
START_KEY = "regs.start"
SEED_KEY = "regs.seed"
NAMES_KEY = "regs.names"
BUFFERS_KEY = "regs.not-trainable"
TIED_KEY = "regs.tied"
HALF_KEY = "regs.wire-dtype"
HALVES_KEY = "regs.halves"
SENT_KEY = "regs.sent"
REFUSED_KEY = "regs.refused"
UNSAVED_KEY = "regs.not-saved"
USED_KEY = "regs.used"
CAME_KEY = "regs.came"
KEEPS_KEY = "regs.keeps"
FROZEN_DIGEST_KEY = "regs.frozen-digest"
LAYER_KEY = "regs.output-layer"
LOST_KEY = "regs.lost"
INCOMPLETE_KEY = "regs.incomplete"
BESIDE_KEY = "regs.beside"
UPDATE_KEY = "regs.update"
STEPS_KEY = "regs.steps"
DOWNLINK_KEY = "regs.downlink"
KEEP_KEY = "regs.keep-model"
BASE_ROUND_KEY = "regs.base-round"
DIGEST_KEY = "regs.digest"
PREVIOUS_LR_KEY = "regs.previous-lr"
PROBE_KEY = "regs.probe"
CLIENT_KEY = "regs.partition"
OUT_OF_SYNC_KEY = "regs.out-of-sync"
ROUND_KEY = "server-round"
LABELS_KEY = "regs.label-counts"


def is_start(value: object) -> bool:
    """Return whether a value can identify a training: up to 64 hexadecimal digits, a safe file name."""
    digits = set("0123456789abcdef")
    return isinstance(value, str) and 0 < len(value) <= 64 and set(value) <= digits
