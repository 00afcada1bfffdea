"""An engine's KV-cache equation, a row of ``equations.toml``; ``accounting.budget`` evaluates it.

The file has ``terms`` and ``stages`` by their names, ``forms``, which are what the rows of an id
have in common, and ``rows``, in the order of their releases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_memprof.files import read_table

Figures = Mapping[str, "int | float | None"]

#: The terms of a rounding down to whole pages: as a log tells it, and as the page is known.
HALF_A_PAGE, WHOLE_PAGES = "page_rounding", "whole_pages"
#: The figure of a size that the user has fixed.
FIXED_SIZE = "kv_cache_memory_bytes_arg"


@dataclass(frozen=True)
class Term:
    """A term of an equation, in names of ``schema.FIGURES`` and of lines of a log.

    ``figure`` is the engine's own value. Where it was not recorded, the sum of ``plus`` less the
    sum of ``minus`` stands in for it; where both are known, they have to agree
    (``accounting.build`` checks).
    """

    name: str  # of ``accounting.readings.quantities``, as in report.json
    figure: str | None = None
    plus: tuple[str, ...] = ()
    minus: tuple[str, ...] = ()
    floor_zero: bool = False  # max(0, ...)
    subtracted: bool = True  # False: the engine reports it and subtracts it from nothing
    #: A figure, 1 or 0: the engine says whether it subtracts the term; it outranks ``subtracted``.
    subtracted_if: str | None = None
    optional: bool = False  # a run without the figure has nothing of the kind
    apart: bool = False  # subtracted after the sum of the others: a float is rounded in between
    #: Quantities that the term adds up; the last is what the others leave of it, so that the parts
    #: are the term to the byte. Empty: the term is a quantity of its own.
    parts: tuple[str, ...] = ()
    #: Terms whose sum the figure is: it takes their place where one of them is unknown or is not
    #: subtracted.
    stands_for: tuple[str, ...] = ()

    def is_subtracted(self, figures: Figures) -> bool:
        said = figures.get(self.subtracted_if) if self.subtracted_if is not None else None
        return self.subtracted if said is None else bool(said)

    def derived(self, figures: Figures) -> int | None:
        """Return the value from its ingredients; None where one is unknown."""
        if not self.plus:
            return None
        added, taken = ([figures.get(name) for name in side] for side in (self.plus, self.minus))
        if None in added or None in taken:
            return None
        total = sum(int(value or 0) for value in added) - sum(int(value or 0) for value in taken)
        return max(0, total) if self.floor_zero else total

    def value(self, figures: Figures) -> int | None:
        direct = figures.get(self.figure) if self.figure is not None else None
        if direct is None:
            return self.derived(figures)
        return max(0, int(direct)) if self.floor_zero else int(direct)

    def half_unit(self, figures: Figures, half_units: Mapping[str, int]) -> int:
        """Return half of the last printed digit of the value, bytes.

        Where the value is derived: that of its ingredients together.
        """
        if self.figure is not None and figures.get(self.figure) is not None:
            return half_units.get(self.figure, 0)
        return sum(half_units.get(name, 0) for name in (*self.plus, *self.minus))


@dataclass(frozen=True)
class BudgetStage:
    """What a release makes of the device's budget before it returns it; the figures say whether.

    From here on the engine counts bytes by which it divides the KV cache into blocks, and no longer
    bytes of the device. A stage whose figures are unknown was not run.
    """

    name: str  # a quantity: what the device holds less than the engine counts
    figure: str  # a factor; the numerator of one; or, with ``replaces``, what is returned
    over: str | None = None  # figure: the denominator
    replaces: bool = False  # the figure is the result: the engine plans blocks and no factor
    printed_half_unit: float = 0.0  # half of the last digit that a log prints of the factor

    @property
    def figures(self) -> tuple[str, ...]:
        return (self.figure,) if self.over is None else (self.figure, self.over)

    def factor(self, figures: Figures) -> float | None:
        """Return the bytes that the engine counts per byte of the device; None: not run."""
        value = figures.get(self.figure)
        if value is None or self.over is None:
            return value
        over = figures.get(self.over)
        return value / over if over else None

    def apply(self, budget: float | int, figures: Figures) -> int | None:
        """Return what the engine goes on with, in whole bytes as it rounds; None: not run."""
        factor = self.factor(figures)
        if factor is None:
            return None
        return int(figures[self.figure] or 0) if self.replaces else int(budget * factor)


@dataclass(frozen=True)
class Equation:
    """``result = round((requested - sum of the subtracted terms) // divisor)``, step by step.

    ``stages`` follow, in their order.
    """

    id: str
    engine: str  # as a report names it
    versions: str  # PEP 440 specifier; release candidates included
    read_in: str  # releases whose source was read
    cite: str  # file::symbol
    terms: tuple[Term, ...]
    #: Figures whose product is the request: a size and a share of it; and that product in words.
    base: str = "device_total_bytes"
    base_title: str = ""  # where it is not the device's total
    share: str = "gpu_memory_utilization"
    asked: str = "device total x utilization"
    request: str = "float"  # float: total * util unrounded; int: truncated; ceil: rounded up
    divisor: int = 1
    floor_zero: bool = False  # the engine clamps a negative budget to 0
    takes_fixed_size: bool = False  # ``FIXED_SIZE``, where given, is returned as it is
    #: A figure, bytes of a page: where it is known, the result goes down to whole pages, and the
    #: term that stands for that rounding in logs is left out.
    pages: str | None = None
    #: A figure in tokens that, where it is known, was taken instead of the result; and its option.
    limited_by: str | None = None
    limit_option: str = ""
    #: Items of ``accounting.readings.quantities`` that no term of this equation covers.
    not_subtracted: tuple[str, ...] = ()
    #: Only on devices whose name begins so, or where the form of the log lines says it.
    only: str | None = None
    #: Figures to be read around the last empty_cache of the profile run.
    from_snapshots: tuple[str, ...] = ()
    #: A term holds what other processes have on the device, although the request is a share of
    #: the whole device. (vllm-ascend#7308)
    subtracts_neighbours: bool = False
    #: The engine raises at its start where less is free than it requests.
    #: (vllm/v1/worker/utils.py::request_memory; NPUWorker.init_device, from vllm-ascend 0.15)
    checks_free: bool = True
    stages: tuple[BudgetStage, ...] = ()
    #: When the engine takes its first snapshot, by its process groups: "before" it makes them,
    #: "after", or "either", by the release.
    starts: str = "before"
    #: At the end of a start the engine prints sizes for --kv-cache-memory-bytes, made of weights,
    #: peak activation, non-torch increase and captured graphs. (``accounting.budget.serving_peak``)
    suggests: bool = False

    @property
    def formula(self) -> str:
        return self.formula_of(self.terms)

    def formula_of(self, terms: Sequence[Term]) -> str:
        """Return the equation in names, with these of its terms."""
        names = [
            term.name
            for term in terms
            if (term.subtracted or term.subtracted_if) and not term.stands_for
        ]
        asked = self.asked
        asked = asked if self.request == "float" else f"{self.request}({asked})"
        rest = f"{asked} - ({' + '.join(names)})"
        rest = f"({rest}) // {self.divisor}" if self.divisor != 1 else rest
        return f"max(0, int({rest}))" if self.floor_zero else f"int({rest})"


def read_equations(folder: Path) -> tuple[Equation, ...]:
    """Return the rows of an engine's folder; none of an engine that sizes no KV cache."""
    path = folder / "equations.toml"
    if not path.exists():
        return ()
    table = read_table(path)
    terms = {name: Term(**{"name": name, **each}) for name, each in table["terms"].items()}
    stages = {name: BudgetStage(name, **each) for name, each in table.get("stages", {}).items()}
    rows = [{**table["forms"][row["id"]], **row} for row in table["rows"]]
    return tuple(
        Equation(
            **{
                **row,
                "terms": tuple(terms[name] for name in row["terms"]),
                "stages": tuple(stages[name] for name in row.get("stages", ())),
            }
        )
        for row in rows
    )
