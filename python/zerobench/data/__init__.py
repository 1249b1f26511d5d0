"""Deterministic batches, the same for every strategy. Importing this imports no torch."""

from zerobench.data.datasets import (
    ByteDataset,
    Dataset,
    IdDataset,
    SyntheticDataset,
    TokenDataset,
    digest_of,
    open_data,
)
from zerobench.data.made import BatchRequest, MadeDataset
from zerobench.data.sources import ID_WIDTHS

__all__ = [
    "ID_WIDTHS",
    "BatchRequest",
    "ByteDataset",
    "Dataset",
    "IdDataset",
    "MadeDataset",
    "SyntheticDataset",
    "TokenDataset",
    "digest_of",
    "open_data",
]
