"""What models attend to (docs/attention.md)."""
