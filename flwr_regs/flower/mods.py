"""Guards around Flower's privacy mods: only train messages, and only methods that a mod can protect.

The mods do not check a message's type, so evaluation would fail. They protect only the model. Other
arrays (a term's upload, a probe) would fail after the client has trained; a coded update, in a config,
would pass unseen. Loaded in every ClientApp process: no torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flwr.app import ConfigRecord, Context, Error, Message
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod

from flwr_regs.flower.compat import ClientAppCallable, ErrorCode, Mod
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import statistics


def guarded(mods: Sequence[Mod]) -> list[Mod]:
    """Return `mods`, with a guard around each of Flower's three privacy mods.

    Raises
    ------
    TypeError
        A privacy mod of ``flwr.client.mod``, which reads an older message layout.
    """
    for mod in mods:
        home = getattr(mod, "__module__", None) or type(mod).__module__
        if home.startswith("flwr.client.mod"):
            older = f"{_name(mod)} of flwr.client.mod reads an older message layout"
            raise TypeError(f"{older}; use the one of flwr.clientapp.mod")
    private = (fixedclipping_mod, adaptiveclipping_mod)
    return [_guard(m) if m in private or isinstance(m, LocalDpMod) else m for m in mods]


def _guard(mod: Mod) -> Mod:
    def guard(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        def refuse(why: str) -> Message:
            why = f"{_name(mod)} does not go with {why}"
            return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, why), reply_to=message)

        message_type = message.metadata.message_type
        if message_type == keys.PROBE:
            return refuse("a method that asks clients a question before they train (RFedAvgPlus)")
        if message_type.split(".")[0] != "train":
            return call_next(message, context)
        content = message.content
        config: Any = content.config_records.get(keys.CONFIG, ConfigRecord())
        if beside := config.get(keys.BESIDE_KEY):
            return refuse(
                f"'{beside}', which needs more of a client than its update: that stays unprotected"
            )
        if running := statistics(content.array_records.get(keys.ARRAYS) or ()):
            return refuse(
                f"BatchNorm's statistics {running}, which noise would ruin: use GroupNorm, or FedBN, "
                "which keeps them here"
            )

        def checked(message: Message, context: Context) -> Message:
            reply = call_next(message, context)
            if reply.has_error():
                return reply
            entries: Any = reply.content.config_records.get(keys.CONFIG, ConfigRecord())
            more = sorted(set(reply.content.array_records) - {keys.ARRAYS})
            more += [keys.STEPS_KEY] * (keys.STEPS_KEY in entries)
            sends = f"a client that sends {more} beside its model: that stays unprotected"
            return refuse(sends) if more else reply

        return mod(message, context, checked)

    return guard


def _name(mod: Any) -> str:
    return str(getattr(mod, "__name__", type(mod).__name__))
