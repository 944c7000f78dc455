"""What a call of each task means."""
