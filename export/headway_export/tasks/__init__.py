"""What export does with the models of each task: `task.py` says what that is, and `table.py` where each is."""
