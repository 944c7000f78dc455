"""`headway-train evaluate`: measures a model that a server runs, through the client, and compares with its card.

`data` reads what it is measured on, `measurement` asks and measures, `evaluation` is the whole. Needs the client:
`headway-training[evaluate]`.
"""

from headway_training.served.evaluation import EvaluationOptions, Report, evaluate_served

__all__ = ["EvaluationOptions", "Report", "evaluate_served"]
