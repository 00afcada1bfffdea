"""One module per command, each with a Typer ``app``."""
