"""Recipes: comparisons as data, one TOML file each; and figures that others published. Imports no torch."""
