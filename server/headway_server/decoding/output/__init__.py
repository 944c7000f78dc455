"""From tokens to text."""
