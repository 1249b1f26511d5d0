"""The comparison: plan, launch, worker, verify, measure, result. Importing this package imports no torch."""
