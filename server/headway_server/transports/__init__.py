"""One folder for each protocol the server speaks."""
