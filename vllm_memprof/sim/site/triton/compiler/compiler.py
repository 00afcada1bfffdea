"""The names that torch imports from Triton's compiler. There is none: asking for a kernel's binary
fails."""

from .._C.libtriton.ir import module
from ..backends.compiler import AttrsDescriptor, BaseBackend, GPUTarget
from .errors import CompilationError
from .writes import written_parameters

__all__ = [
    "ASTSource",
    "AttrsDescriptor",
    "CompiledKernel",
    "GPUTarget",
    "LazyDict",
    "compile",
    "make_backend",
]


class CompiledKernel:
    launch_enter_hook = None
    launch_exit_hook = None


class LazyDict(dict):
    pass


class ASTSource:
    def __init__(self, fn, signature, constexprs=None, attrs=None):
        self.fn, self.signature, self.constexprs, self.attrs = (
            fn,
            signature,
            constexprs or {},
            attrs,
        )

    def make_ir(self, options, context):
        """What torch reads of a kernel that it traces: which tensors it writes to."""
        tensors = [name for name in self.signature if name not in self.constexprs]
        return module(self.fn.fn.__name__, tensors, written_parameters(self.fn))


def triton_key():
    """What torch mixes into the key of its compile cache."""
    return "memprof-null-triton-2"


def make_backend(target):
    return BaseBackend(target)


def compile(src, target=None, options=None):
    raise CompilationError(
        "null Triton does not compile kernels; they launch to nothing on the simulated device"
    )
