"""Kernels: accepted, described, and launched to nothing, but for those that ``compute`` knows."""

import functools
import inspect
import textwrap

from . import compute


class KernelInterface:
    """``kernel[grid](*args, **meta)`` is a launch; it does nothing and returns nothing."""

    def __getitem__(self, grid):
        return functools.partial(self.run, grid=grid, warmup=False)

    def __class_getitem__(cls, item):
        return cls

    def run(self, *args, grid=None, warmup=False, **kwargs):
        return None


class KernelParam:
    """A parameter of a kernel, as torch reads it when it traces a launch."""

    def __init__(self, num, param, do_not_specialize):
        self.num = num
        self._param = param
        self.name = param.name
        self.do_not_specialize = do_not_specialize
        self.do_not_specialize_on_alignment = False
        self.has_default = param.default is not inspect.Parameter.empty
        self.default = param.default
        self.annotation = (
            "" if param.annotation is inspect.Parameter.empty else str(param.annotation)
        )
        self.annotation_type = ""
        self.is_constexpr = "constexpr" in self.annotation
        self.is_const = False


class JITFunction(KernelInterface):
    def __init__(
        self,
        fn,
        version=None,
        do_not_specialize=None,
        debug=None,
        noinline=None,
        repr=None,
        **options,
    ):
        self.fn = fn
        self.module = fn.__module__
        self.version = version
        self.debug = debug
        self.noinline = noinline
        self.do_not_specialize = list(do_not_specialize or [])
        self.signature = inspect.signature(fn)
        self.params = [
            KernelParam(
                num, param, num in self.do_not_specialize or param.name in self.do_not_specialize
            )
            for num, param in enumerate(self.signature.parameters.values())
        ]
        self.arg_names = [param.name for param in self.params]
        self.constexprs = [param.num for param in self.params if param.is_constexpr]
        self.used_global_vals = {}
        self.pre_run_hooks = []
        self.kernel = None
        functools.update_wrapper(self, fn)

    @functools.cached_property
    def src(self):
        """The source from its ``def`` on; torch stores it in graphs."""
        try:
            text = textwrap.dedent(inspect.getsource(self.fn))
        except (OSError, TypeError):
            return ""
        return text[text.find("def ") :]

    @functools.cached_property
    def cache_key(self):
        return f"{self.module}.{self.fn.__qualname__}"

    @staticmethod
    def key_of(arg):
        return type(arg).__name__

    @staticmethod
    def _type_of(key):
        return key

    def add_pre_run_hook(self, hook):
        self.pre_run_hooks.append(hook)

    def run(self, *args, grid=None, warmup=False, **kwargs):
        if not warmup:
            compute.launch(self, grid, args, kwargs)

    def warmup(self, *args, grid=None, **kwargs):
        return None

    def preload(self, specialization_data):
        return None

    def __call__(self, *args, **kwargs):
        raise RuntimeError(
            f"kernel {self.fn.__name__} was called like a function; a launch is kernel[grid](...)"
        )

    def __repr__(self):
        return f"JITFunction({self.module}:{self.fn.__name__})"


def jit(fn=None, **options):
    """The decorator, with and without arguments."""
    if fn is None:
        return functools.partial(jit, **options)
    return fn if isinstance(fn, JITFunction) else JITFunction(fn, **options)


class TensorWrapper:
    """A tensor seen under another element type."""

    def __init__(self, base, dtype):
        self.base, self.dtype = base, dtype
        self.data, self.device, self.shape = base.data, base.device, base.shape

    def data_ptr(self):
        return self.base.data_ptr()

    def stride(self, *args):
        return self.base.stride(*args)

    def element_size(self):
        return self.base.element_size()


def reinterpret(tensor, dtype):
    return TensorWrapper(
        getattr(tensor, "base", tensor) if isinstance(tensor, TensorWrapper) else tensor, dtype
    )


class MockTensor:
    """A tensor without memory, for warm-up calls."""

    def __init__(self, dtype):
        self.dtype = dtype

    @staticmethod
    def wrap_dtype(arg):
        return MockTensor(arg) if type(arg).__name__ == "dtype" else arg

    @staticmethod
    def data_ptr():
        return 0
