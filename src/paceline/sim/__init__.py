"""Physics simulation of many envs: two engines with one interface."""
