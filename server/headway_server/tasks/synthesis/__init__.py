"""Models that speak."""
