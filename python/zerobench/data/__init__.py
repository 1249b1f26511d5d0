"""Deterministic token streams, the same for every strategy. Importing this imports no torch."""

from zerobench.data.datasets import ByteDataset, Dataset, SyntheticDataset, digest_of, open_data

__all__ = ["ByteDataset", "Dataset", "SyntheticDataset", "digest_of", "open_data"]
