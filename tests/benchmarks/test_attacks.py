"""The study of hostile clients: its attacks are attacks."""

import numpy as np
import pytest

from benchmarks import attacks


def test_a_flipped_update_is_turned_round_and_longer() -> None:
    rng, base = np.random.default_rng(1), np.array([1.0, 2.0])
    changed = attacks.changed("flip", "w", np.array([1.5, 1.75]), base, rng)
    np.testing.assert_allclose(changed - base, [-5.0, 2.5])
    noise = attacks.changed("noise", "U.w", np.full(1000, 0.1), 0.0, rng)
    assert (noise >= 0).all()
    assert np.sqrt(np.mean(noise**2)) == pytest.approx(1.0, rel=0.1)


def test_labels_are_flipped_for_the_hostile_clients_alone() -> None:
    seed = attacks.SEEDS[0]
    liars = attacks.hostile(seed)
    honest, flipped = attacks.loaders(seed, set()), attacks.loaders(seed, liars)
    for k in range(attacks.CLIENTS):
        true, told = honest[k].dataset.tensors[1], flipped[k].dataset.tensors[1]  # type: ignore[attr-defined]
        assert bool((true == (9 - told if k in liars else told)).all())
