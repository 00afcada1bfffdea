from . import compiler, errors
from .compiler import ASTSource, AttrsDescriptor, CompiledKernel, LazyDict, compile, make_backend
from .errors import CompilationError

__all__ = [
    "ASTSource",
    "AttrsDescriptor",
    "CompilationError",
    "CompiledKernel",
    "LazyDict",
    "compile",
    "compiler",
    "errors",
    "make_backend",
]
