"""The device by owner at the end of the start-up, what grew by phase, and the communicators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from operator import itemgetter
from typing import NamedTuple

from vllm_memprof.accounting.model import RankReport
from vllm_memprof.accounting.owners.growth import Growth, growth_by_owner
from vllm_memprof.accounting.owners.outside_torch import CommunicatorUse, communicators_of
from vllm_memprof.accounting.readings.quantities import TORCH_ROWS
from vllm_memprof.accounting.titles import TITLES, how_title, title_in
from vllm_memprof.document import MUTED, NOT_MEASURED, PLAIN, TOTAL, Row, Section
from vllm_memprof.record.spans import UNEXPLAINED, ComponentRow, DeviceMemory, device_after
from vllm_memprof.report.sections.base import Sheet, draw, fitting
from vllm_memprof.tables import COUNT, GIB4, MIB, WIDE, Column, Look
from vllm_memprof.text import join, text
from vllm_memprof.units import MIB as MIB_BYTES
from vllm_memprof.units import sum_or_none

#: Moments at which a reader wants the whole device: the latest of them that a rank reached.
_DEVICE_MOMENTS = ("warm_up", "kv_cache_alloc", "profile_run", "weight_load", "device_init")
#: Parts of torch's segments, which two rows divide in another way, stand below the second.
_BELOW = {"allocated and reserved_not_allocated": "reserved_not_allocated"}
_COMMUNICATOR, _COMMUNICATORS = "communicator:", "communicators"
#: The rows of torch's segments are one column of growth: the table of phases divides them.
_SEGMENTS = "torch"
#: Characters between two columns, and those that a table needs at its sides.
_GAP, _SIDES = 2, 2
#: Passages through the same place in a rank that are still listed one by one.
_LISTED_PASSAGES = 8
#: Ranks of a communicator that are listed one by one.
_LISTED_RANKS = 4


# The device


def device(sheet: Sheet, rank: RankReport) -> Iterator[Section]:
    """Return the device by owner at the end of the start-up, or as far as a rank got."""

    def look(row: ComponentRow) -> Look:
        muted = row.part_of or row.component == UNEXPLAINED
        return Look(MUTED if muted else PLAIN, indent=int(row.part_of is not None))

    for phase in _DEVICE_MOMENTS:
        if (memory := device_after(rank.phases, phase)) is not None:
            rest, total = memory.unexplained_bytes, None
            if rest is not None:
                total = rest + sum(row.bytes or 0 for row in memory.rows)
            cells = [text("device total"), GIB4(total), COUNT(total), "", *[""] * sheet.wide]
            rows = [*_owners(memory), Row(cells, style=TOTAL, mark="=")]
            listed = [*memory.rows, *(each for each in memory.parts if each.part_of == "allocated")]
            figures = {
                "phase": phase,
                "empty": ", ".join(row.component for row in listed if row.bytes == 0),
                "unknown": ", ".join(row.component for row in listed if row.bytes is None),
            }
            unread = [
                text(
                    "{title}: {not_measured} ({reason})",
                    title=title_in("readings", what),
                    not_measured=NOT_MEASURED,
                    reason=why,
                )
                for what, why in rank.unread.items()
            ]
            yield draw(
                sheet,
                "device",
                rows,
                figures,
                unread,
                look,
                owner=lambda row: (
                    text("of which {component}", row) if row.part_of else row.component
                ),
                how_read=how_title,
            )
            return


def _owners(memory: DeviceMemory) -> Iterator[ComponentRow]:
    """Yield the owners that hold something, each with its parts; all but the parts add up."""
    rest = ComponentRow(
        UNEXPLAINED,
        memory.unexplained_bytes,
        memory.unexplained_how,
        text("all unexplained memory"),
    )
    for row in (*memory.rows, rest):
        if row.bytes or row is rest:
            yield row
        for part in memory.parts:
            below = _BELOW.get(part.part_of or "", part.part_of)
            if below == row.component and part.bytes and (part.bytes != row.bytes or row is rest):
                yield part


# Growth


class _Grown(NamedTuple):
    """What grew in a phase, before it, or in several passages through it."""

    name: str
    indent: int
    gap: bool  # between two phases
    owners: dict[str, int | None]  # as columns have them

    def of(self, *names: str) -> int | None:
        return sum_or_none(self.owners.get(name) for name in names)


def _grown_mib(size: int | None) -> str:
    return "" if size == 0 else MIB(size)


def growth(sheet: Sheet, rank: RankReport) -> Iterator[Section]:
    """Return growth by phase and owner, MiB; owners and phases without any are left out."""
    grown = [row for row in _grown(rank, sheet.width) if any(row.owners.values())]
    moved: dict[str, float] = {}
    for row in grown:
        for name, size in row.owners.items():
            moved[name] = max(moved.get(name, 0), abs(size or 0))
    if not any(moved.values()):
        return
    titles_of = {
        name: TITLES["grown"].get(name, name.removeprefix(_COMMUNICATOR).replace("_", " "))
        for name, size in moved.items()
        if size
    }
    sizes = {
        name: _GAP
        + max(map(len, (*title.split("\n"), *(_grown_mib(row.of(name)) for row in grown))))
        for name, title in titles_of.items()
    }
    room = sheet.width - _SIDES - max(2 * row.indent + len(row.name) for row in grown)
    shown = list(sizes)
    if sum(sizes.values()) > room:  # those that moved least share a column
        moved |= dict.fromkeys((_SEGMENTS, UNEXPLAINED), inf)
        shown = fitting(sizes, moved, room - max(_GAP + len("owners"), *sizes.values()))
    folded = [name for name in sizes if name not in shown]

    def of(*names: str) -> Callable[[_Grown], int | None]:
        return lambda row: row.of(*names)

    columns = [
        *(Column(titles_of[name], of(name), _grown_mib) for name in shown),
        Column("other\nowners", of(*folded), _grown_mib, bool(folded)),
    ]
    figures = {
        "folded": join(", ", [titles_of[name] for name in folded]),
        "gap": any(row.gap for row in grown),
    }
    yield draw(sheet, "growth", grown, figures, columns=columns)


def _grown(rank: RankReport, width: int) -> list[_Grown]:
    """Return growth in the order of the phases; of many passages through a place one row.

    Torch is one owner, and so are the communicators where they are many.
    """
    places: dict[tuple[str, int], list[Growth]] = {}
    for row in growth_by_owner(rank):
        if row.phase != "empty_cache":
            places.setdefault((row.place, row.depth), []).append(row)
    found: list[tuple[int, bool, _Grown]] = []
    for rows in places.values():
        for bundle in [rows] if len(rows) > _LISTED_PASSAGES else [[row] for row in rows]:
            first, sizes = bundle[0], dict[str, list[int | None]]()
            named = sum(name.startswith(_COMMUNICATOR) for name in first.owners)
            many = named > (3 if width >= WIDE else 1)
            for name, size in (entry for row in bundle for entry in row.owners.items()):
                owner = _SEGMENTS if name in TORCH_ROWS else name
                if many and name.startswith(_COMMUNICATOR):
                    owner = _COMMUNICATORS
                sizes.setdefault(owner, []).append(size)
            owners = {owner: sum_or_none(own) for owner, own in sizes.items()}
            name = f"{first.phase} x{len(bundle)}" if len(bundle) > 1 else first.phase
            gap = first.after is not None
            shown = text("before {phase}", phase=name) if gap else name
            found.append((first.order, not gap, _Grown(shown, first.depth, gap, owners)))
    return [row for _, _, row in sorted(found, key=itemgetter(0, 1))]


# KV connectors


def connectors(sheet: Sheet, rank: RankReport) -> Iterator[Section]:
    """Return what the KV connectors of a rank take, on device and host."""
    titles = TITLES["connector_owners"]
    rows = sorted(rank.connectors, key=lambda row: row.part_of is not None)
    if not rows:
        return
    figures: dict[str, object] = {
        place: sum(each.bytes or 0 for each in rows if each.place == place and not each.part_of)
        for place in TITLES["places"]
    }
    figures["held"] = any(each.part_of for each in rows)
    unknown = [titles[each.owner] for each in rows if each.bytes is None]
    yield draw(
        sheet,
        "connectors",
        rows,
        {**figures, "unknown": join(", ", unknown)},
        look=lambda row: Look(MUTED if row.part_of else PLAIN, indent=int(row.part_of is not None)),
        owner=lambda row: (
            text("of which {component}", component=titles[row.owner])
            if row.part_of
            else titles[row.owner]
        ),
        name=lambda row: row.connector or text("all"),
        where=lambda row: TITLES["places"][row.place],
        how_read=how_title,
    )


# Communicators


def communicators(sheet: Sheet, rank: RankReport) -> Iterator[Section]:
    """Return communicators in the order of their first collectives."""

    def members(each: CommunicatorUse) -> str:
        ranks = each.ranks
        if ranks is None or len(ranks) <= _LISTED_RANKS:
            return ",".join(map(str, ranks or "-"))
        return f"{ranks[0]}..{ranks[-1]} ({len(ranks)})"

    def buffers(each: CommunicatorUse) -> str | None:
        size = each.buffer_bytes
        return None if size is None else f"2 x {size // 2 // MIB_BYTES} MiB"

    sources = {"default": text("HCCL's default"), "": None}
    if rows := communicators_of(rank):
        yield draw(
            sheet,
            "communicators",
            rows,
            group=lambda each: " ".join(each.names) or None,
            members=members,
            buffers=buffers,
            set_by=lambda each: sources.get(each.buffer_source, each.buffer_source),
            used_in=lambda each: ", ".join(filter(None, (each.phase or "-", each.op))),
        )
