"""The parts of which models are made."""
