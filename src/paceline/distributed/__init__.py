"""Ranks that share one learner: who I am, and what is common to all."""
