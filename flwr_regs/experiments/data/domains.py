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
    side = x.shape[-1]
    if domain == 1:
        x = 1 - x
    if domain == 2:
        samples = needed(
            "sklearn.datasets", "scikit-learn", "the natural patches"
        ).load_sample_images()
        photos = [photo.mean(axis=2, dtype=np.float32) / 255 for photo in samples.images]
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
