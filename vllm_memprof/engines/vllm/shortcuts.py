"""What a plan does in less time than the engine, with the same figures.

Each shortcut is an attribute of a module or a class that is another for a while; what a release
lacks is left out. For the plan driver alone: runs that serve do all as the engine does.
"""

from __future__ import annotations

import builtins
import functools
import gc
import inspect
import pkgutil
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

from vllm_memprof.engines.later import loaded_later
from vllm_memprof.engines.vllm.alike_layers import form_of, of_alike_layers
from vllm_memprof.engines.vllm.forks import Fork
from vllm_memprof.files import read_own

#: Module or class, the name of its attribute, and what that is for a while.
Replacement = tuple[Any, str, Any]

_INSPECTS = "_run_in_subprocess"
_INDUCTOR_PATTERNS = "torch_npu._inductor.npu_fusion_attention_graph"
_ASCEND_IMPORT = "vllm_ascend.patch.worker.patch_weight_utils"
_UNUSED_MODULES = read_own(__file__, "unused_modules.json")
#: Functions of the host: module or class, name.
_OF_THE_HOST = (
    ("torch._dynamo.convert_frame", "fullgraph_capture"),
    ("torch.fx._graph_pickler:GraphPickler", "dumps"),
    ("torch.fx._graph_pickler:GraphPickler", "loads"),
)


#: While it lasts, an attribute of a module, class or object is another.
replaced = mock.patch.object


@contextmanager
def all_replaced(replacements: Iterable[Replacement]) -> Iterator[None]:
    """Inside, each of these attributes is another one."""
    with ExitStack() as stack:
        for replacement in replacements:
            stack.enter_context(replaced(*replacement))
        yield


@contextmanager
def importing_what_it_uses() -> Iterator[None]:
    """Inside, the engine is imported without modules that a plan does not use.

    A function that is to be compiled asks for inductor's configuration when it is defined, which
    imports all of inductor: half a second. It is only for who asks the function for it.
    """
    with loaded_later(_UNUSED_MODULES):
        import vllm.env_override  # noqa: F401  # imports torch as the engine does
        from torch import _TorchCompileInductorWrapper as Inductor

        with replaced(Inductor, "get_compiler_config", lambda _: None):
            yield


def without_inductor(eager: bool) -> AbstractContextManager[None]:
    """Inside, an eager plan's worker does not import torch_npu's part of inductor, nor inductor.

    Up to torch 2.9 that import runs on the device, which then holds the binaries of its operators.
    """
    import torch

    without = eager and tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)
    return loaded_later({"torch_npu._inductor": []} if without else {})


def of_an_inspection() -> Iterator[Replacement]:
    """Yield vLLM's look at a model's class as one that a fork takes; no device may be open yet.

    vLLM asks a second interpreter for it, so that importing the model's module leaves no trace in
    the first, and keeps the answer in its cache. That interpreter imports the engine once more: ten
    seconds or more, for each architecture that is new to the cache. (0.11 to 0.23) Where the fork
    has no answer it is asked: errors are the engine's.
    """
    from vllm.model_executor.models import registry

    ask = getattr(registry, _INSPECTS, None)
    if ask is None:
        return

    def ask_a_fork(function: Callable[[], Any]) -> Any:
        def quietly() -> tuple[Any] | None:
            with suppress(Exception):
                return (function(),)
            return None

        answer = Fork(quietly).answer()
        return ask(function) if answer is None else answer[0]

    yield registry, _INSPECTS, ask_a_fork


def of_a_worker() -> Iterator[Replacement]:
    """Yield what torch_npu does for a worker that leaves no trace in a plan.

    Weights of 4 bits are copied to the host, packed there and copied back (op-plugin,
    ``npu_convert_weight_to_int4pack``): minutes of Kimi-K2-Thinking, and a plan's weights have no
    values. A worker imports torch_npu's part of inductor, which traces attention with its backward
    pass. vllm-ascend compiles without inductor (``platform.py``: use_inductor is False, 0.18 to
    0.30), so nobody looks for that pattern: a fifth of a second of each plan. Up to torch 2.9 the
    trace runs on the device, which then holds the binaries of its operators.
    """
    with suppress(ImportError):
        import torch_npu
        from torch._inductor import pattern_matcher
        from torch._subclasses import FakeTensor

        yield (  # eight values in each integer
            torch_npu,
            "npu_convert_weight_to_int4pack",
            lambda it, *_: it.new_empty(it[..., ::8].shape),
        )
        register = pattern_matcher.register_replacement

        @functools.wraps(register)
        def register_used(*pass_dicts: Any, **kwargs: Any) -> Any:
            # torchair looks for the word pass_dicts among the variables of the function's code, to
            # know how to call it (torch_npu 2.9, pattern_pass_manager.py)
            asks = sys._getframe(1).f_globals.get("__name__")
            if asks == _INDUCTOR_PATTERNS and isinstance(kwargs["example_inputs"][0], FakeTensor):
                return None
            return register(*pass_dicts, **kwargs)

        yield pattern_matcher, "register_replacement", register_used


