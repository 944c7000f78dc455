"""Models of named tensors: any graph."""
