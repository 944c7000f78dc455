"""Parts that every model of the kit is built from."""
