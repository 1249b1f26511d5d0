"""Findings over the facts of a machine: what stops or slows training there, what it costs, what mends it."""
