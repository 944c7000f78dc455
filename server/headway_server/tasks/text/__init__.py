"""Labels and embeddings of texts."""
