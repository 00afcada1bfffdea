"""The spread of errors of plans against published runs, which a plan prints."""
