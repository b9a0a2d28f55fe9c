"""Robots that run forward."""
