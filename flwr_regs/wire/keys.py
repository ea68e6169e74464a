"""The protocol: names of records, message types and config keys.

A train message holds the ArrayRecord ``"arrays"``, one ArrayRecord ``"<term>.broadcast"`` for each term
that has one, and the ConfigRecord ``"config"``. ``"arrays"`` is the global model; where the config says
``regs.downlink = "delta"`` it is the last global step, where it says ``"ternary"`` the changed buffers,
beside coded steps in ``regs.steps``, and where it says ``"kept"`` it is empty, the model having come with
the round's probe. Where it says ``regs.wire-dtype``, the float32 arrays that ``regs.halves`` masks, in
either direction, are in 16 bits (half.py). A reply holds ``"arrays"``, ``"<term>.upload"``, ``"metrics"``
(numbers) and ``"config"`` (``regs.method`` and other text); a coded update is in ``regs.update``, beside
only the buffers that changed in ``"arrays"``.

A ``NumPyClient`` sees the same values in its `config` and returns them in fit's metrics, arrays
packed as safetensors bytes. Nothing is pickled. This file imports no torch: it is loaded in every
ClientApp process, before the user's `client_fn` runs.
"""

from __future__ import annotations

PROTOCOL = 3
"""Version of the layout above; a client refuses any other."""

ARRAYS = "arrays"
CONFIG = "config"
METRICS = "metrics"
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
PRIVATE_KEY = "regs.private.client"
FRESH_KEY = "regs.private-anew"
PENDING_KEY = "regs.pending.client"
USED_KEY = "regs.used-round"
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
STEP_KEY = "regs.step"
ROUND_KEY = "server-round"
LABELS_KEY = "regs.label-counts"
