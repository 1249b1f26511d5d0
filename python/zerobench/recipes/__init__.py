"""Recipes: comparisons as data, one TOML file each. Imports no torch."""
