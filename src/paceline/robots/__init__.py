"""Robot models, written as MJCF with primitive geoms: one file per robot."""
