"""The client base: one round of :func:`flwr_regs.local_round.local_round` behind a NumPyClient."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.client import NumPyClient
from torch import nn

from flwr_regs.batches import (
    Batches,
    batch_size,
    count_batches,
    count_examples,
    label_counts,
    resolve_device,
    to_device,
)
from flwr_regs.chain import Chain, chain
from flwr_regs.classifier import find_classifier
from flwr_regs.codec import decode, encode
from flwr_regs.features import FeatureTap
from flwr_regs.flower import wire
from flwr_regs.local_round import LossFn, OptimizerFn, local_round
from flwr_regs.method import ClientContext, Slot, Term

NDArrayList = list[Any]


class RegClient(NumPyClient):
    """A client for any list of terms; the named clients are this with their terms filled in.

    Every hyper-parameter of the method arrives with the round's config; none is given here.

    Parameters
    ----------
    model : nn.Module
        The architecture; its weights are replaced by the global model's, by name, each round. It may hold
        bfloat16 if the strategy has ``wire_dtype="bfloat16"``.
    train_data, eval_data : iterable of (inputs, targets)
        Batches, such as a DataLoader; both can be iterated again and again. `eval_data` may be left
        out where the strategy does not evaluate on clients (``fraction_evaluate=0``).
    loss_fn : callable
        ``loss_fn(output, targets) -> scalar``, a mean over the batch.
    optimizer : callable
        ``optimizer(params, lr=lr)``; use ``functools.partial`` for more, e.g. weight decay.
    device : str or torch.device
        ``"auto"``: the accelerator if there is one, else the CPU.
    classifier : str, optional
        Name of the output layer, for methods that look at features (default: the last ``nn.Linear``).
    share_label_counts : bool
        Tell a strategy with class-covering cohorts, when it asks, how many examples of each class the
        training data holds. That is information about the data: off by default.
    step_budget, time_budget : int, float, optional
        The most local steps, and seconds of training, that this client spends on a round. It stops early
        and says so; with 0 steps it is inactive. What the strategy makes of that is its `incomplete`.
    terms : sequence of Term classes
        Only for a composition of your own, in the strategy's order; the named clients fix it.
    """

    method: ClassVar[str | None] = None
    terms: Sequence[type[Term]] = ()

    def __init__(
        self,
        model: nn.Module,
        train_data: Batches,
        eval_data: Batches | None = None,
        *,
        loss_fn: LossFn = nn.functional.cross_entropy,
        optimizer: OptimizerFn = torch.optim.SGD,
        device: str | torch.device = "auto",
        classifier: str | None = None,
        share_label_counts: bool = False,
        step_budget: int | None = None,
        time_budget: float | None = None,
        terms: Sequence[type[Term]] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        if terms is not None:
            if self.method is not None:
                raise TypeError(
                    f"{type(self).__name__} has its own terms; use RegClient for a list"
                )
            self.terms = tuple(terms)
        for name, budget in (("step_budget", step_budget), ("time_budget", time_budget)):
            if budget is not None and not budget >= 0:
                raise ValueError(f"{name} must be at least 0 or None, not {budget}")
        if step_budget is not None and not isinstance(step_budget, int):
            raise TypeError(f"step_budget must be a whole number, not {step_budget}")
        if classifier is not None or any(t.needs_features for t in self.terms):
            find_classifier(
                model, classifier
            )  # refuses here, before any round, what it cannot find
        self.model = model
        self.train_data = train_data
        self.eval_data = eval_data
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.device = device
        self.classifier = classifier
        self.share_label_counts = share_label_counts
        self.step_budget = step_budget
        self.time_budget = time_budget

    def get_parameters(self, config: Mapping[str, Any]) -> NDArrayList:
        """Return the model's ``state_dict`` values as numpy arrays."""
        return [_numpy(v).copy() for v in self.model.state_dict().values()]

    def fit(
        self, parameters: NDArrayList, config: Mapping[str, Any]
    ) -> tuple[NDArrayList, int, dict[str, Any]]:
        """Train for one round from the global model.

        Returns the local model in the order of `parameters`, ``n_k``, and metrics (mean training
        loss, steps taken and planned, examples processed) beside the terms' packed uploads and client
        slots. Where the update is ternary, it is in the metrics, coded, and only buffers that have
        changed are returned.

        Raises
        ------
        ProtocolError
            The strategy is for another method or protocol version, or arrays do not fit the model.
        ValueError
            The config lacks a key, holds an unknown one, or there is no training data.
        """
        term = self._receive_method(config)
        private = self._private(term)
        names = self._load(parameters, config, private)
        step = config.get(wire.STEP_KEY)
        if step is not None:
            mine = {n for n, p in self.model.named_parameters() if p.requires_grad}
            steps = {k: torch.from_numpy(a) for k, a in wire.unpack(step).items() if k in mine}
            recovered = term.recover(steps, config[wire.PREVIOUS_LR_KEY]) or {}
            broadcast = {**recovered, **self._slots(config, "broadcast")}
        else:
            broadcast = self._slots(config, "broadcast")
        device = resolve_device(self.device)
        if config.get(wire.PROBE_KEY):
            return self._probe(term, config, device)
        kept = self._slots(config, "client")
        if any(term.ternary):
            self._take_back(term, config, kept)
        with self._seeded(config, device):
            result = local_round(
                self.model,
                term,
                self.train_data,
                lr=config["lr"],
                epochs=config.get("local-epochs"),
                steps=config.get("local-steps"),
                loss_fn=self.loss_fn,
                optimizer=self.optimizer,
                device=device,
                broadcast=broadcast,
                client=kept,
                classifier=self.classifier,
                client_id=config.get(wire.CLIENT_KEY, -1),
                max_steps=self.step_budget,
                max_seconds=self.time_budget,
            )
        trainable = {n for n, p in self.model.named_parameters() if p.requires_grad}
        tied = {n: first for n, first in self._tied(private).items() if first in trainable}
        buffers = [n for n in names if n not in trainable]
        metrics: dict[str, Any] = {
            wire.METHOD_KEY: self._method_name(),
            wire.BUFFERS_KEY: wire.mask(buffers, names),
            "train-loss": result.loss,
            "local-steps": result.num_steps,
            "planned-steps": result.planned_steps,
            "examples-processed": result.examples_processed,
        }
        metrics |= _packed(result.upload, "upload") | _packed(result.client, "client")
        if tied:
            metrics[wire.TIED_KEY] = json.dumps(tied)
        if private:
            metrics[wire.PRIVATE_KEY] = wire.pack({n: _numpy(result.state[n]) for n in private})
        sent = names
        given = dict(zip(names, parameters, strict=True))
        if term.ternary[0]:
            own = [n for n in buffers if n not in tied]
            sent = [n for n in own if not np.array_equal(result.state[n].numpy(), given[n])]
            delta = {n: d.numpy() for n, d in result.delta.items()}
            coded = encode(wire.in_code_order(delta, delta))
            metrics |= {wire.SENT_KEY: json.dumps(sent), wire.UPDATE_KEY: coded}
            if result.num_steps:
                pending = {"update": np.frombuffer(coded, np.uint8)}
                pending["round"] = np.asarray(config[wire.ROUND_KEY])
                metrics[wire.PENDING_KEY] = wire.pack(pending)
        arrays = [_numpy(result.state[n]).astype(given[n].dtype, copy=False) for n in sent]
        return arrays, result.num_examples, metrics

    def _tied(self, private: Sequence[str]) -> dict[str, str]:
        """Return the shared parameters that go by several names, other name -> first name.

        Raises ValueError if one name is private and another is not.
        """
        first: dict[int, str] = {}
        named = self.model.named_parameters(remove_duplicate=False)
        pairs = {n: first.setdefault(id(p), n) for n, p in named}
        if split := [(n, f) for n, f in pairs.items() if (n in private) != (f in private)]:
            raise ValueError(
                f"the tied weights {split[0]} are one parameter, but only one of the two names is "
                "private; name both, or neither"
            )
        return {n: f for n, f in pairs.items() if n != f and n not in private}

    def _take_back(self, term: Chain, config: Mapping[str, Any], kept: Slot) -> None:
        """Put the last update back into the residual in `kept` if the server did not use it."""
        if wire.PENDING_KEY not in config or not term.ternary[0]:
            return
        pending = wire.unpack(config[wire.PENDING_KEY])
        if int(pending["round"]) == config.get(wire.USED_KEY):
            return
        (name,) = (t.name for t in term.terms if t.ternary[0])
        residual = kept[name]
        like = {n: r.numpy() for n, r in residual.items()}
        update = decode(pending["update"].tobytes(), wire.in_code_order(like, like))
        kept[name] = {n: r + torch.from_numpy(update[n]) for n, r in residual.items()}

    def _probe(
        self, term: Chain, config: Mapping[str, Any], device: torch.device
    ) -> tuple[NDArrayList, int, dict[str, Any]]:
        """Answer the round's first exchange: the terms' probes at ``w_t``, and no model."""
        count_batches(self.train_data)  # refuses a client without data
        self.model.to(device)
        params = {n: p.detach() for n, p in self.model.named_parameters() if p.requires_grad}
        tap = FeatureTap(self.model, self.classifier)
        with torch.random.fork_rng(devices=[]):
            _, targets = next(iter(self.train_data))
        upload, kept = term.probe(
            ClientContext(
                start=params,
                lr=config["lr"],
                num_steps=0,
                client=to_device(self._slots(config, "client"), device),
                feature_mean=partial(tap.mean, self.train_data, device),
                client_id=config.get(wire.CLIENT_KEY, -1),
                batch_size=batch_size(targets),
            )
        )
        tap.close()
        metrics: dict[str, Any] = {wire.METHOD_KEY: self._method_name()}
        metrics |= _packed(to_device(upload, "cpu"), "upload")
        metrics |= _packed(to_device(kept, "cpu"), "client")
        return [], count_examples(self.train_data), metrics

    def evaluate(
        self, parameters: NDArrayList, config: Mapping[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        """Return (mean loss, examples, metrics) on `eval_data`.

        The metrics hold ``"accuracy"``, the share of correct arg-max, where the task is classification.
        Where the config says ``"personalise"``, also the loss and accuracy of a personalised model:
        see :mod:`flwr_regs.methods.calibration`.
        """
        if self.eval_data is None:
            raise ValueError(
                f"{type(self).__name__} was built without eval_data; "
                "pass it, or set fraction_evaluate=0 on the strategy"
            )
        own = [k for k in config if not k.startswith("regs.")]
        ours = config.get(wire.METHOD_KEY) == self._method_name()
        term = chain([t.from_config(config) for t in self.terms] if ours else [])
        known = [*wire.EVALUATE_KEYS, *wire.FLOWER_KEYS, *term.config()]
        wire.check_config_keys(own, known, "evaluate_config")
        wire.check_evaluate_config(config, "evaluate_config")
        self._load(parameters, config, self._private(term))
        device = resolve_device(self.device)
        loss, count, metrics = self._score(self.model, device)
        if "personalise" in config:
            from flwr_regs.methods.calibration import calibrate  # it needs this file

            with self._seeded(config, device):
                personal = calibrate(
                    self.model,
                    self.train_data,
                    config,
                    classifier=self.classifier,
                    loss_fn=self.loss_fn,
                    optimizer=self.optimizer,
                    device=device,
                )
            personal_loss, _, personal_metrics = self._score(personal, device)
            metrics["personal-loss"] = personal_loss
            metrics |= {f"personal-{k}": v for k, v in personal_metrics.items()}
        return loss, count, metrics

    @torch.no_grad()
    def _score(self, model: nn.Module, device: torch.device) -> tuple[float, int, dict[str, float]]:
        """Return (mean loss, examples, accuracy) of a model on `eval_data`.

        Accuracy is there only for classification: outputs ``(n, classes)``, integer targets ``(n,)``.
        """
        model.to(device).eval()
        loss, correct, count, classifies = 0.0, 0, 0, True
        for inputs, targets in self.eval_data or ():
            targets = to_device(targets, device)
            output = model(to_device(inputs, device))
            size = batch_size(targets)
            loss += float(self.loss_fn(output, targets)) * size
            count += size
            classifies &= (
                isinstance(output, torch.Tensor)
                and isinstance(targets, torch.Tensor)
                and output.ndim == 2
                and output.shape[1] > 1
                and targets.ndim == 1
                and not targets.is_floating_point()
            )
            if classifies:
                correct += int((output.argmax(dim=1) == targets).sum())
        if count == 0:
            raise ValueError("the client has no evaluation data: eval_data holds no batch")
        return loss / count, count, {"accuracy": correct / count} if classifies else {}

    def get_properties(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the label counts, if asked for them and built with ``share_label_counts=True``."""
        if not config.get(wire.LABELS_KEY):
            return {}
        if not self.share_label_counts:
            raise PermissionError(
                f"{type(self).__name__} does not share its label counts; build it with "
                "share_label_counts=True, or the strategy with cohorts='uniform'"
            )
        return {wire.LABELS_KEY: json.dumps(label_counts(self.train_data).tolist())}

    @contextlib.contextmanager
    def _seeded(self, config: Mapping[str, Any], device: torch.device) -> Iterator[None]:
        """Seed torch for this client and round; leave the process's own random state as it was.

        Shuffling, dropout and whatever else draws from torch then depend on (seed, round, partition)
        alone; data that draws from numpy or `random` must seed these itself.
        """
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(config[wire.SEED_KEY])
            yield

    def _method_name(self) -> str:
        return self.method or "+".join(t.name for t in self.terms)

    def _receive_method(self, config: Mapping[str, Any]) -> Chain:
        """Check that the config speaks of this client's method; return it with its parameters."""
        me = f"this client is {type(self).__name__} ({self._method_name()})"
        if wire.METHOD_KEY not in config:
            raise wire.ProtocolError(
                f"{me}, but the strategy named no method; use flwr_regs.{self.method or 'RegStrategy'}"
            )
        if config[wire.METHOD_KEY] != self._method_name():
            raise wire.ProtocolError(
                f"{me}, but the strategy runs '{config[wire.METHOD_KEY]}'; "
                "the strategy and the client must be of the same method"
            )
        if config.get(wire.PROTOCOL_KEY) != wire.PROTOCOL:
            raise wire.ProtocolError(
                f"{me} and speaks protocol {wire.PROTOCOL}, but the strategy speaks "
                f"{config.get(wire.PROTOCOL_KEY)}; install the same flwr-regs version on both sides"
            )
        term = chain([t.from_config(config) for t in self.terms])
        known = [*wire.TRAIN_KEYS, *wire.FLOWER_KEYS, *term.config()]
        known += [f"{t.name}.{slot}" for t in term.terms for slot in ("broadcast", "client")]
        own = [k for k in config if not k.startswith("regs.")]
        wire.check_config_keys(own, known, "train_config")
        wire.check_train_config(config, "train_config")
        return term

    def _slots(self, config: Mapping[str, Any], slot: str) -> Slot:
        return {
            t.name: {
                k: torch.from_numpy(a) for k, a in wire.unpack(config[f"{t.name}.{slot}"]).items()
            }
            for t in self.terms
            if f"{t.name}.{slot}" in config
        }

    def _private(self, term: Chain) -> list[str]:
        """Return the entries of the model that stay here, in its order."""
        private = term.private(list(self.model.state_dict()))
        return [n for n in self.model.state_dict() if n in private]

    def _load(
        self, parameters: NDArrayList, config: Mapping[str, Any], private: Sequence[str]
    ) -> list[str]:
        """Load the global model by name, and what is private as this client left it.

        Returns the names in the order of `parameters`.
        """
        if wire.NAMES_KEY not in config:
            raise wire.ProtocolError(
                "the config does not name the arrays: build the ClientApp with "
                "flwr_regs.client_app(client_fn), not with flwr's ClientApp(client_fn)"
            )
        names: list[str] = json.loads(config[wire.NAMES_KEY])
        arrays = {
            n: torch.from_numpy(np.asarray(a)) for n, a in zip(names, parameters, strict=True)
        }
        state = self.model.state_dict()
        shared = {n: v for n, v in state.items() if n not in private}
        arrays = _as_held(arrays, shared, config.get(wire.HALF_KEY))
        wire.check_arrays(arrays, shared, "the global model")
        for name, first in self._tied(private).items():
            if not torch.equal(arrays[name], arrays[first]):
                raise wire.ProtocolError(
                    f"the global model: '{name}' and '{first}' are one parameter here, but differ"
                )
        mine = {n: state[n] for n in private}
        if wire.PRIVATE_KEY in config:
            kept = wire.unpack(config[wire.PRIVATE_KEY])
            mine = _as_held({n: torch.from_numpy(a) for n, a in kept.items()}, mine, "bfloat16")
            wire.check_arrays(mine, {n: state[n] for n in private}, "this client's private entries")
        self.model.load_state_dict({**arrays, **mine})
        return names


def _packed(slots: Slot, slot: str) -> dict[str, bytes]:
    """Pack the terms' slots as they travel: ``"<term>.<slot>" -> bytes``; empty ones do not."""
    return {
        f"{name}.{slot}": wire.pack({k: _numpy(a) for k, a in arrays.items()})
        for name, arrays in slots.items()
        if arrays
    }


def _numpy(value: Any) -> np.ndarray:
    """Return a tensor as an array; bfloat16, which numpy lacks, as float32, which holds its values."""
    tensor = torch.as_tensor(value).detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _as_held(
    arrays: dict[str, torch.Tensor], held: Mapping[str, torch.Tensor], half: str | None
) -> dict[str, torch.Tensor]:
    """Return float32 arrays that came in the half precision in which the model holds them, in that.

    Their values are the same. Raises ProtocolError for a bfloat16 model where nothing comes so.
    """
    if half != "bfloat16" and (found := [n for n, v in held.items() if v.dtype == torch.bfloat16]):
        raise wire.ProtocolError(
            f"this client's model holds bfloat16 in {found}, which travels only if the strategy has "
            f"wire_dtype='bfloat16', not {half!r} (and then initial_arrays in float32)"
        )
    own = getattr(torch, half) if half else None
    return {
        n: a.to(own) if a.dtype == torch.float32 and n in held and held[n].dtype == own else a
        for n, a in arrays.items()
    }
