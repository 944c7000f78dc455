"""Image classification and embedding."""
