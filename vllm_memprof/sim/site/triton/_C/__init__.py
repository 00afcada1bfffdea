from . import libtriton

__all__ = ["libtriton"]
