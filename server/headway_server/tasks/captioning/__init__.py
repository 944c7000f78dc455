"""Captions: texts that say what images show."""
