"""Maps of an image's pixels: labels and depth."""
