"""The tables of a failed allocation, from recorded figures and from hand-built ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.runs import reports_of
from vllm_memprof.accounting.model import FreeBlocks, Oom, Remedy, Report
from vllm_memprof.document import Section
from vllm_memprof.record.failures import Item, StepRequest
from vllm_memprof.report.sections import sections


def with_oom(**values: object) -> Report:
    """The recorded run that ran out of memory, with fields of its failure replaced."""
    [report] = reports_of("recorded_oom")
    [rank] = report.ranks
    assert rank.oom is not None
    changed: Oom = replace(rank.oom, **values)  # type: ignore[arg-type]
    return replace(report, ranks=[replace(rank, oom=changed)])


def section(report: Report, title: str) -> Section:
    return next(each for each in sections(report, 120, ["oom"]) if each.title.startswith(title))


def rows(found: Section) -> dict[str, list[str]]:
    return {row.cells[0]: row.cells[1:] for row in found.rows}


def test_the_recorded_failure_is_told_with_its_owners_and_remedies() -> None:
    [report] = reports_of("recorded_oom")
    told = rows(section(report, "The allocation that failed"))
    assert told["asked for"] == ["0.0215 GiB"]
    assert told["in phase"] == ["graph_capture"]
    assert "largest free block that it could have used" not in told  # recorded without segments
    owners = section(report, "The device when")
    sizes = [
        int(row.cells[2].replace(",", "")) for row in owners.rows if not row.indent and not row.mark
    ]
    total = report.ranks[0].device_total_bytes
    assert total is not None
    assert sum(sizes) == total
    remedies = rows(section(report, "Options that avoid"))
    assert remedies["--kv-cache-memory-bytes 34933172838"][:2] == ["0.0180", "yes"]
    assert remedies["fewer sizes in --cudagraph-capture-sizes"][:2] == ["-", "not known"]


def test_free_blocks_add_up_and_say_how_they_were_read() -> None:
    blocks = FreeBlocks("1", 3, False, False, False, 7, 50, 0, 100, 20, 4, 0, 6)
    found = section(with_oom(free_blocks=blocks), "Reserved memory without")
    assert rows(found) == {
        "in blocks large enough": ["0.0000", "0"],
        "in blocks too small": ["0.0000", "100"],
        "of other streams": ["0.0000", "20"],
        "in the other pool, of small or of large blocks": ["0.0000", "4"],
        "freed, awaited by a stream": ["0.0000", "6"],
        "reserved, not allocated": ["0.0000", "130"],
    }
    assert found.notes[0].startswith("read after the failure, when 7 bytes less were allocated")
    assert found.notes[1].startswith("which of 3 streams asked is not known")
    exact = replace(blocks, exact=True, freed_bytes=0, streams=1, expandable=True)
    found = section(with_oom(free_blocks=exact), "Reserved memory without")
    assert found.notes == [
        "read after the failure; nothing was allocated or freed between both",
        "segments of the pool are expandable",
    ]


def test_the_step_is_named_with_its_images() -> None:
    image = Item("image", 16384, [4096, 4096], None, True)
    step = [StepRequest(f"{at}-x", 5, 16400, [image]) for at in range(6)]
    found = section(
        with_oom(requests=step, stage="mm_merge", site="utils.py:500", phase="request"),
        "The allocation that failed",
    )
    values = [row.cells for row in found.rows]
    assert ["part of the step", "merge of embeddings"] in values
    assert ["called at", "utils.py:500"] in values
    listed = [value for name, value in values if name == "in the step"]
    assert len(listed) == 4
    assert listed[0] == (
        "request 0-x: 5 tokens in the step, prompt 16,400 tokens, image 4096x4096, encoded in this "
        "step"
    )
    assert found.notes == ["2 more requests were in the step"]


@pytest.mark.parametrize(
    ("bound", "how", "enough", "size", "word"),
    [
        ("exact", "derived", True, "1.0000", "yes"),
        ("at_most", "derived", None, "at most 1.0000", "not known"),
        ("at_least", "estimated", True, "at least 1.0000", "yes, if so"),
        ("exact", "derived", False, "1.0000", "no"),
    ],
)
def test_a_remedy_is_no_surer_than_its_grounds(
    bound: str, how: str, enough: bool | None, size: str, word: str
) -> None:
    remedy = Remedy("x", "--x", 1 << 30, bound, how, enough, "because")
    found = section(with_oom(remedies=[remedy]), "Options that avoid")
    assert rows(found) == {"--x": [size, word, "because"]}


def test_what_shrinks_the_profile_says_that_the_kv_cache_grows() -> None:
    remedy = Remedy("image_size", "--x", 1, "at_least", "estimated", True, "because")
    found = section(with_oom(remedies=[remedy]), "Options that avoid")
    assert found.notes[-1].endswith("keep its size with --kv-cache-memory-bytes 34952466636")
