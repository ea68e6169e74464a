"""What differs between clients and rounds beyond the split: domains, noise, and data that shifts.

All of it follows from (seed, client, round) alone, so that any process can repeat it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flwr_regs.experiments.extras import needed

Array = np.ndarray[Any, Any]

DOMAINS = ("as is", "inverted", "over natural patches", "rotated", "blurred and downsampled")
"""Five domains of one data set: covariate shift with unchanged labels."""
# Tags that separate these draws from each other, and from others that begin with the seed.
_NOISE, _SAMPLE, _SWAP, _HELD_OUT = 11, 12, 13, 14


def in_domain(x: Array, domain: int, seed: int) -> Array:
    """Return grey images, float32 in [0, 1], ``(n, 1, side, side)``, transformed to one of the `DOMAINS`.

    *over natural patches*: the absolute difference to a random crop of scikit-learn's two photographs
    (as in MNIST-M, Ganin et al. 2016); *rotated*: by a quarter turn; *blurred and downsampled*: by a
    Gaussian of one pixel, then to half the resolution and back. `seed` draws the crops.
    """
    side = x.shape[-1]
    if domain == 1:
        x = 1 - x
    if domain == 2:
        datasets = needed("sklearn.datasets", "scikit-learn", "the natural patches")
        images = datasets.load_sample_images().images
        photos = [photo.mean(axis=2, dtype=np.float32) / 255 for photo in images]
        rng, patches = np.random.default_rng(seed), np.empty((len(x), 1, side, side), np.float32)
        for patch in patches:
            photo = photos[rng.integers(len(photos))]
            top, left = (int(rng.integers(edge - side + 1)) for edge in photo.shape)
            patch[0] = photo[top : top + side, left : left + side]
        x = abs(patches - x)
    if domain == 3:
        x = np.rot90(x, axes=(2, 3))
    if domain == 4:
        import torch
        from torchvision.transforms.functional import gaussian_blur

        blurred = gaussian_blur(torch.from_numpy(x), [5, 5], [1.0, 1.0])
        half = torch.nn.functional.interpolate(blurred, size=side // 2, mode="area")
        x = torch.nn.functional.interpolate(half, size=side, mode="nearest").numpy()
    return np.ascontiguousarray(x, dtype=np.float32)


def noisy(x: Array, client: int, num_clients: int, level: float, seed: int, part: int = 0) -> Array:
    """Return inputs plus the client's Gaussian noise, in their own dtype and in their own units.

    The variance of client k's is σ·(k + 1)/N, clients counted from 0. NIID-Bench (Li et al. 2022):
    ``Gau(σ·i/N)`` for party i of N, counted from 1, "a Gaussian distribution with mean 0 and variance
    σ·i/N". Its code takes σ·(i − 1)/(N − 1) as the standard deviation, and draws anew whenever an example
    is read; its paper does not, and nor does this.

    Parameters
    ----------
    x : array of floats, ``(n, ...)``
    client, num_clients, level : int, int, float
        k, N and σ.
    seed, part : int
        They draw the noise, with the client; `part` tells a client's test inputs (1) from its training
        inputs (0).

    Raises ValueError if the inputs are no floats.
    """
    if x.dtype.kind != "f":
        raise ValueError(f"noise is added to inputs of floats, not of {x.dtype}")
    rng = np.random.default_rng((seed, client, part, _NOISE))
    deviation = np.sqrt(level * (client + 1) / num_clients)
    noise = deviation * rng.standard_normal(x.shape, np.float32)
    return np.asarray(x + noise, x.dtype)


def long_tail(
    labels: Array, client: int, server_round: int, seed: int, *, share: float, ratio: float
) -> Array:
    """Return the examples that a client has in a round of FedFOR's prior shift (Sec. 4.2).

    A `share` of all examples at random, the client's own in this round, then trimmed to a long tail (Cao et
    al. 2019): the classes in random order, of which number i of C keeps ``ratio^(−i/(C − 1))`` of what it
    has, rounded to nearest, at least one example. So the first keeps all of its examples and the last a
    `ratio`-th. Rounds are counted from 1; round 0, where a client is asked before training, is as round 1.

    Returns indices into `labels`, int64.
    """
    rng = np.random.default_rng((seed, client, max(server_round, 1), _SAMPLE))
    count = max(1, round(share * len(labels)))
    rows = rng.permutation(len(labels))[:count]
    classes = rng.permutation(np.unique(labels))
    kept = []
    for i, label in enumerate(classes):
        of_label = rows[labels[rows] == label]
        part = ratio ** (-i / max(len(classes) - 1, 1))
        kept.append(of_label[: max(1, round(part * len(of_label)))])
    return np.concatenate(kept)


def swapped(num_classes: int, server_round: int, seed: int, probability: float) -> Array:
    """Return the label that each class has in a round of FedFOR's concept shift (Sec. 4.4), ``(C,)``.

    At the start of each round, with the given probability, two random classes swap their labels, for all
    clients and the test data alike. A swap stays until later ones move the labels on. Before round 1 each
    class has its own. The paper says that a class's label "will change to a different one"; here the two
    swap, so that every label stays in use.
    """
    labels = np.arange(num_classes)
    for t in range(1, server_round + 1):
        rng = np.random.default_rng((seed, t, _SWAP))
        if rng.random() < probability and num_classes > 1:
            a, b = rng.choice(num_classes, 2, replace=False)
            labels[[a, b]] = labels[[b, a]]
    return labels


def held_out(rows: Array, share: float, seed: int) -> Array:
    """Return which of `rows` are held out: by the example itself, so the same in every round and client.

    Where clients draw from all examples anew in each round, one that is held out is never trained on.
    """
    if not len(rows):
        return np.zeros(0, bool)
    return np.random.default_rng((seed, _HELD_OUT)).random(int(rows.max()) + 1)[rows] < share
