"""Messages as plain values: what of them is recorded, stored and compared.

The file holds one message a line, after the name of its scenario: ``xzcat`` shows it. Structure is compared
exactly: names, dtypes, shapes, keys, types, texts, whole numbers. The order of arrays and keys has no
meaning. Floating-point values may differ by what another version of torch makes of them, and what follows
from their bits (digests) by anything of the same length.
"""

import json
import lzma
import re
import struct
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict

from flwr_regs.wire import keys

FILE = Path(__file__).with_name("messages.jsonl.xz")
ROUNDING, RTOL, ATOL = 6, 1e-3, 1e-5
HALVES = ("float16", "uint16")
"""Dtypes in which values that were rounded travel; they may differ by one unit."""


def of_message(message: Message, direction: str) -> dict[str, Any]:
    """Return a message as plain values; `direction` is "to" or "from" the client."""
    node = message.metadata.dst_node_id if direction == "to" else message.metadata.src_node_id
    head: dict[str, Any] = {"type": message.metadata.message_type, direction: node - 1000}
    if message.has_error():
        why = re.sub(r" \(/.*, line \d+\)", " (file, line)", str(message.error.reason))
        return {**head, "error": message.error.code, "why": why}
    return {**head, "content": _content(message.content)}


def _content(content: RecordDict) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in sorted(content):
        record: Any = content[name]
        if isinstance(record, ArrayRecord):
            out[name] = {n: _array(record[n].numpy()) for n in sorted(record)}
        else:
            kind = type(record).__name__
            said = sorted(key for key in record if key != keys.FLOWER_KEY)  # of this environment
            out[name] = {kind: {key: _value(key, record[key]) for key in said}}
    return out


def _array(array: np.ndarray) -> list[Any]:
    kind = f"{array.dtype}{list(array.shape)}"
    return [kind, *(_value("", v) for v in array.reshape(-1).tolist())]


def _value(key: str, value: Any) -> Any:
    if key == keys.START_KEY:
        return "random: 8 hexadecimal digits"
    if key == keys.DIGEST_KEY:
        return "of bits: 16 hexadecimal digits"
    if isinstance(value, bytes):
        return _code(value) if value.startswith(b"STC") else {"bytes": value.hex()}
    if isinstance(value, list):
        return [_value("", v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.{ROUNDING}g}")
    return value


def _code(data: bytes) -> dict[str, Any]:
    """Return a sparse ternary message, as in ternary.py. Its CRC follows from the rest."""
    _, version, n, plus, minus, mu, words, _ = struct.unpack("<3sBQQQdQI", data[:48])
    head = {"version": version, "n": n, "plus": plus, "minus": minus, "words": words}
    return {"STC": head, "mu": _value("", mu), "body": data[48:].hex()}


def write(runs: Mapping[str, list[dict[str, Any]]]) -> None:
    """Store the messages of some scenarios in place of theirs."""
    lines = [
        json.dumps([name, message], separators=(",", ":")) + "\n"
        for name, messages in sorted({**stored(), **runs}.items())
        for message in messages
    ]
    FILE.write_bytes(lzma.compress("".join(lines).encode(), preset=9 | lzma.PRESET_EXTREME))
    stored.cache_clear()


@cache
def stored() -> dict[str, list[Any]]:
    """Return the stored messages of each scenario."""
    runs: dict[str, list[Any]] = {}
    for line in lzma.decompress(FILE.read_bytes()).decode().splitlines():
        name, message = json.loads(line)
        runs.setdefault(name, []).append(message)
    return runs


def differences(found: Any, golden: Any, at: str = "") -> Iterator[str]:
    """Yield where two nests of plain values differ."""
    if type(found) is not type(golden):
        yield f"{at}: {found!r:.80}, expected {golden!r:.80}"
    elif isinstance(golden, Mapping):
        if list(found) != list(golden):
            yield f"{at}: {list(found)}, expected {list(golden)}"
            return
        for key in golden:
            yield from differences(found[key], golden[key], f"{at}/{key}")
    elif isinstance(golden, list):
        if len(found) != len(golden):
            yield f"{at}: {len(found)} entries, expected {len(golden)}"
            return
        rounded = bool(golden) and str(golden[0]).startswith(HALVES)
        for i, (a, b) in enumerate(zip(found, golden, strict=True)):
            if not (rounded and isinstance(b, int | float) and abs(a - b) <= max(1, ATOL)):
                yield from differences(a, b, f"{at}[{i}]")
    elif isinstance(golden, float):
        if not abs(found - golden) <= ATOL + RTOL * abs(golden):
            yield f"{at}: {found}, expected {golden}"
    elif found != golden:
        yield f"{at}: {found!r:.80}, expected {golden!r:.80}"
