"""Engines that run a workflow."""
