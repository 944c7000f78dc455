"""One servicer a file: convert the request, delegate, convert the answer back."""
