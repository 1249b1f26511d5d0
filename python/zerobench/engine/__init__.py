"""The training engine: ``zerobench.initialize`` and what it returns."""
