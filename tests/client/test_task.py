"""Batches as pairs, outputs, the model's own loss, coded steps: what is found, and what is refused."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_sequence

from flwr_regs.chain import chain
from flwr_regs.client.local_training import LocalTraining, local_round
from flwr_regs.client.member import model_of
from flwr_regs.client.train.batches import Pairs, batch_size, label_counts, to_device
from flwr_regs.client.train.task import Task
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import ProtocolError
from flwr_regs.wire.parcel import Parcel
from tests.conftest import close, make_clients, make_model
from tests.flower.clients.test_own_loop import plain_loop
from tests.methods.test_kinds import Halves, as_dicts

CPU = torch.device("cpu")


def test_a_mapping_without_clear_targets_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\['x', 'label'\] has no entry .*'digit'"):
        next(iter(Pairs([{"x": 1, "label": 2}], "digit")))
    with pytest.raises(ValueError, match=r"\['label'\] has no inputs"):
        next(iter(Pairs([{"label": 2}])))


def test_targets_of_no_batch_and_labels_of_no_class_are_refused() -> None:
    with pytest.raises(TypeError, match="so it is one example: give the loader a batch_size"):
        batch_size(torch.tensor(1))
    fields = [torch.zeros(4, 2), torch.zeros(4)]
    boxes = [{"id": torch.tensor(n), "boxes": torch.zeros(n, 4)} for n in (7, 3)]
    sequences = [torch.zeros(5), torch.zeros(6)]
    nested = [{"a": fields[0]}, {"b": fields[1]}]
    each = map(batch_size, (fields, nested, boxes, tuple(boxes), sequences))
    assert [*each] == [4, 4, 2, 2, 2]
    with pytest.raises(ValueError, match="labels from 0 on, but there is -2"):
        label_counts(Pairs([(torch.ones(2, 3), torch.tensor([0, -2]))]))
    with pytest.raises(ValueError, match="the client has no training data"):
        label_counts(Pairs([]))


def test_a_dict_within_a_pair_is_one_argument() -> None:
    class Takes(nn.Module):
        def forward(self, inputs: dict[str, Any]) -> torch.Tensor:
            return inputs["a"]  # type: ignore[no-any-return]

    inputs, targets = next(iter(Pairs([({"a": torch.ones(2, 3)}, torch.zeros(2))])))
    assert torch.equal(Task().output(Takes(), inputs, targets), torch.ones(2, 3))
    packed = to_device(pack_sequence([torch.ones(2), torch.ones(1)]), CPU)
    assert packed.batch_sizes.tolist() == [2, 1]


def test_a_loop_of_ones_own_gets_pairs_and_keywords() -> None:
    model, other = Halves(), make_model()
    pairs = make_clients()[0]
    data = as_dicts("left", "right", "label")(pairs)
    training = LocalTraining(model, chain([]), data, lr=0.1, epochs=2, device="cpu")
    plain_loop(training, lambda inputs: model(**inputs), torch.optim.SGD)  # type: ignore[arg-type]
    got = training.finish()
    want = local_round(other, chain([]), pairs, lr=0.1, epochs=2, device="cpu")
    assert (got.num_examples, got.loss) == (want.num_examples, want.loss)
    close(got.state, want.state, 0.0)


def test_the_whole_output_goes_to_the_loss_if_output_fn_says_so() -> None:
    class Both(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return (super().forward(x), x)

    def loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(output[0], targets) + output[1].sum()

    task = Task(loss, output_fn=lambda output: output)
    x, y = make_clients()[0][0]
    output = task.output(Both(4, 3, dtype=torch.float64), x, y)
    assert task.loss(output, y) > x.sum()


def test_coded_steps_without_a_code_are_refused() -> None:
    message = Parcel({keys.ARRAYS: {}}, {keys.STEPS_KEY: [b"code"]})
    with pytest.raises(ProtocolError, match="sends coded steps, but this method has no code for"):
        model_of(message, make_model(), chain([]))
