"""What a card needs: files of its data sets, and whether they are there."""

from __future__ import annotations

from pathlib import Path

CACHE = "~/.cache/flwr_regs"
"""Where the data sets' files are looked for without data-dir."""
FILES: dict[str, tuple[str, ...]] = {
    "mnist": ("MNIST/raw/train-images-idx3-ubyte*", "mnist/**/train*.parquet"),
    "fashion-mnist": ("FashionMNIST/raw/train-images-idx3-ubyte*", "fashion*/**/train*.parquet"),
    "emnist": ("EMNIST/raw/emnist-*train-images*", "EMNIST/raw/gzip*", "emnist/**/train*.parquet"),
    "femnist": ("**/all_data_*.json", "**/fed_emnist*.h5", "femnist/**/*.parquet"),
    "cifar10": ("cifar-10-batches-py/data_batch_1", "train*.parquet", "cifar10/**/train*.parquet"),
    "cifar100": ("cifar-100-python/train", "train*.parquet", "cifar100/**/train*.parquet"),
    "shakespeare": ("input.txt", "shakespeare/**/*.txt", "**/all_data_*.json", "*.txt"),
    "sentiment140": ("**/training.1600000*.csv", "**/all_data*.json", "sent*/**/*.parquet"),
    "digits-five": ("MNIST/**/*.pkl", "digit*/**/*.pkl", "**/SVHN/**/*", "**/*.mat"),
    "office-caltech": ("**/office_caltech_10/**/*.pkl", "**/office_caltech_10/*/*/*.jpg"),
    "domainnet": ("**/DomainNet/*.pkl", "**/domainnet/**/*.pkl", "**/clipart*/**/*.jpg"),
    "gld-23k": ("**/gld23k_user_dict_train.csv", "**/mini_gld_train_split.csv"),
    "stackoverflow": ("**/stackoverflow*.h5", "**/stackoverflow*.sqlite*"),
}
"""Data set -> files, one of which says that it is there; a set that is not named here needs none."""
HASHES: dict[str, str] = {"digits": "497f557db34b9619"}
"""Data set -> the hash of the data that the package's cards were written with, where it is known."""


def present(dataset: str, data_dir: str = "") -> bool:
    """Return whether the files of a data set are in `data_dir`, by default in the cache.

    A user's own data set (``mine.py:load``) and what needs no files are always there.
    """
    name = dataset.partition("(")[0].removesuffix("-domains")
    patterns = FILES.get(dataset, FILES.get(name, ()))
    folder = Path(data_dir or CACHE).expanduser()
    return not patterns or any(next(folder.glob(pattern), None) for pattern in patterns)
