"""Version 1 of the headway API. Made by `make proto` from the .proto files beside it, but for this file."""
