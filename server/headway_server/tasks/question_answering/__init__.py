"""Answers to questions, found in texts."""
