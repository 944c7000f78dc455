"""Promptable image segmentation."""
