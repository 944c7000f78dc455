"""Cutting out of images what prompts point at."""
