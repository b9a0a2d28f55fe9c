"""The worlds: two engines, one interface."""
