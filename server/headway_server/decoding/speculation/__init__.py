"""Drafts of tokens by prompt lookup, and the run that verifies them (docs/speculation.md)."""
