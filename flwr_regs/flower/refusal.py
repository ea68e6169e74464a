"""The refusal of another strategy's message: a reply that ends the server's run, and says why.

Flower's own strategies leave out clients that reply with an error. If all do, the run "completes" with the
initial model. So a client that needs a strategy of this package replies with an array that nobody can read:
a header of numpy's format that holds the reason. Flower then raises ``ValueError: Cannot parse header:
'refused by the client: ...'`` where it averages. Its strategies of the Message API check the metrics of
evaluations; there the reply holds none, which Flower also takes for an error.
"""

from __future__ import annotations

import struct
from logging import ERROR

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log

from flwr_regs.wire import keys

LONGEST = 2000
"""Characters of a reason: numpy prints no longer header."""


def unreadable(why: str) -> bytes:
    """Return an array's bytes with `why` in place of shape and dtype; numpy's error then shows it."""
    header = f"refused by the client: {why[:LONGEST]}".encode()
    return b"\x93NUMPY\x03\x00" + struct.pack("<I", len(header)) + header


def refusal(message: Message, why: str, older: bool) -> Message:
    """Return the reply to a train or evaluate message that ends the server's run with `why`.

    `older` is whether the message has the layout of Flower's older server.
    """
    log(ERROR, "%s", why)
    array = ArrayRecord({"refused": Array("float32", (0,), "numpy.ndarray", unreadable(why))})
    training = message.metadata.message_type.split(".")[0] == "train"
    if older and training:
        content = RecordDict(
            {
                "fitres.parameters": array,
                "fitres.num_examples": MetricRecord({"num_examples": 1}),
                "fitres.metrics": ConfigRecord({keys.REFUSED_KEY: why}),
                "fitres.status": ConfigRecord({"code": 0, "message": ""}),
            }
        )
    elif training:
        metrics = MetricRecord({"num-examples": 1})
        content = RecordDict({keys.ARRAYS: array, keys.METRICS: metrics})
    else:
        content = RecordDict({keys.CONFIG: ConfigRecord({keys.REFUSED_KEY: why})})
    return Message(content, reply_to=message)
