"""What is measured side by side, a file each."""
