"""The result file: its schema, and figures computed from its rows. Imports neither torch nor the core."""
