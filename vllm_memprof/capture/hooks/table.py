"""The hook table: the rows below every engine, those of each, and the rows in force for one.

No engine module is imported. A function that other modules import by name has a target in each of
them: the attribute of the importing module is what counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from vllm_memprof.capture.hook import Hook
from vllm_memprof.capture.versions import in_range
from vllm_memprof.engines import ENGINES
from vllm_memprof.files import read_table

#: What runs before and after a call of a row with a phase, where the row does not say.
_HALVES = {
    "enter": "vllm_memprof.capture.actions:begin_phase",
    "leave": "vllm_memprof.capture.actions:end_phase",
    "done": None,
}


def read_rows(folder: Path) -> Iterator[Hook]:
    """Yield the rows of ``hooks.json`` in a folder.

    A row has ``targets`` of every backend, or those of an NPU (``npu``), of CUDA (``cuda``) or of
    both, which are two rows. ``enter`` and ``leave`` name what runs before and after a call, as
    ``module:function``; null is nothing. Its other keys are fields of ``Hook``.
    """
    table = read_table(folder / "hooks.json")
    kinds = {"targets": ("", ("npu", "cuda")), "npu": ("", ("npu",)), "cuda": ("cuda.", ("cuda",))}
    for row in table["rows"]:
        fields = {"engine": table["engine"], "versions": table["versions"], "phase": None, **row}
        for half, usual in _HALVES.items():
            if named := fields.setdefault(half, fields["phase"] and usual):
                module, _, function = named.partition(":")
                fields[half] = getattr(import_module(module), function)
        targets = {kind: fields.pop(kind) for kind in kinds if kind in row}
        for kind, names in targets.items():
            prefix, backends = kinds[kind]
            of_backend = {"id": prefix + row["id"], "targets": names, "backends": backends}
            yield Hook(**{**fields, **of_backend})


HOOKS: tuple[Hook, ...] = (
    *read_rows(Path(__file__).parent),
    *(hook for row in ENGINES.values() for hook in read_rows(row.folder)),
)


def rows_in_force(
    backend: str, version: str | None, sampling: bool = False, engine: str = "vllm"
) -> tuple[Hook, ...]:
    """Return the rows in force.

    Args:
        backend: of the process; "": rows of every backend.
        version: of the engine; None: all.
        sampling: also rows that are called in every step.
        engine: whose rows; those of every engine are among them.
    """
    return tuple(
        hook
        for hook in HOOKS
        if hook.engine in (None, engine)
        and (backend in hook.backends if backend else len(hook.backends) > 1)
        and in_range(version, hook.versions)
        and (sampling or not hook.sampling)
    )
