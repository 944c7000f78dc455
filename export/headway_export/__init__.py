"""Exports PyTorch models to bundles and proves them equal."""
