"""Denoising images, and parts of images, by removing noise."""
