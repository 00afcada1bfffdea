"""What a worker holds once its model is loaded: parameters, buffers, and tensors beside both.

Nothing is kept, copied, moved or synchronised: names, dtypes, shapes, and the address and size of
each storage are read on the host, each storage once, under the name of the first that has it. The
allocator's list of blocks, which it keeps on the host too, says how much lies behind each. About
10 µs a tensor.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from vllm_memprof.capture.attributes import NAMES, Fields, reach
from vllm_memprof.capture.failure import allocator_settings
from vllm_memprof.capture.recorder import Recorder
from vllm_memprof.options import is_expandable
from vllm_memprof.record.weights import BUFFER, KINDS, PARAMETER, SHARED, fold, folded

_HELD = NAMES["weights"]
_PACKAGES = tuple(f"{name}." for name in _HELD["packages"])
#: Attributes of a module that torch keeps its tensors in.
_OF_TORCH = {PARAMETER: "_parameters", BUFFER: "_buffers"}
#: Steps from a module to a tensor: a table of objects, each with an object that has it.
_DEEPEST = 4
#: Entries of a table; one with more is of words or tokens.
_LONGEST = 4096


def tell(recorder: Recorder, holder: Any, before: Iterable[int] = (), drafts: bool = False) -> None:
    """Write a ``weights`` event.

    Args:
        recorder: of a worker.
        holder: of the models: a worker, or a model runner.
        before: addresses of blocks that were in use before the model was loaded.
        drafts: the holder's only model drafts.
    """
    found = {which: _first(holder, which) for which in ("target", "draft")}
    if drafts:
        found = {"draft": found["target"]}
    models = {which: model for which, model in found.items() if hasattr(model, "named_modules")}
    if "target" not in models and not (drafts and models):
        return
    blocks = blocks_of(recorder)
    config = _first(holder, "config")
    types: dict[str, dict[str, list[int]]] = {}
    for full, kind in (_first(holder, "quantized") or {}).items():
        if kind != "FLOAT" and full.endswith("weight"):
            name, layer = folded(full)
            types.setdefault(name, {}).setdefault(kind, []).extend(layer)
    recorder.emit(
        "weights",
        rows=fold(_tensors(models, blocks, {*before})),
        config=json.loads(json.dumps(config.to_dict(), default=str)) if config else {},
        ranks={name: size for name in ("tp", "pp", "dp") if (size := _first(holder, name))},
        quantized=types,
        expandable=is_expandable(allocator_settings()),
    )


def _first(holder: Any, of: str) -> Any:
    """Return what lies at the first of some paths that has something."""
    values = (reach(holder, path) for path in _HELD[of])
    return next((value for value in values if value is not None), None)


def blocks_of(recorder: Recorder) -> dict[int, int]:
    """Return address -> size of the allocator's blocks that are in use."""
    found = {}
    with suppress(Exception):  # a pluggable allocator has no list
        for segment in recorder.probe.runtime.memory_snapshot():
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] != "inactive":
                    found[address] = block["size"]
                address += block["size"]
    return found


def _tensors(models: dict[str, Any], blocks: dict[int, int], before: set[int]) -> Iterator[Any]:
    """Yield the tensors of the models as ``fold`` takes them, parameters of all modules first.

    Last come those that modules of the engine's code hold: tables that layers share.
    """
    modules = [
        (which, name, module)
        for which, model in models.items()
        for name, module in model.named_modules()
    ]
    own = {id(module): 0 for _, _, module in modules}
    seen: set[int] = set()
    unnamed = blocks.keys() - before
    shared = [
        (SHARED, "", name, module)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in _HELD["shared"] and module
    ]
    for kind, which, prefix, module in [
        *((kind, *of) for kind in KINDS for of in modules),
        *shared,
    ]:
        if kind == SHARED and blocks and not unnamed:
            return
        facts = None
        for name, tensor in _held(module, kind, own):
            with suppress(Exception):  # a tensor of a kind that has no storage of its own
                storage = tensor.untyped_storage()
                address, size = storage.data_ptr(), storage.nbytes()
                others = address in before and (kind not in _OF_TORCH or "target" not in models)
                known = address in seen or others
                if tensor.device.type in ("cpu", "meta") or not size or known:
                    continue
                seen.add(address)
                unnamed.discard(address)
                facts = _facts(module) if facts is None else facts
                stored = kind == BUFFER and name not in module._non_persistent_buffers_set
                yield (
                    f"{prefix}.{name}" if prefix else name,
                    {
                        "dtype": str(tensor.dtype).removeprefix("torch."),
                        "shape": list(tensor.shape),
                        "kind": PARAMETER if stored else kind,
                        "draft": which == "draft",
                        "facts": facts,
                    },
                    {"bytes": size, "block_bytes": blocks.get(address)},
                )


def _held(module: Any, kind: str, own: dict[int, int]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of one kind that a module has, by name.

    Args:
        module: of torch, or one of the engine's code.
        kind: of the tensors.
        own: objects that were looked into, by address: steps to each from what has it.
    """
    if kind in _OF_TORCH:
        yield from reach(module, _OF_TORCH[kind]).items()
        return
    tensor_type = sys.modules["torch"].Tensor
    waiting = [(name, value, 0) for name, value in list(vars(module).items())]
    while waiting:
        name, value, depth = waiting.pop()
        cls = type(value)  # asked for no more than that: a lazy table imports what it is asked for
        if issubclass(cls, tensor_type):
            yield name, value
            continue
        if cls is dict:
            inside = value
        elif cls in (list, tuple):
            inside = dict(enumerate(value))
        elif str(cls.__module__).startswith(_PACKAGES):
            inside = getattr(value, "__dict__", {})  # of the engine's own, as attention has
        else:
            continue
        if depth < own.get(id(value), _DEEPEST) and len(inside) <= _LONGEST:
            own[id(value)] = depth
            waiting += ((f"{name}.{key}", each, depth + 1) for key, each in inside.items())


def _facts(module: Any) -> Fields:
    """Return the integers of a module that say how the engine divides what it holds."""
    found = {
        name: next((size for of in paths if type(size := reach(module, of)) is int), None)
        for name, paths in _HELD["facts"].items()
    }
    for whole, part in _HELD["divided"].items():
        if found["tp_size"] is None and (size := reach(module, part)):
            found["tp_size"] = reach(module, whole) // size
    if any(base.__name__ in _HELD["whole"] for base in type(module).__mro__):
        found["tp_size"] = 1
    return {name: value for name, value in found.items() if value is not None}
