"""A layer that is like those before it goes into Dynamo's graph as a copy.

Dynamo reads the code of every layer: a seventh of a second for each of a large model. Two layers
are alike if their modules hold the same classes, functions and numbers, and tensors of one form.
Called with alike arguments they give the same operators, each on its own tensors. Dynamo traces two
such layers and their operators are compared; further ones are copied. What is not understood, or is
another in any way, is traced.
"""

from __future__ import annotations

import functools
import re
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

#: The number in the name of a layer, as in model.layers.3.mlp.
_NUMBERED = re.compile(r"(?<![^.])\d+(?![^.])")
_COUNTED = re.compile(r"_\d+$")
#: In the name of what Dynamo has read: attributes, and keys.
_READ = re.compile(r"(?<=')[^']+(?=')|\w+")
_MET = "_dynamo_static_input_type"
_PLAIN = (int, float, complex, bytes, frozenset, set, range, slice)


class _Unlike(Exception):
    """Something that a layer takes, does or gives is not understood."""


@dataclass(frozen=True)
class _Place:
    """Where a node of the graph is, seen from a layer.

    Attributes:
        of: "layer", "argument", "tensor" or "graph".
        where: number of the operator or of the argument, the attributes that lead to a tensor of
            the layer, or a node that the layer found in the graph.
    """

    of: str
    where: Any


@dataclass(frozen=True)
class _Constants:
    """Arguments of a Triton kernel that the graph has by their number in a table."""

    values: dict[str, Any]
    number: int = field(compare=False)


@dataclass
class _Traced:
    """What Dynamo made of a layer.

    Attributes:
        module: the layer.
        call: its arguments, and what the trace had changed of other objects before it.
        operators: kind, target, arguments, keywords and form of the result of each.
        nodes: the operators in the graph.
        tensors: attributes that lead to those of the module that it uses, in the graph's order.
        variable: Dynamo's, of what the layer gave.
        result: the same, with places for tensors.
        changes: what it set of objects of its own: attributes that lead there, attribute, what
            tells the value from others -> Dynamo's variable of the value.
        read: attributes and keys of all that was read until it ended.
        proved: another layer gave the same.
    """

    module: Any
    call: tuple[Any, ...]
    operators: list[tuple[Any, ...]]
    nodes: list[Any]
    tensors: list[tuple[str, ...]]
    variable: Any
    result: Any
    changes: dict[tuple[tuple[str, ...], str | None, Any], Any]
    read: set[str]
    proved: bool = False

    def gives(self, strings: Mapping[str, str]) -> tuple[Any, ...]:
        """Return what a layer gives whose strings are others."""
        return _filled(self.operators, str, strings), self.result, [*self.changes]


