"""Transformer models from one kit of parts, with recipes that train them.

cli, run        the command `headway-train`, and a whole training run: data, training, measurement, checkpoint
recipes/        what is trained and how: files, their sections, the reader that checks them
data/           public data sets and the user's own files, read into examples and split into parts
tokenizers      trained on the training text; tagging turns tags of subwords into spans
kinds           the tasks by name, and what each declares of itself
tasks/          batches, loss and metrics of each kind of training run
contract        whether a model can be trained for a task
batches         the order of examples: a function of seed and step, so that a run can be resumed
trainer         the loop; optimization, state and progress are its parts
sizing          what a run needs of the machine (hardware), counted before it begins
evaluation      what a model reaches on data; metrics, calibration and baselines serve it
served          the same measured through a server
checkpoint      what a run leaves, and the exporter reads
models/         the models
factory         whether a module of the user's own is there, before it is imported
"""
