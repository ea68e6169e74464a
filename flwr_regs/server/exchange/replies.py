"""Replies: each becomes a checked value, or a named failure of its client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from flwr_regs.abilities import Folds
from flwr_regs.chain import Chain
from flwr_regs.server.aggregate.aggregators import Mean
from flwr_regs.server.aggregate.weights import STEPS
from flwr_regs.server.client_metrics import read_metrics, usable
from flwr_regs.server.failures import Reasons, UnusableReplies, of_usable, read_each
from flwr_regs.server.global_model import GlobalModel
from flwr_regs.server.options import Options
from flwr_regs.server.round import UNDECIDED, Model, Replied, Reply, Round
from flwr_regs.term import Slot
from flwr_regs.wire import arrays as wire
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import LARGEST, NDArrays, ProtocolError, check_finite
from flwr_regs.wire.delta import decoded
from flwr_regs.wire.parcel import Parcel
from flwr_regs.wire.precision import Widened
from flwr_regs.wire.text import LONGEST_NAME, named, quoted, shown

SMALL = 2**16
"""The most entries of an update that is held once it is decoded."""
MOSTLY_ZERO = 32
"""One entry of an update in so many is not zero, at most, where only these are held."""


@dataclass(frozen=True)
class Reader:
    """Reads the replies to a round's train messages.

    Attributes
    ----------
    method : str
        The name that clients must report; a method of the server alone also takes clients that report none.
    options : Options
        Its terms check the uploads.
    model : GlobalModel
    """

    method: str
    options: Options
    model: GlobalModel
    _said: list[Any] = field(default_factory=list)
    """What the last client said it does not train, and `_parts` of it: most say the same."""

    def read_all(self, this_round: Round) -> None:
        """Check a round's replies one by one and against each other; note who failed, and why.

        What the clients agree on is noted in the model. Replies are read in the order of partition ids, so
        the order of arrival does not change the result.
        """
        read = partial(self.read, config=this_round.config)
        replies, failures = read_each(this_round.came, read)
        this_round.failures |= failures
        self.compare(this_round, replies)

    def compare(self, this_round: Round, replies: dict[int, Reply]) -> None:
        """Note those of a round's `replies`, in the order of partition ids, that fit each other."""
        model = self.model

        def leave_out(wrong: Mapping[int, str]) -> None:
            for pid, why in wrong.items():
                del replies[pid]
                this_round.failures[pid] = shown(why)

        def claims(what: Callable[[Reply], Hashable], known: Any) -> dict[int, Hashable]:
            said = {p: what(r) for p, r in replies.items()}
            halves = Counter(said.values()).most_common(2)
            if known is None and len(halves) == 2 and halves[0][1] == halves[1][1]:
                # averaging models that train different parameters would hide a mistake
                leave_out(dict.fromkeys(said, UNDECIDED))
                return {}
            return said

        buffers, odd = agreed(claims(lambda r: r.buffers, model.buffers), model.buffers)
        why = "client {} trains other parameters than the others, or than before; they differ in {}"
        leave_out({p: why.format(p, sorted(replies[p].buffers ^ buffers)) for p in odd})
        known = None if model.tied is None else frozenset(model.tied.items())
        tied, odd = agreed(claims(lambda r: frozenset(r.tied.items()), known), known)
        why = "client {} ties other weights than the others: {}, not {}"
        leave_out({p: why.format(p, dict(replies[p].tied), dict(sorted(tied))) for p in odd})
        frozen, odd = agreed(claims(lambda r: r.frozen, model.frozen), model.frozen)
        if model.frozen is not None:  # messages hold it: clients compare, and say nothing
            odd = [p for p in odd if replies[p].frozen]
        leave_out(dict.fromkeys(odd, wire.OTHER_FROZEN))
        active = {p: r.uploads for p, r in replies.items() if r.steps is None or r.steps[0]}
        leave_out(disagreeing(self.options.term, active))
        model.agree(buffers, None if tied is None else dict(sorted(tied)), frozen)
        leave_out(self._uncovered(replies))
        this_round.received = replies

    def _uncovered(self, replies: Replied) -> Reasons:
        """Return client -> why, for what neither noise nor a robust aggregator would reach."""
        term, model, private = self.options.term, self.model, self.options.privacy is not None
        if not private and isinstance(self.options.aggregator, Mean):
            return {}
        reached = {t.name for t in term.terms if term.aggregates(t) and not private}
        fixed = {*(model.buffers or ())} - {*(model.tied or ())} if private else set[str]()
        which = "get no noise" if private else "a robust aggregator does not reach"
        wrong: Reasons = {}
        for pid, reply in replies.items():
            sent = reply.arrays
            if changed := [n for n in fixed & {*sent} if np.any(sent[n] != model.given[n])]:
                wrong[pid] = f"it changed {changed}, which are not trained and would get no noise"
            if beyond := {n for n, a in reply.uploads.items() if a} - reached:
                wrong[pid] = f"it sends uploads of {named(beyond)} beside its update, which {which}"
        return wrong

    def read(self, pid: int, parcel: Parcel, config: Mapping[str, Any]) -> Reply:
        """Return a client's checked reply; `config` is the round's.

        Raises
        ------
        ProtocolError
            Another method's client, records missing, arrays that do not match the global model by name,
            shape or dtype, NaN or infinity, no positive number of examples, an upload that a term cannot
            use, or steps that the round did not ask for.
        """
        what = f"the reply of client {pid}"
        self._check_sender(what, parcel, config)
        metrics, count = read_metrics(pid, parcel, self.options.weighted_by_key)
        model, entries, half = self.model.model, parcel.config, self.options.wire_dtype
        sent: Model = parcel.records[keys.ARRAYS]
        arrays = Widened(sent, half) if half else sent
        try:
            uploads = read_uploads(what, parcel)
            buffers, tied, trained = self._parts(entries.get(keys.NOT_TRAINED_KEY))
            digest = entries.get(keys.FROZEN_DIGEST_KEY, "")
            if not isinstance(digest, str) or len(digest) > LONGEST_NAME:
                raise ProtocolError(f"'{keys.FROZEN_DIGEST_KEY}' is no digest: {quoted(digest)}")
            update: Model = {}
            coded, expected = None, model
            if keys.STEPS_KEY in entries:
                coded = self._decoder(entries[keys.STEPS_KEY], trained)
                update = parcel.decoded or coded()
                expected = {n: model[n] for n in arrays if n in buffers}
            steps = _steps(parcel, config, count)
            if steps is None and (setting := self.options.counts_steps):
                raise ProtocolError(f"it reports no steps, which {setting} needs; {STEPS}")
            if steps is None or steps[0]:
                self.options.term.check(uploads, trained, self.model.server)
        except (ValueError, TypeError, EOFError) as error:
            raise ProtocolError(f"{what} cannot be used: {error}") from error
        wire.check_arrays(arrays, expected, what, LARGEST)
        if half == "float16":  # Flower's own clients may send float32
            floats = {n: a for n, a in arrays.items() if a.dtype == np.float32}
            check_finite(floats, what, expected, 65504.0)
        if update:
            check_finite(update, what, largest=LARGEST)
        for t in self.options.term.able(Folds):
            if t.name in uploads:  # copied again when it is folded
                uploads[t.name] = dict(parcel.records[f"{t.name}.upload"])
        again = None if coded is None else held(update, coded)
        return Reply(arrays, uploads, metrics, count, {}, steps, buffers, tied, digest, again)

    def _parts(self, said: Any) -> tuple[frozenset[str], dict[str, str], NDArrays]:
        """Return (the arrays that a client does not train, its tied weights, the arrays that it trains)."""
        if not self._said or said != self._said[0]:
            model = self.model.model
            buffers, tied = wire.not_trained(said, model)
            trained = {n: a for n, a in model.items() if n not in buffers}
            self._said[:] = said, (buffers, tied, trained)
        return self._said[1]  # type: ignore[no-any-return]

    def _decoder(self, code: Any, names: Iterable[str]) -> Callable[[], NDArrays]:
        """Return what makes an update from its code."""
        coder = self.options.term.coder("finish")
        if coder is None or not isinstance(code, list) or len(code) != 1:
            has = "no code for updates" if coder is None else "one update in its code"
            where = f"'{keys.STEPS_KEY}' holds {quoted(code, 40)}"
            raise ProtocolError(f"{where}, but the method has {has}")
        like = wire.in_code_order(self.model.model, names)
        return partial(decoded, coder.decode, code[0], like, "its update")

    def _check_sender(self, what: str, parcel: Parcel, config: Mapping[str, Any]) -> None:
        """Raise ProtocolError for another method's client, another round's reply, or one without arrays."""
        plain = self.options.term.plain and keys.METHOD_KEY not in parcel.config
        if not plain and parcel.config.get(keys.METHOD_KEY) != self.method:
            sender = parcel.config.get(keys.METHOD_KEY, "one that names no method")
            sender = shown(sender if isinstance(sender, str) else quoted(sender), LONGEST_NAME)
            composed = {"+", "-"} & set(self.method)
            own = "" if composed else f"flwr_regs.{self.method}Client, or "
            wrong = f"{what} does not come from a {self.method} client but from {sender}"
            use = f"use {own}RegClient or ClientRound with the strategy's terms"
            raise ProtocolError(f"{wrong}; {use}")
        check_round(what, parcel, config)
        if keys.ARRAYS not in parcel.records:
            raise ProtocolError(f"{what} holds no ArrayRecord '{keys.ARRAYS}', only {parcel.names}")


