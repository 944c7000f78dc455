"""Labels and embeddings of images."""
