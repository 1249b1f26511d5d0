"""Configurations and launch lines for other tools, made from a row of a result file."""
