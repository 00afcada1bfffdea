"""Stand-in for torch: just what the hook table names."""

from . import distributed

__version__ = "2.10.0"
__all__ = ["distributed"]
