"""Text generation."""
