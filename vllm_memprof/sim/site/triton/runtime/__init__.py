from . import autotuner, cache, errors, interpreter
from .autotuner import Autotuner, Config, Heuristics, autotune, heuristics
from .driver import driver
from .errors import InterpreterError, OutOfResources
from .jit import JITFunction, KernelInterface, jit

__all__ = [
    "Autotuner",
    "Config",
    "Heuristics",
    "InterpreterError",
    "JITFunction",
    "KernelInterface",
    "OutOfResources",
    "autotune",
    "autotuner",
    "cache",
    "driver",
    "errors",
    "heuristics",
    "interpreter",
    "jit",
]
