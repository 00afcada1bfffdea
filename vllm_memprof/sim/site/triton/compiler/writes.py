"""Which parameters a kernel writes to, read from its source.

A store goes through a pointer, and the pointer was computed from parameters: every parameter that
flows into it counts, except through a load, as in the analysis of torch. Branches are not told
apart: what one of them writes is written.
"""

import ast
import types

#: Operations whose first argument is written to; as methods (of descriptors), their object is.
STORES = {"store", "atomic_add", "atomic_and", "atomic_cas", "atomic_max", "atomic_min",
          "atomic_or", "atomic_xchg",
          "atomic_xor"}  # fmt: skip


def written_parameters(kernel, seen=()):
    """Names of the parameters; all of them where there is no source."""
    try:
        [function] = ast.parse(kernel.src).body
    except (SyntaxError, ValueError):
        return set(kernel.arg_names)
    origins = _origins(function, kernel.arg_names)
    written = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            for pointer in _pointers_written(node, kernel, (*seen, kernel)):
                written |= _flowing_into(pointer, origins)
    return written


def _origins(function, parameters):
    """Name -> the parameters that its value is computed from."""
    origins = {name: {name} for name in parameters}
    grown = True
    while grown:  # a loop may hand values backwards
        grown = False
        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif (
                isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr))
                and node.value is not None
            ):
                targets = [node.target]
            else:
                continue
            flowing = _flowing_into(node.value, origins)
            for target in targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name) and not flowing <= origins.setdefault(
                        name.id, set()
                    ):
                        origins[name.id] |= flowing
                        grown = True
    return origins


def _flowing_into(node, origins):
    """The parameters that an expression is computed from, loaded values aside."""
    if isinstance(node, ast.Call) and _name_of(node.func) == "load":
        return set()
    if isinstance(node, ast.Name):
        return set(origins.get(node.id, ()))
    return set().union(*(_flowing_into(child, origins) for child in ast.iter_child_nodes(node)))


def _pointers_written(call, kernel, seen):
    """The expressions through which a call writes."""
    name = _name_of(call.func)
    if name in STORES and isinstance(call.func, ast.Attribute):
        owner = call.func.value
        is_module = isinstance(owner, ast.Name) and isinstance(
            _global(kernel, owner.id), types.ModuleType
        )
        if not is_module:
            return [owner]
        return call.args[:1] or [
            keyword.value for keyword in call.keywords if keyword.arg == "pointer"
        ]
    callee = _global(kernel, name) if isinstance(call.func, ast.Name) else None
    if not hasattr(callee, "arg_names") or callee in seen:
        return []
    written = written_parameters(callee, seen)
    given = dict(zip(callee.arg_names, call.args, strict=False))
    given.update((keyword.arg, keyword.value) for keyword in call.keywords)
    return [value for parameter, value in given.items() if parameter in written]


def _name_of(function):
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)


def _global(kernel, name):
    return kernel.fn.__globals__.get(name)
