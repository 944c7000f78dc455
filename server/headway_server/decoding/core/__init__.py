"""The engine: what runs, in which slot, and what a step computes."""
