class InterpretedFunction:
    """Triton's interpreter is not available; the class exists for ``isinstance`` tests."""
