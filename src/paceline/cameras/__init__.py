"""Images of all envs: cameras, their renderers, and what is drawn."""
