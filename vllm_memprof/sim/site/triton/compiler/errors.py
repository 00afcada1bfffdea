class CompilationError(Exception):
    """Raised when code asks for a compiled kernel: there is no compiler here."""


class CompileTimeAssertionFailure(CompilationError):
    pass


class UnsupportedLanguageConstruct(CompilationError):
    pass
