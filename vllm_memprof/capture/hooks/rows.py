"""Rows of the table of hooks, from ``hooks.json`` of a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from vllm_memprof.capture.actions import begin_phase, end_phase
from vllm_memprof.capture.hook import Half, Hook
from vllm_memprof.files import read_table


def read_rows(
    folder: Path, enter: Mapping[str, Half | None], leave: Mapping[str, Half | None]
) -> Iterator[Hook]:
    """Yield the rows of ``hooks.json`` in an engine's folder.

    A row has ``targets`` of every backend, or those of an NPU (``npu``), of CUDA (``cuda``) or of
    both, which are two rows. Its other keys are fields of ``Hook``; ``like`` names the row whose
    actions it has.

    Args:
        folder: of the engine.
        enter: what runs before a call, by the id of the row; None: nothing. Where it says nothing,
            a row with a phase opens it.
        leave: what runs after a call; it closes the phase.
    """
    table = read_table(folder / "hooks.json")
    kinds = {"targets": ("", ("npu", "cuda")), "npu": ("", ("npu",)), "cuda": ("cuda.", ("cuda",))}
    for row in table["rows"]:
        fields = {"engine": table["engine"], "versions": table["versions"], "phase": None, **row}
        place, phase = fields.pop("like", row["id"]), fields["phase"]
        fields["enter"] = enter.get(place, phase and begin_phase)
        fields["leave"] = leave.get(place, phase and end_phase)
        targets = {kind: fields.pop(kind) for kind in kinds if kind in row}
        for kind, names in targets.items():
            prefix, backends = kinds[kind]
            of_backend = {"id": prefix + row["id"], "targets": names, "backends": backends}
            yield Hook(**{**fields, **of_backend})
