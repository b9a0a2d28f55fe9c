"""Importing this module fills the registry."""

from mjlab.tasks import registry  # pyright: ignore[reportMissingImports]

registry.TASKS.append("Mjlab-Rail")
