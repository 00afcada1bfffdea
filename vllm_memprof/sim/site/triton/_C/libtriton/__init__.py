from . import ir

__all__ = ["ir"]
