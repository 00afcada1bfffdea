"""Pieces of a compiled model that are alike, compiled once, while a rank is planned.

vLLM cuts the graph of a model at its attention layers and has each piece compiled. Most are alike:
the same operators on the same shapes, with other weights, which are inputs. vLLM takes the piece
that it has compiled already, where the compiler names its results by their content
(``CompilerManager.compile``, "There is a compilation time optimization here"); vllm-ascend's
compiler does not, so that a plan of 64 layers waits half a minute for 63 times the same. What is
compiled keeps no tensor of its own: which of two alike pieces runs is of no consequence for memory.

For the plan driver alone; runs that serve compile as the engine does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_memprof.engines.replaced import Replacement


def alike_pieces_once() -> Iterator[Replacement]:
    """Yield vllm-ascend's compiler as one that takes its result again for a piece like another."""
    try:
        from vllm_ascend.compilation.compiler_interface import AscendCompiler
    except ImportError:  # a release without it
        return
    compile_piece = AscendCompiler.compile
    compiled: dict[tuple[Any, ...], Any] = {}

    def compile(
        self: Any,
        graph: Any,
        example_inputs: list[Any],
        compiler_config: Any,
        compile_range: Any,
        key: Any = None,
    ) -> Any:
        content = content_of(graph, example_inputs)
        place = id(self), str(compile_range), content  # each compiled model has a compiler
        if content is not None and place in compiled:
            return compiled[place]
        made = compile_piece(self, graph, example_inputs, compiler_config, compile_range, key)
        if content is not None:
            compiled[place] = made
        return made

    yield AscendCompiler, "compile", compile


def content_of(graph: Any, inputs: list[Any]) -> tuple[Any, ...] | None:
    """Describe what a piece computes on which inputs: equal for interchangeable pieces.

    Args:
        graph: a ``torch.fx.GraphModule``.
        inputs: what it will be called with, one per placeholder: tensors, symbolic and plain
            numbers.

    Returns:
        One entry per input and per node; None for a piece that holds something beside its nodes.
    """
    from torch.fx.node import map_arg

    places = {node: place for place, node in enumerate(graph.graph.nodes)}

    def described(arguments: Any) -> str:
        return repr(map_arg(arguments, lambda node: ("node", places[node])))

    storages: dict[Any, int] = {}
    lines: list[Any] = [_described(value, storages) for value in inputs]
    for node in places:
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
    form = str((tuple(value.shape), value.stride(), value.storage_offset()))
    return (type(value).__name__, form, value.dtype, str(value.device), value.requires_grad, shared)
