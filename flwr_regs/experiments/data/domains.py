"""Five domains of one data set: covariate shift with unchanged labels."""

from __future__ import annotations

import numpy as np

from flwr_regs.experiments.extras import needed

Array = np.ndarray

DOMAINS = ("as is", "inverted", "over natural patches", "rotated", "blurred and downsampled")


def shifted(x: Array, domain: int, seed: int) -> Array:
    """Return grey images, float32 in [0, 1], ``(n, 1, side, side)``, transformed to one of the `DOMAINS`.

    *over natural patches*: the absolute difference to a random crop of scikit-learn's two photographs
    (as in MNIST-M, Ganin et al. 2016); *rotated*: by a quarter turn; *blurred and downsampled*: by a
    Gaussian of one pixel, then to half the resolution and back. `seed` draws the crops.
    """
    if domain == 1:
        x = 1 - x
    if domain == 2:
        x = abs(_patches(len(x), x.shape[-1], seed) - x)
    if domain == 3:
        x = np.rot90(x, axes=(2, 3))
    if domain == 4:
        x = _coarse(x)
    return np.ascontiguousarray(x, dtype=np.float32)


def _patches(n: int, side: int, seed: int) -> Array:
    samples = needed("sklearn.datasets", "scikit-learn", "the natural patches").load_sample_images()
    photos = [photo.mean(axis=2, dtype=np.float32) / 255 for photo in samples.images]
    rng = np.random.default_rng(seed)
    out = np.empty((n, 1, side, side), np.float32)
    for i in range(n):
        photo = photos[rng.integers(len(photos))]
        top, left = (int(rng.integers(edge - side + 1)) for edge in photo.shape)
        out[i, 0] = photo[top : top + side, left : left + side]
    return out


def _coarse(x: Array) -> Array:
    import torch
    from torchvision.transforms.functional import gaussian_blur

    side = x.shape[-1]
    blurred = gaussian_blur(torch.from_numpy(x), [5, 5], [1.0, 1.0])
    half = torch.nn.functional.interpolate(blurred, size=side // 2, mode="area")
    return torch.nn.functional.interpolate(half, size=side, mode="nearest").numpy()
