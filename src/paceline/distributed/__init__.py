"""Ranks of a run and the collectives between them."""
