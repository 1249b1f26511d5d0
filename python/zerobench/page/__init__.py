"""One self-contained HTML page of result files. Imports neither torch nor the core."""
