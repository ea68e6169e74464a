"""Flower Datasets' partitioners as partitions of a comparison."""

import numpy as np
import pytest
from datasets import Dataset
from flwr_datasets.partitioner import DirichletPartitioner

from flwr_regs.experiments.partition.partitions import partition

LABELS = np.random.default_rng(0).integers(0, 5, 400)


def test_the_parts_are_those_of_the_partitioner_and_hold_every_example_once() -> None:
    parts = partition(LABELS, "fds:DirichletPartitioner(alpha=0.5)", 4, seed=3)
    theirs = DirichletPartitioner(num_partitions=4, partition_by="label", alpha=0.5, seed=3)
    theirs.dataset = Dataset.from_dict({"row": np.arange(400), "label": LABELS})
    assert [p.tolist() for p in parts] == [theirs.load_partition(k)["row"][:] for k in range(4)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(400))
    other = partition(LABELS, "fds:DirichletPartitioner(alpha=0.5)", 4, seed=4)
    assert [len(p) for p in other] != [len(p) for p in parts]


def test_a_natural_partitioner_goes_by_the_groups() -> None:
    groups = LABELS[::-1].copy()
    kind = "fds:NaturalIdPartitioner(partition_by='group')"
    parts = partition(LABELS, kind, 5, seed=0, groups=groups)
    assert all(len({*groups[rows]}) == 1 for rows in parts)
    with pytest.raises(ValueError, match=r"makes 5 parts, not one for each of 4 clients"):
        partition(LABELS, kind, 4, seed=0, groups=groups)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("fds:Dirichlet(alpha=1)", r"no Dirichlet; did you mean 'DirichletPartitioner'"),
        ("fds:DirichletPartitioner(beta=1)", r"argument 'beta'; it takes num_partitions"),
        ("fds:DirichletPartitioner(alpha=0.5, min_partition_size=300)", "fds:DirichletPartitioner"),
    ],
)
def test_what_is_wrong_is_said(kind: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        partition(LABELS, kind, 4, seed=0)
