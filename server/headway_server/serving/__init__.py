"""The part of a call common to all transports and tasks: loaded models, admission, limits."""
