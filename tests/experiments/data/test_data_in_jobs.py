"""Groups, augmentation and losses of a data set reach the clients and the server of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flwr_regs.experiments.data import datasets as data
from flwr_regs.experiments.models.quadratic import Quadratic
from flwr_regs.experiments.partition import client_data
from flwr_regs.experiments.partition.client_data import client_data_of
from flwr_regs.experiments.settings import Settings
from tests.experiments.data.sources import made
from tests.experiments.runs import examples_of

COMMON = {"methods": "FedAvg", "num-clients": 5, "partition": "iid"}


def test_a_client_tests_on_its_own_groups_and_classes(tmp_path: Path) -> None:
    made.digits_five(tmp_path)
    given = {"dataset": "digits-five", "data-dir": str(tmp_path), "test-on-clients": True}
    job = Settings.of({**COMMON, **given})
    whole = data.load(job.dataset, job.data_dir)
    assert whole.groups is not None
    assert whole.test_groups is not None
    for pid, rows in enumerate(client_data_of(job).parts):
        train, test = examples_of(job, pid)
        assert test is not None
        mine = np.isin(whole.test_groups, whole.groups[rows]) & np.isin(
            whole.test_y, whole.train_y[rows]
        )
        assert torch.equal(test.tensors[0], torch.from_numpy(whole.test_x[mine]))
        assert torch.equal(train.tensors[1], torch.from_numpy(whole.train_y[rows]))
        assert type(train) is torch.utils.data.TensorDataset  # nothing is augmented


def test_held_out_examples_and_clients_never_come_from_the_test_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each training input of this data set is even, each test input odd."""
    x = np.arange(200, dtype=np.float32)[:, None]
    whole = data.Data(x[::2], np.arange(100) % 2, x[1::2], np.arange(100) % 2)
    monkeypatch.setattr(client_data, "data_of", lambda _: whole)
    share = Settings.of({**COMMON, "held-out-share": 0.3})
    for pid in range(5):
        train, held_out = examples_of(share, pid)
        assert held_out is not None
        rows = [{*part.tensors[0][:, 0].tolist()} for part in (train, held_out)]
        assert not rows[0] & rows[1]
        assert {value % 2 for value in rows[0] | rows[1]} == {0}
    others = Settings.of({**COMMON, "held-out-clients": 2})
    shared = client_data_of(others)
    trained_on, rows = shared.server_rows()
    assert trained_on
    assert len(shared.parts) == 5
    assert sorted(np.concatenate([*shared.parts, rows])) == list(range(100))


def test_the_quadratics_have_their_own_model_and_loss() -> None:
    assert isinstance(flwr_regs_model("quadratics(dimension=3)"), Quadratic)
    job = Settings.of({**COMMON, "dataset": "quadratics(dimension=3)"})
    job.check()


def flwr_regs_model(dataset: str) -> Any:
    from flwr_regs.experiments.models import models

    return models.build(dataset, "auto", 1)


@pytest.mark.parametrize("wrong", ["synthetic(", "synthetic)", "synthetik(1)", "digits-five (1)"])
def test_a_setting_that_is_no_data_set_with_arguments_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="'dataset' must be one of digits, "):
        Settings.of({**COMMON, "dataset": wrong})
