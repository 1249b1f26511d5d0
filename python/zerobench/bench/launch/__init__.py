"""Processes of ranks: start them, hear them out, end them."""
