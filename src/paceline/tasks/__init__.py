"""What the robot should do: one file per task."""
