"""Findings, one module per subject; ``table`` has all of them."""