def of_a_compilation() -> Iterator[Replacement]:
    """Yield what Dynamo and the compiler do again for every layer, as what does it once.

    How many CUDA devices there are (with a CUDA build of torch on another device each answer loads
    NVML anew), which lines of source a function has that was traced before, whether the instances
    of a class hide their dictionary, whether a module that is imported inside a function was to be
    patched at its import, and pieces of a model that are alike. And yield functions without work
    that comes to nothing.
    """
    import torch

    # it keeps its answer only once CUDA is initialised (2.8, 2.10); None: it has none yet
    if getattr(torch.cuda, "_cached_device_count", 0) is None:
        yield torch.cuda, "_cached_device_count", torch.cuda.device_count()
    with suppress(ImportError):  # it adds to a set, and reads the file to know what (2.10)
        from torch._dynamo.package import SourceInfo

        yield SourceInfo, "add_code", remembering(SourceInfo.add_code, lambda _, code: code)
    # inspect.getattr_static walks all bases of a class for it; it remembers from 3.12 on
    ask = getattr(inspect, "_shadowed_dict", None)
    if ask is not None and sys.version_info < (3, 12):
        yield inspect, "_shadowed_dict", remembering(ask, lambda _: "dict")
    # vllm-ascend looks at every import statement that is run, for two modules of models' weights
    # (0.23.0, patch_weight_utils.py): they are loaded by now, and Dynamo imports in its functions
    patch = sys.modules.get(_ASCEND_IMPORT)
    patched, plain = (getattr(patch, name, None) for name in ("patched_import", "original_import"))
    if plain is not None and builtins.__import__ is patched:
        yield builtins, "__import__", plain
    # vLLM takes the piece that it has compiled already, where the compiler names its results by
    # their content (CompilerManager.compile); vllm-ascend's does not: a plan of 64 layers waits
    # half a minute for 63 times the same. What is compiled keeps no tensor of its own: which of two
    # alike pieces runs is of no consequence for memory.
    with suppress(ImportError):
        from vllm_ascend.compilation.compiler_interface import AscendCompiler

        yield AscendCompiler, "compile", _once_for_alike(AscendCompiler.compile)
    with suppress(ImportError, KeyError):
        from vllm.compilation.caching import VllmSerializableFunction as Compiled

        keep = vars(Compiled)["serialize_compile_artifacts"].__func__
        yield Compiled, keep.__name__, classmethod(_without_inner_results(keep))
    yield from of_alike_layers()
    yield from _without_needless_work()


def _without_inner_results(keep: Callable[[Any, Any], bytes]) -> Callable[[Any, Any], bytes]:
    """Return a function that keeps a compiled model without results that stay in one piece.

    vLLM keeps an example of every result beside its operator, and of them asks for what goes from
    one piece to another (0.23, 0.30: ``PiecewiseCompileInterpreter``, ``PiecewiseBackend``).
    Reading the others is a third of the time that a kept model takes.
    """

    @functools.wraps(keep)
    def run(cls: Any, compiled: Any) -> bytes:
        split = getattr(getattr(compiled, "vllm_backend", None), "split_gm", None)
        if split is None:
            return keep(cls, compiled)
        crossing = {
            id(node.meta.get("example_value"))
            for piece in split.children()
            for end in ("placeholder", "output")
            for node in piece.graph.find_nodes(op=end)
            for node in (node, *node.all_input_nodes)
        }
        for node in compiled.graph_module.graph.nodes:
            if node.op != "placeholder" and id(node.meta.get("example_value")) not in crossing:
                node.meta.pop("example_value", None)
        return keep(cls, compiled)

    return run


def remembering(
    function: Callable[..., Any], key: Callable[..., Hashable | None]
) -> Callable[..., Any]:
    """Return a function that is run once for each first argument and each key of all arguments.

    Args:
        function: what it raises is not remembered. Its first argument is kept alive.
        key: None: it is run each time.
    """
    known: dict[tuple[int, Hashable], tuple[Any, Any]] = {}

    @functools.wraps(function)
    def answer(of: Any, *args: Any, **kwargs: Any) -> Any:
        name = key(of, *args, **kwargs)
        if name is None:
            return function(of, *args, **kwargs)
        place = id(of), name
        if place not in known:
            known[place] = of, function(of, *args, **kwargs)
        return known[place][1]

    return answer


