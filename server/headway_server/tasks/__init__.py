"""Tasks: parameters, inputs and results of their calls."""
