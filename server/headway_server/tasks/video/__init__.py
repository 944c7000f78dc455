"""Videos that a model reads as a fixed number of frames."""