def check_round(what: str, parcel: Parcel, config: Mapping[str, Any]) -> None:
    """Raise ProtocolError unless a reply names the training and the round of `config`, its message's.

    A client that names no method, such as Flower's own, need not name these either.
    """
    ours = keys.METHOD_KEY in parcel.config
    for key, whose in ((keys.START_KEY, "training"), (keys.ROUND_KEY, "round")):
        said, asked = parcel.config.get(key), config[key]
        if (said is not None or ours) and said != asked:
            which = f"{whose} {quoted(said, 40)}, not to {asked!r} ('{key}')"
            raise ProtocolError(f"{what} belongs to {which}")


def read_uploads(what: str, parcel: Parcel) -> Slot:
    """Return the terms' uploads by term name, as copies; raise ProtocolError unless all are finite."""
    uploads: Slot = {}
    for key, record in parcel.records.items():
        if key.endswith(".upload"):
            name = key.removesuffix(".upload")
            uploads[name] = {k: np.array(a) for k, a in record.items()}
            where = f"{what}, upload of '{shown(name, LONGEST_NAME)}'"
            check_finite(record, where, None, LARGEST)
    return uploads


def _steps(parcel: Parcel, config: Mapping[str, Any], count: float) -> tuple[int, int] | None:
    """Return ``s_k`` and E as the client reports them; raise ValueError unless the round allows them.

    None if the round asks for no duration, or for a client that names no method and reports none.
    """
    metrics: Any = parcel.metrics or {}
    taken, planned = metrics.get("local-steps"), metrics.get("planned-steps")
    asked, epochs = config.get("local-steps"), config.get("local-epochs", 0)
    silent = keys.METHOD_KEY not in parcel.config and (taken is None or planned is None)
    if silent or not (asked or epochs):
        return None
    examples = metrics.get("num-examples")  # the weight, `count`, may be another metric
    # a step is at least one example
    most = asked or epochs * (examples if usable(examples) else count)
    whole = type(taken) is int and type(planned) is int
    if not (whole and 0 <= taken <= planned <= most and planned >= max(asked or 0, 1)):
        said = f"{quoted(taken, 40)} local steps of {quoted(planned, 40)}"
        limit = asked or f"at most {most:.0f}"
        raise ValueError(f"{said}, where the round asked for {limit}")
    return taken, planned


