"""Labels of the words of a text."""
