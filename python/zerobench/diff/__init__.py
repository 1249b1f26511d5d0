"""`zerobench diff`: two result files, row by row."""