def _without_needless_work() -> Iterator[Replacement]:
    """Yield functions without the garbage collector, or without guards that are dropped.

    The collector goes through millions of objects that are alive, a tenth of Dynamo's trace. All of
    them are of the host, and at the first allocation after the trace it looks at them: before the
    model runs, so that no tensor of the device lives longer than it would. vLLM has all guards
    dropped, and torch builds each of them before it asks which to keep: a twentieth of a large
    model's trace.
    """
    for place, name in _OF_THE_HOST:
        with suppress(ImportError, AttributeError):
            owner = pkgutil.resolve_name(place)
            yield owner, name, staticmethod(uncollected(getattr(owner, name)))
    with suppress(ImportError):
        from torch._dynamo.convert_frame import GraphCaptureOutput
        from torch.compiler import skip_all_guards_unsafe

        build = GraphCaptureOutput.build_guards

        @functools.wraps(build)
        def build_kept(self: Any, code: Any, hooks: Any = None, *args: Any, **kwargs: Any) -> Any:
            """``CheckFunctionManager`` gets none to build where all are dropped. (torch 2.10)"""
            if getattr(hooks, "guard_filter_fn", None) is not skip_all_guards_unsafe:
                return build(self, code, hooks, *args, **kwargs)
            graph = self.output_graph
            with replaced(graph, "_guards", type(graph._guards)()):
                return build(self, code, hooks, *args, **kwargs)

        yield GraphCaptureOutput, "build_guards", build_kept


def uncollected(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs without the garbage collector."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        collects = gc.isenabled()
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            if collects:
                gc.enable()

    return run


def _once_for_alike(compile_piece: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that compiles one of the pieces that are alike but for names of layers.

    From 0.30 on a piece names its layer of experts. What was compiled with another layer's name
    finds this one's there while it runs.
    """
    once = remembering(compile_piece, _piece)
    compiled_for: dict[int, tuple[Any, list[str]]] = {}

    @functools.wraps(compile_piece)
    def run(compiler: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        compiled, handle = once(compiler, graph, *args, **kwargs)
        own = _layer_names(graph)
        _, names = compiled_for.setdefault(id(compiled), (compiled, own))
        if names == own:
            return compiled, handle

        @functools.wraps(compiled)
        def run_piece(*inputs: Any) -> Any:
            layers = _layers_by_name()
            others = {name: layers[other] for name, other in zip(names, own, strict=True)}
            with mock.patch.dict(layers, others):
                return compiled(*inputs)

        return run_piece, handle

    return run


def _layers_by_name() -> dict[str, Any]:
    """Return the layers that the engine's operators find by their names; none before it runs."""
    with suppress(ImportError, AssertionError):
        from vllm.forward_context import get_forward_context

        found: dict[str, Any] = get_forward_context().no_compile_layers
        return found
    return {}


def _layer_names(graph: Any) -> list[str]:
    """Return the names of layers in the arguments of a piece, in the order of its nodes."""
    from torch.fx.node import map_aggregate

    layers, found = _layers_by_name(), dict[str, None]()

    def look(value: Any) -> None:
        if isinstance(value, str) and value in layers:
            found.setdefault(value)

    for node in graph.graph.nodes:
        map_aggregate((node.args, node.kwargs), look)
    return [*found]


def _piece(
    compiler: Any,
    graph: Any,
    example_inputs: list[Any],
    compiler_config: Any,
    compile_range: Any,
    key: Any = None,
) -> Hashable | None:
    """Describe what a piece of a model computes on which inputs: equal for interchangeable pieces.

    Args:
        compiler: each compiled model has one.
        graph: a ``torch.fx.GraphModule``.
        example_inputs: one per placeholder: tensors, symbolic and plain numbers.
        compiler_config: its own.
        compile_range: of sizes.
        key: of the piece, in the engine's own cache.

    Returns:
        The range, and one entry per input and per node; None for a piece that holds something
        beside its nodes.
    """
    from torch.fx.node import Node, map_aggregate

    places: dict[Any, Any] = {node: ("node", at) for at, node in enumerate(graph.graph.nodes)}
    nodes = [*places]
    places |= {name: ("layer", at) for at, name in enumerate(_layer_names(graph))}

    def place(value: Any) -> Any:
        return places.get(value, value) if isinstance(value, (Node, str)) else value

    def described(arguments: Any) -> str:
        return repr(map_aggregate(arguments, place))

    storages: dict[Any, int] = {}
    lines: list[Any] = [
        str(compile_range),
        *(_described(value, storages) for value in example_inputs),
    ]
    for node in nodes:
        if node.op == "placeholder":
            lines.append("placeholder")
        elif node.op in ("call_function", "call_method", "output"):
            lines.append((node.op, node.target, described(node.args), described(node.kwargs)))
        else:  # an attribute or a module of its own
            return None
    return tuple(lines)


def _described(value: Any, storages: dict[Any, int]) -> tuple[Any, ...]:
    """Describe an input without its values, and the other inputs with which it shares storage."""
    if not hasattr(value, "untyped_storage"):
        return (type(value).__name__, str(value))
    shared = storages.setdefault(value.untyped_storage()._cdata, len(storages))
    return (*form_of(value), shared)
