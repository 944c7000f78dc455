"""Classification, scoring and embedding of texts."""
