"""Measures models that a server runs, through the client, so that anyone can check a model card.

Needs the client: `headway-training[evaluate]`.
"""
