"""skrl's PPO, on torch and on JAX."""