@dataclass
class _Comparison:
    """Of two modules with all that they hold.

    Attributes:
        strings: of the one -> of the other.
        numbers: names of attributes that are another number.
    """

    strings: dict[str, str] = field(default_factory=dict)
    numbers: set[str] = field(default_factory=set)
    _seen: set[tuple[int, int]] = field(default_factory=set)

    def alike(self, one: Any, other: Any) -> bool:
        """Say whether code that reads none of ``numbers`` does the same with both."""
        import torch

        pair = id(one), id(other)
        if one is other or pair in self._seen:
            return True
        if type(one) is not type(other):
            return False
        if isinstance(one, str):
            names = (_NUMBERED.sub("", name) for name in (one, other))
            return len(set(names)) == 1 and self.strings.setdefault(one, other) == other
        if isinstance(one, _PLAIN):
            return bool(one == other)
        self._seen.add(pair)
        if isinstance(one, torch.Tensor):
            return form_of(one) == form_of(other) and self._same_items(_marks(one), _marks(other))
        if isinstance(one, dict):
            return self._same_items(one, other)
        parts, others = _parts(one), _parts(other)
        return len(parts) == len(others) > 0 and all(map(self.alike, parts, others))

    def unequal(self) -> Iterator[str]:
        """Yield what a layer must not have read: names of numbers, its own names as keys."""
        yield from self.numbers
        yield from (name for name, other in self.strings.items() if name != other)

    def _same_items(self, one: dict[Any, Any], other: dict[Any, Any]) -> bool:
        return len(one) == len(other) and all(map(self._same_item, one.items(), other.items()))

    def _same_item(self, one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
        if type(one[1]) is type(other[1]) is int and one[1] != other[1]:
            self.numbers.add(one[0])
            return bool(one[0] == other[0])
        return self.alike(one[0], other[0]) and self.alike(one[1], other[1])


def _parts(value: Any) -> Sequence[Any]:
    """Return what an object consists of; nothing: it is not known."""
    match value:
        case list() | tuple():
            return len(value), *value
        case types.MethodType():
            return value.__func__, value.__self__
        case types.FunctionType():
            return value.__code__, value.__closure__, value.__defaults__
        case types.CellType():
            return (value.cell_contents,)
        case functools.partial():
            return value.func, value.args, value.keywords
    return (vars(value),) if hasattr(value, "__dict__") else ()


def _marks(tensor: Any) -> dict[str, Any]:
    """Return a tensor's attributes of Python, without what Dynamo sets where it meets it."""
    return {name: value for name, value in vars(tensor).items() if name != _MET}


def form_of(value: Any) -> Any:
    """Describe a tensor, or a result that has some, without its values."""
    if isinstance(value, (list, tuple)):
        return [*map(form_of, value)]
    if not hasattr(value, "untyped_storage"):
        return str(value)
    layout = str((tuple(value.shape), value.stride(), value.storage_offset()))
    return type(value).__name__, layout, value.dtype, str(value.device), value.requires_grad


class _Layers:
    """Traces or copies the layers of one model after the other.

    Args:
        trace: ``UnspecializedNNModuleVariable.call_function``.
    """

    def __init__(self, trace: Callable[..., Any]) -> None:
        self._trace = trace
        self._output: Callable[[], Any] = lambda: None  # of the trace that is under way
        self._inside = False
        self._known: list[_Traced] = []
        self._layers: dict[int, Any] = {}  # by id
        #: Id of an object that one layer alone holds -> the layer, and attributes that lead there.
        self._parts: dict[int, tuple[Any, tuple[str, ...]]] = {}

    def call(self, variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        """Return Dynamo's variable of what a module gives."""
        if tx.output is not self._output():
            self._begin(tx.output)
        if self._inside or id(variable.value) not in self._layers:
            return self._trace(variable, tx, args, kwargs)
        self._inside = True
        try:
            return self._call_layer(variable, tx, args, kwargs)
        finally:
            self._inside = False

    def _begin(self, output: Any) -> None:
        import torch

        self._output, self._known = weakref.ref(output), []
        root = output.local_scope.get("self")
        modules = root.modules() if isinstance(root, torch.nn.Module) else ()
        lists = [module for module in modules if isinstance(module, torch.nn.ModuleList)]
        self._layers, within = {}, set[int]()
        for layer in (layer for layers in lists for layer in layers if id(layer) not in within):
            self._layers[id(layer)] = layer
            within.update(map(id, layer.modules()))
        self._parts, shared = {}, set()
        for layer in self._layers.values():
            for path, part in _objects(layer):
                owner, _ = self._parts.setdefault(id(part), (layer, path))
                if owner is not layer:
                    shared.add(id(part))
        for part in shared:
            del self._parts[part]

    def _call_layer(self, variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        effects = _effects(tx.output)
        inputs: dict[Any, Any] = {}  # nodes -> variables
        try:
            others = {
                key: worth
                for key, (of, _, worth) in effects.items()
                if id(_held(of)) not in self._parts
            }
            given = [_argument(value, inputs) for value in (*args, *kwargs.values())]
            call = (others, *kwargs, *given)
        except _Unlike:
            return self._trace(variable, tx, args, kwargs)
        known, strings = self._like(variable.value, call)
        if known and known.proved:
            return self._copy(known, strings, variable, tx, inputs)
        before = set(tx.output.graph.nodes)
        result = self._trace(variable, tx, args, kwargs)
        with suppress(_Unlike):
            traced = self._traced(tx.output, variable.value, call, before, effects, inputs, result)
            traced.proved = known is not None and known.gives(strings) == traced.gives({})
            if known:
                self._known.remove(known)
            self._known.append(traced)
        return result

    def _like(self, module: Any, call: Any) -> tuple[_Traced | None, dict[str, str]]:
        """Return the traced layer that this one is like, and how its strings become this one's."""
        for known in self._known:
            compared = _Comparison()
            alike = known.call == call and compared.alike(known.module, module)
            if alike and known.read.isdisjoint(compared.unequal()):
                return known, compared.strings
        return None, {}

    def _traced(
        self,
        output: Any,
        module: Any,
        call: Any,
        before: set[Any],
        effects: Any,
        inputs: Mapping[Any, Any],
        result: Any,
    ) -> _Traced:
        """Describe what the trace of a layer has left.

        Raises:
            _Unlike: it holds more than operators on places, or changed something else.
        """
        changes: dict[tuple[tuple[str, ...], str | None, Any], Any] = {}
        for key, (of, value, worth) in _effects(output).items():
            if key not in effects or effects[key][2] != worth:
                owner, way = self._parts.get(id(_held(of)), (None, ()))
                if owner is not module or key[1] is None:
                    raise _Unlike
                changes[way, key[1], worth] = value
        paths = {id(value): path for path, value in _objects(module)}
        places: dict[Any, _Place] = {}
        nodes: list[Any] = []
        for node in output.graph.nodes:
            own = node.op == "placeholder" and "grapharg" in node.meta
            path = paths.get(id(node.meta["grapharg"].example)) if own else None
            if node in inputs:
                places[node] = _Place("argument", [*inputs].index(node))
            elif path:
                places[node] = _Place("tensor", path)
            elif node in before:
                places[node] = _Place("graph", node)
            elif node.op in ("call_function", "call_method"):
                places[node] = _Place("layer", len(nodes))
                nodes.append(node)
            elif node.op != "placeholder":
                raise _Unlike

        forms = [form_of(node.meta.get("example_value")) for node in nodes]
        operators = [
            (node.op, node.target, *_filled((node.args, _keywords(node)), type(node), places), form)
            for node, form in zip(nodes, forms, strict=True)
        ]
        words = {word for guard in output.guards for word in _READ.findall(guard.name)}
        given = _result(result, places)
        used = [place.where for place in places.values() if place.of == "tensor"]
        return _Traced(module, call, operators, nodes, used, result, given, changes, words)

    def _copy(
        self,
        known: _Traced,
        strings: Mapping[str, str],
        variable: Any,
        tx: Any,
        inputs: Mapping[Any, Any],
    ) -> Any:
        """Add a layer's operators to the graph and return the variable of what it gives."""
        tracer = tx.output.current_tracer
        nodes: list[Any] = []

        @functools.cache
        def at(*path: str) -> Any:
            return at(*path[:-1]).var_getattr(tx, path[-1]).realize() if path else variable

        def node_of(place: _Place | _Constants) -> Any:
            if isinstance(place, _Constants):
                return place.number
            match place.of:
                case "layer":
                    return nodes[place.where]
                case "argument":
                    return [*inputs][place.where]
                case "tensor":
                    return at(*place.where).as_proxy().node
            return place.where

        for path in known.tensors:
            at(*path).as_proxy()
        operators, result, changes = known.gives(strings)
        for (kind, target, *arguments, _), like in zip(operators, known.nodes, strict=True):
            node = tracer.create_node(
                kind, target, *_filled(arguments, (_Place, _Constants), node_of)
            )
            name = _COUNTED.sub("", like.name)
            if name != _COUNTED.sub("", node.name):  # that of a variable of the function
                node._rename(name)
            node.meta = {**like.meta, **node.meta}
            nodes.append(node)
        for change in changes:
            path, attribute, _ = change
            tx.output.side_effects.store_attr(at(*path), attribute, known.changes[change])

        def variable_of(like: Any, place: _Place) -> Any:
            if place.of == "argument":
                return [*inputs.values()][place.where]
            return like.clone(proxy=tracer.proxy(nodes[place.where]))

        return _rebuilt(known.variable, result, variable_of)


def _filled(values: Any, kind: Any, others: Mapping[Any, Any] | Callable[[Any], Any]) -> Any:
    """Return lists, tuples and dictionaries with others for values of one kind.

    Raises:
        _Unlike: a node has no place, or a tensor is no node.
    """
    import torch
    from torch.fx.node import Node, map_aggregate

    def other(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            raise _Unlike
        if not isinstance(value, kind):
            return value
        if callable(others):
            return others(value)
        if value not in others and kind is Node:
            raise _Unlike
        return others.get(value, value)

    return map_aggregate(values, other)


def _keywords(node: Any) -> dict[str, Any]:
    """Return an operator's keywords, with the constants of a Triton kernel."""
    number = node.kwargs.get("constant_args_idx")
    if number is None:
        return dict(node.kwargs)
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    constants = _Constants(kernel_side_table.get_constant_args(number), number)
    return {**node.kwargs, "constant_args_idx": constants}


def _argument(variable: Any, inputs: dict[Any, Any]) -> Any:
    """Describe what a layer is called with; the node of a tensor is added to ``inputs``.

    Raises:
        _Unlike: it is neither a constant nor a tensor or the size of one.
    """
    from torch._dynamo.variables import (
        ConstantVariable,
        LazyVariableTracker,
        SymNodeVariable,
        TensorVariable,
    )

    variable = variable.unwrap()
    if type(variable) is LazyVariableTracker:  # nobody has used it
        return id(variable)
    if type(variable) is ConstantVariable:
        return type(variable.value), variable.value
    if type(variable) not in (TensorVariable, SymNodeVariable):
        raise _Unlike
    node = variable.as_proxy().node
    inputs.setdefault(node, variable)
    return [*inputs].index(node), form_of(node.meta["example_value"])


def _result(variable: Any, places: Mapping[Any, _Place]) -> Any:
    """Describe what a layer gives: the place of a tensor, a list for a tuple, a constant.

    Raises:
        _Unlike: it is something else.
    """
    from torch._dynamo.variables import ConstantVariable, TensorVariable, TupleVariable

    if type(variable) is ConstantVariable:
        return variable.value
    if type(variable) is TupleVariable:
        return [_result(item, places) for item in variable.items]
    place = places.get(variable.as_proxy().node) if type(variable) is TensorVariable else None
    if place is None or place.of not in ("layer", "argument"):
        raise _Unlike
    return place


def _rebuilt(variable: Any, result: Any, variable_of: Callable[[Any, _Place], Any]) -> Any:
    """Return a variable like this one, of other tensors."""
    if isinstance(result, _Place):
        return variable_of(variable, result)
    if not isinstance(result, list):
        return variable
    pairs = zip(variable.items, result, strict=True)
    return variable.clone(items=[_rebuilt(*pair, variable_of) for pair in pairs])


def _effects(output: Any) -> dict[tuple[int, str | None], tuple[Any, Any, Any]]:
    """Say what the trace has set so far of objects that are not its own.

    Returns:
        Id of a variable and its attribute, or None for its items -> the variable, that of the
        value, what tells the value from others.
    """
    effects = output.side_effects
    stored = effects.store_attr_mutations
    found: dict[tuple[int, str | None], tuple[Any, Any, Any]] = {
        (id(of), name): (of, value, _worth(value))
        for of, values in stored.items()
        for name, value in values.items()
    }
    for variable in effects.id_to_variable.values():
        if variable not in stored and effects.is_modified(variable):
            found[id(variable), None] = variable, None, len(vars(variable).get("items", ()))
    return {
        key: effect
        for key, effect in found.items()
        if not type(effect[0].mutation_type).__name__.endswith("New")
    }


def _worth(variable: Any) -> Any:
    """Tell a value from others: a constant, or an object that is the same."""
    from torch._dynamo.variables import ConstantVariable

    held = _held(variable)
    constant = type(variable.unwrap()) is ConstantVariable
    return (type(held), held) if constant else id(held or variable)


def _held(variable: Any) -> Any:
    """Return the object of a variable, without making one of what Dynamo puts off."""
    return vars(variable.unwrap()).get("value")


def _objects(module: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield a module's parts and what they hold, with the attributes that lead there."""
    for name, part in module.named_modules(remove_duplicate=False):
        path = (*filter(None, name.split(".")),)
        yield path, part
        for kept in (part._parameters, part._buffers, vars(part)):
            yield from (((*path, key), value) for key, value in kept.items())


def of_alike_layers() -> Iterator[tuple[Any, str, Any]]:
    """Yield Dynamo's call of a module as one that copies layers."""
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable as Module

    layers = _Layers(Module.call_function)

    @functools.wraps(Module.call_function)
    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        return layers.call(self, tx, args, kwargs)

    yield Module, "call_function", call
