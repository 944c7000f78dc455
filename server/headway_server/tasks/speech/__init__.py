"""Transcripts: texts of what is said in audio."""
