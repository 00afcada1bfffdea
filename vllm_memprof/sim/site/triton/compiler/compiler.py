"""The names that torch imports from Triton's compiler. There is none: asking for a kernel's binary fails."""

from ..backends.compiler import AttrsDescriptor, BaseBackend, GPUTarget
from .errors import CompilationError

__all__ = ["ASTSource", "AttrsDescriptor", "CompiledKernel", "GPUTarget", "LazyDict", "compile", "make_backend"]


class CompiledKernel:
    launch_enter_hook = None
    launch_exit_hook = None


class LazyDict(dict):
    pass


class ASTSource:
    def __init__(self, fn, signature, constexprs=None, attrs=None):
        self.fn, self.signature, self.constexprs, self.attrs = fn, signature, constexprs or {}, attrs


def triton_key():
    """What torch mixes into the key of its compile cache."""
    return "memprof-null-triton"


def make_backend(target):
    return BaseBackend(target)


def compile(src, target=None, options=None):
    raise CompilationError("null Triton does not compile kernels; they launch to nothing on the simulated device")
