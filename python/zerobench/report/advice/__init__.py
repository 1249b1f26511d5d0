"""Advice on measured rows: which to take, what limits it, and what that rests on. Imports no torch."""
