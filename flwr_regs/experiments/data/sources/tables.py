"""Tables of the Hugging Face hub: parquet files, or downloaded with flwr-datasets' own library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr_regs.experiments.extras import needed

if TYPE_CHECKING:
    import pandas as pd  # pictures of other files need not wait for it


def read(files: Sequence[Path]) -> pd.DataFrame:
    """Return parquet files as one table; ImportError without pandas or pyarrow."""
    import pandas as pd

    needed("pyarrow", "pyarrow", "reading parquet files")
    return pd.concat([pd.read_parquet(file) for file in files], ignore_index=True)


def downloaded(name: str, split: str) -> pd.DataFrame:
    """Return a split of a data set of the hub, with the library under flwr-datasets.

    Raises ImportError, with the command that installs it, if it is missing.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            f"downloading '{name}' needs flwr-datasets: pip install \"flwr-datasets[vision]\""
        ) from error
    return load_dataset(name, split=split).to_pandas()


def column(table: pd.DataFrame, *names: str) -> list[Any]:
    """Return the first of these columns that a table has; pictures as their bytes, still packed.

    Raises ValueError, with the columns that there are, if it has none of them.
    """
    for name in names:
        if name in table:
            return [v["bytes"] if isinstance(v, dict) else v for v in table[name].tolist()]
    raise ValueError(f"a table has the columns {', '.join(table)}; expected {' or '.join(names)}")
