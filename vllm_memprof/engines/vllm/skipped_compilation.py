"""Work on a compiled model that comes to nothing, left out while a rank is planned.

* Guards. vLLM has all of them dropped, and torch builds each of them before it asks which to keep:
  a twentieth of a large model's trace.
* The garbage collector, while Dynamo traces and while graphs are written and read. It goes through
  millions of objects that are alive, a tenth of the trace. All of them are of the host, and at the
  first allocation after the trace it looks at them: before the model runs, so that no tensor of the
  device lives longer than it would.

For the plan driver alone.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from vllm_memprof.engines.replaced import Replacement

#: Module, class or "", function: during which the garbage collector is off.
_OF_THE_HOST = (
    ("torch._dynamo.convert_frame", "", "fullgraph_capture"),
    ("torch.fx._graph_pickler", "GraphPickler", "dumps"),
    ("torch.fx._graph_pickler", "GraphPickler", "loads"),
)


def needless_work() -> Iterator[Replacement]:
    """Yield functions as such that leave it out; what a release lacks is left out."""
    for module, cls, name in _OF_THE_HOST:
        with contextlib.suppress(ImportError, AttributeError):
            owner = importlib.import_module(module)
            owner = getattr(owner, cls) if cls else owner
            if (held := vars(owner).get(name)) is not None:
                yield owner, name, _uncollected(held)
    try:
        from torch._dynamo.convert_frame import GraphCaptureOutput
        from torch.compiler import skip_all_guards_unsafe
    except ImportError:
        return
    build = GraphCaptureOutput.build_guards

    @functools.wraps(build)
    def build_kept(self: Any, code: Any, hooks: Any = None, *args: Any, **kwargs: Any) -> Any:
        """``CheckFunctionManager`` gets none to build where all are dropped. (torch 2.10)"""
        if getattr(hooks, "guard_filter_fn", None) is not skip_all_guards_unsafe:
            return build(self, code, hooks, *args, **kwargs)
        with without_guards(self.output_graph):
            return build(self, code, hooks, *args, **kwargs)

    yield GraphCaptureOutput, "build_guards", build_kept


@contextlib.contextmanager
def without_guards(graph: Any) -> Iterator[None]:
    """Inside, a traced graph has no guards."""
    held = graph._guards
    graph._guards = type(held)()
    try:
        yield
    finally:
        graph._guards = held


def _uncollected(held: Any) -> Any:
    """Return a function, or a class or static method, that runs without the garbage collector."""
    if isinstance(held, (classmethod, staticmethod)):
        return type(held)(_uncollected(held.__func__))
    function: Callable[..., Any] = held

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
