"""What the field publishes, to stand next to measured results. Imports neither torch nor the core."""
