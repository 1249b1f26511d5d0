"""Locked memory and disk transfers that rows on NVMe need."""
