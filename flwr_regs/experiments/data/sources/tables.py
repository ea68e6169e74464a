"""Tables of the Hugging Face hub: parquet files, or downloaded with flwr-datasets' own library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flwr_regs.experiments.extras import missing_extra


def read(files: Sequence[Path]) -> Any:
    """Return parquet files as one pyarrow table; ImportError without pyarrow."""
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise missing_extra("pyarrow", "reading parquet files") from error
    return arrow.concat_tables([parquet.read_table(file) for file in files])


def downloaded(name: str, split: str) -> Any:
    """Return a split of a data set of the hub as a table, with the library under flwr-datasets.

    Raises ImportError, with the command that installs it, if it is missing.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            f"downloading '{name}' needs flwr-datasets: pip install \"flwr-datasets[vision]\""
        ) from error
    return load_dataset(name, split=split).data.table


def column(table: Any, *names: str) -> list[Any]:
    """Return the first of these columns that a table has; pictures as their bytes, still packed.

    Raises ValueError, with the columns that there are, if it has none of them.
    """
    for name in names:
        if name in table.column_names:
            values = table.column(name).to_pylist()
            if values and isinstance(values[0], dict):
                return [value["bytes"] for value in values]
            return list(values)
    raise ValueError(
        f"a table has the columns {', '.join(table.column_names)}; expected {' or '.join(names)}"
    )
