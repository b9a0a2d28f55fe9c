"""Pure tensor code: random numbers, graphs, statistics, flat parameters, rotations."""