def disagreeing(term: Chain, uploads: Mapping[int, Slot], probing: bool = False) -> Reasons:
    """Return why for uploads that do not fit the others', or that make `agree` raise."""

    def compared(pids: list[int]) -> Reasons:
        return term.agree({p: uploads[p] for p in pids}, probing)

    try:
        unlike = of_usable(uploads, compared, "its upload cannot be compared with the others'")
        return {pid: shown(why) for pid, why in unlike.items()}
    except UnusableReplies as error:
        others = {p: upload for p, upload in uploads.items() if p not in error.why}
        return error.why | disagreeing(term, others, probing)


def agreed(said: Mapping[int, Hashable], known: Any) -> tuple[Any, list[int]]:
    """Return (what most clients say, those that say otherwise); `known` is what earlier rounds agreed on.

    Of equally many, those with the lowest partition id are right.
    """
    if known is None and said:
        known, _ = Counter(said[pid] for pid in sorted(said)).most_common(1)[0]
    return known, [pid for pid, value in said.items() if value != known]


def output_layer(came: Mapping[int, Parcel]) -> str | dict[int, str] | None:
    """Return the output layer that the clients report, by partition id if they differ; None without."""
    said = {pid: came[pid].config.get(keys.LAYER_KEY) for pid in sorted(came)}
    named = {p: shown(name, LONGEST_NAME) for p, name in said.items() if isinstance(name, str)}
    if len(set(named.values())) > 1:
        return named
    return next(iter(named.values()), None)


def held(update: Model, decode: Callable[[], Model]) -> Callable[[], Model]:
    """Return what gives a decoded update again, but does not hold a large model's memory.

    A small update is held as it is; of one that is mostly zero the other entries are. Any other is decoded
    a second time.
    """
    size = sum(a.size for a in update.values())
    if size <= SMALL:
        return lambda: update
    if sum(int(np.count_nonzero(a)) for a in update.values()) * MOSTLY_ZERO > size:
        return decode
    places = {n: np.flatnonzero(a).astype(np.min_scalar_type(a.size)) for n, a in update.items()}
    entries = {n: (a.shape, places[n], a.reshape(-1)[places[n]]) for n, a in update.items()}
    return lambda: {n: _dense(*of_array) for n, of_array in entries.items()}


def _dense(shape: tuple[int, ...], places: np.ndarray, values: np.ndarray) -> np.ndarray:
    array = np.zeros(shape, values.dtype)
    array.reshape(-1)[places] = values
    return array
