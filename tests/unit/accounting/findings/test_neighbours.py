"""The finding about other processes on the device, from readings by hand."""

from __future__ import annotations

from tests.unit.accounting.builders import span
from tests.unit.accounting.findings.test_outside_torch import found, report
from tests.unit.accounting.test_owners import taken
from vllm_memprof.units import GIB


def test_other_processes_are_measured_where_the_driver_lists_them() -> None:
    there = [span("device_init", taken(1, others=GIB), taken(2, others=GIB))]
    [finding] = found(report(there), "co-tenant")
    assert (finding.bytes, finding.severity) == (GIB, "warning")
    assert "1.00 GiB by the driver's list of processes" in finding.evidence
    came = [
        span("device_init", taken(1), taken(2)),
        span("warm_up", taken(3), taken(4, others=GIB), 1),
    ]
    [finding] = found(report(came), "co-tenant")
    assert finding.bytes == GIB
    assert "in warm_up" in finding.evidence
    assert not found(report([span("device_init", taken(1), taken(2))]), "co-tenant")
