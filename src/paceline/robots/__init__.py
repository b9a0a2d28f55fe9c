"""Robot models: MJCF files, and models of other packages that are adapted in memory."""
