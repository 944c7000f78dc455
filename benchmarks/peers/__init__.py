"""Other libraries, each in a process and all in an environment of their own."""
