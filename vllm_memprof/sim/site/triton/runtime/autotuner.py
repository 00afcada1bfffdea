"""``autotune`` and ``heuristics``: the description is kept, nothing is timed, nothing is
launched."""

from .errors import OutOfResources, PTXASError
from .jit import KernelInterface

__all__ = [
    "Autotuner",
    "Config",
    "Heuristics",
    "OutOfResources",
    "PTXASError",
    "autotune",
    "heuristics",
]


class Config:
    """One set of meta-parameters for a kernel."""

    def __init__(
        self, kwargs, num_warps=4, num_stages=2, num_ctas=1, maxnreg=None, pre_hook=None, **options
    ):
        self.kwargs = kwargs
        self.num_warps = num_warps
        self.num_stages = num_stages
        self.num_ctas = num_ctas
        self.maxnreg = maxnreg
        self.pre_hook = pre_hook
        self.options = options

    def all_kwargs(self):
        named = {
            name: getattr(self, name) for name in ("num_warps", "num_ctas", "num_stages", "maxnreg")
        }
        return {
            **self.kwargs,
            **{name: value for name, value in named.items() if value is not None},
            **self.options,
        }

    def __str__(self):
        return ", ".join(f"{name}: {value}" for name, value in self.all_kwargs().items())


class _Wrapper(KernelInterface):
    """A kernel around a kernel; the innermost is ``base_fn``."""

    def __init__(self, fn, arg_names):
        self.fn = fn
        self.arg_names = arg_names
        self.base_fn = fn
        while hasattr(self.base_fn, "fn"):
            self.base_fn = self.base_fn.fn
        self.__name__ = getattr(self.base_fn, "__name__", "kernel")
        self.__module__ = getattr(self.base_fn, "__module__", __name__)
        self.__doc__ = getattr(self.base_fn, "__doc__", None)

    def warmup(self, *args, **kwargs):
        return None


class Autotuner(_Wrapper):
    def __init__(
        self, fn, arg_names, configs, key, reset_to_zero=None, restore_value=None, **options
    ):
        super().__init__(fn, arg_names)
        self.configs = list(configs) or [Config({})]
        self.keys = key
        self.reset_to_zero = list(reset_to_zero or [])
        self.restore_value = list(restore_value or [])
        self.early_config_prune = None
        self.perf_model = None
        self.pre_hook = options.get("pre_hook")
        self.post_hook = options.get("post_hook")
        self.cache = {}
        self.best_config = self.configs[0]

    def prune_configs(self, kwargs):
        return self.configs


class Heuristics(_Wrapper):
    def __init__(self, fn, arg_names, values):
        super().__init__(fn, arg_names)
        self.values = values


def autotune(configs, key, **options):
    def decorator(fn):
        return Autotuner(fn, fn.arg_names, configs, key, **options)

    return decorator


def heuristics(values):
    def decorator(fn):
        return Heuristics(fn, fn.arg_names, values)

    return decorator
