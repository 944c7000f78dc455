"""Transformer models from one kit of parts, with recipes that train them.

cli, run        the command `headway-train`, and a whole run: data, training, measurement, checkpoint
recipes/        what is trained and how: files, their sections, the reader that checks them
data/           public data sets and the user's own files, read into examples and split into parts
tokenizers      trained on the training text
tasks/          batches, loss and metrics of each kind of training
batches, plan   the order of examples: a function of seed and epoch, so that a run can be resumed
trainer         the loop; state, averaging, schedule, progress and interruption are its parts
evaluation      what a model reaches on data; decoding, metrics and baselines serve it
images          preprocessing of images, and what training changes about them
checkpoint      what a training leaves and the exporter reads
models/         the models
"""
