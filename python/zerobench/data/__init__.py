"""Deterministic token streams, the same for every strategy. Importing this imports no torch."""

from zerobench.data.datasets import ByteDataset, Dataset, SyntheticDataset, open_data

__all__ = ["ByteDataset", "Dataset", "SyntheticDataset", "open_data"]
