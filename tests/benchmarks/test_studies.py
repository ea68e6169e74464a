"""The studies train with the package."""

from dataclasses import replace

from benchmarks import common

TINY = common.Setting("tiny", "digits", 2, 0.1, cohort=2, dirichlet=0, rounds=common.LAST)


def test_a_run_trains_with_the_package_and_one_that_diverges_says_so() -> None:
    good = common.train(common.Run(TINY, "FedFOR", {}, tuning=True))
    assert 0 < good["accuracy"] <= 1
    assert not good["diverged"]
    again = common.train(common.Run(TINY, "FedFOR", {}, tuning=True))
    assert again["accuracy"] == good["accuracy"]
    strong = replace(TINY, steps=30)
    bad = common.train(common.Run(strong, "FedProx", {"mu": 1e4}))
    assert (bad["accuracy"], bad["diverged"], bad["refused"]) == (None, True, 2)
    fine = common.train(common.Run(strong, "FedProx", {"mu": 1e4, "implicit": True}))
    assert not fine["diverged"]
