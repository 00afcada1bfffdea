"""Null Triton: kernels launch to nothing, host-side helpers compute for real. See
``../README.md``."""

from . import _C, backends, compiler, knobs, language, runtime, testing, tools
from ._host import cdiv, next_power_of_2
from .compiler import CompilationError, compile
from .runtime import (
    Config,
    InterpreterError,
    JITFunction,
    KernelInterface,
    OutOfResources,
    autotune,
    heuristics,
    jit,
)
from .runtime.jit import MockTensor, TensorWrapper, reinterpret

__version__ = "3.2.0"

__all__ = [
    "_C",
    "CompilationError",
    "Config",
    "InterpreterError",
    "JITFunction",
    "KernelInterface",
    "MockTensor",
    "OutOfResources",
    "TensorWrapper",
    "autotune",
    "backends",
    "cdiv",
    "compile",
    "compiler",
    "heuristics",
    "jit",
    "knobs",
    "language",
    "must_use_result",
    "next_power_of_2",
    "reinterpret",
    "runtime",
    "set_allocator",
    "testing",
    "tools",
]


def must_use_result(function, is_active=True):
    return function


def set_allocator(allocator):
    """The scratch allocator of kernels; kernels do not run, so it is never asked."""
