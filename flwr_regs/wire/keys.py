"""The protocol: names of records, message types and config keys. docs/protocol.md is its specification.

A train message holds the ArrayRecord ``"arrays"``, one ArrayRecord ``"<term>.broadcast"`` for each term
that has one, and the ConfigRecord ``"config"``. A reply holds ``"arrays"``, ``"<term>.upload"``,
``"metrics"`` (numbers) and ``"config"``. ``"arrays"`` is a model, if no key says otherwise:

- ``regs.downlink`` says what a message holds of the model; a client that gets it keeps the model;
- ``regs.steps`` holds steps in the method's code; ``"arrays"`` then holds the buffers that changed. Down,
  these are the last global steps; up, it is the client's update;
- with ``regs.wire-dtype``, float32 arrays have 16 bits (precision.py).

Nothing is pickled. This file imports no torch: it is loaded in every ClientApp process, before the user's
`client_fn` runs.
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

PROTOCOL_KEY = "regs.protocol"
FLOWER_KEY = "regs.flower"
METHOD_KEY = "regs.method"
START_KEY = "regs.start"
ROUND_KEY = "server-round"
CLIENT_KEY = "regs.partition"
SEED_KEY = "regs.seed"
PROBE_KEY = "regs.probe"
PREVIOUS_LR_KEY = "regs.previous-lr"
INCOMPLETE_KEY = "regs.incomplete"
BESIDE_KEY = "regs.beside"
WAITING_KEY = "regs.waiting"
DOWNLINK_KEY = "regs.downlink"
DIGEST_KEY = "regs.digest"
STEPS_KEY = "regs.steps"
HALF_KEY = "regs.wire-dtype"
NOT_TRAINED_KEY = "regs.not-trained"
FROZEN_DIGEST_KEY = "regs.frozen-digest"
SNAPSHOTS_KEY = "regs.snapshots"
MEMORY_KEY = "regs.memory"
LAYER_KEY = "regs.output-layer"
LABELS_KEY = "regs.label-counts"
NAMES_KEY = "regs.names"

KEEPS_STATE, KEEPS_PRIVATE = "keeps state", "keeps private"
LOST_STATE, LOST_PRIVATE, LOST_MODEL = "lost state", "lost private", "lost model"
NOT_SAVED = "not saved"
LOSS_ROSE = "loss rose"
"""What a client says of its memory, and of its local steps, in ``regs.memory``."""


def stand_in(node: int) -> int:
    """Return what stands in for the partition id of a node that has none: half of node ids are larger."""
    return node % 2**63


def is_start(value: object) -> bool:
    """Return whether a value can identify a training: up to 64 hexadecimal digits, a safe file name."""
    digits = set("0123456789abcdef")
    return isinstance(value, str) and 0 < len(value) <= 64 and set(value) <= digits
