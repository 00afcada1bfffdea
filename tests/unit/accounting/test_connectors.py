"""What KV connectors take: rows of the table, measured where their tensors were found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.accounting.builders import TOTAL, gib, process, run_of, span
from vllm_memprof.accounting import build_report
from vllm_memprof.accounting.model import ConnectorRow
from vllm_memprof.accounting.owners.connectors import evaluate
from vllm_memprof.capture.connectors import described
from vllm_memprof.record.schema import Snapshot
from vllm_memprof.units import GIB, MIB

KV = 512 * MIB


def at(t_ns: int, allocated: int, outside: int = 0) -> Snapshot:
    return Snapshot(
        t_ns=t_ns, device_total_bytes=TOTAL, device_free_bytes=TOTAL - allocated - outside,
        allocated_bytes=allocated, reserved_bytes=allocated, non_torch_bytes=outside,
    )  # fmt: skip


def rows_of(
    *given: dict[str, Any], spans: tuple[Any, ...] = (), engine: str = "vllm-ascend"
) -> dict[tuple[str | None, str], ConnectorRow]:
    """Return the rows of a rank of two with these connectors, by connector and owner."""
    group = {"type": "FullAttentionSpec", "layers": 4, "block_size": 128, "bytes_per_token": 4096}
    plan = {
        "connectors": given, "kv_transfer": True, "groups": [group], "planned_bytes": [KV, KV],
        "bytes_per_token": 4096, "max_model_len": 1000,
    }  # fmt: skip
    worker = replace(process([*spans]), kv_plan=plan)
    run = run_of(worker, engine=engine, engine_version="0.23.0")
    (rank,) = build_report(run).ranks
    return {(row.connector, row.owner): row for row in rank.connectors}


def connector(name: str, role: str = "kv_both", **arguments: object) -> dict[str, Any]:
    return {"name": name, "role": role, "arguments": arguments}


@pytest.mark.parametrize(
    ("given", "owner", "place", "size"),
    [
        (connector("AscendStoreConnector"), "global_segment", "host", GIB),
        (connector("AscendStoreConnector", global_segment_size="30GB"), "global_segment", "host",
         30 * GIB),
        (connector("AscendStoreConnector", MOONCAKE_GLOBAL_SEGMENT_SIZE="2GB",
                   global_segment_size="30GB"), "global_segment", "host", 2 * GIB),
        (connector("AscendStoreConnector", enable_ssd_offload="true"), "ssd_buffer", "host",
         1280 * MIB),
        (connector("AscendStoreConnector", backend="memcache"), "pool_client", "host", None),
        (connector("LMCacheConnectorV1"), "local_cpu", "host", 5 * GIB),
        (connector("OffloadingConnector", cpu_bytes_to_use=float(GIB)), "kv_offload", "host",
         GIB // 2),
        (connector("SimpleCPUOffloadConnector"), "kv_offload", "host", 4 * GIB),
        (connector("SimpleCPUOffloadConnector", cpu_bytes_to_use_per_rank=MIB), "kv_offload",
         "host", MIB),
        (connector("NixlConnector", kv_buffer_device="cpu"), "pinned_mirror", "host", KV),
        (connector("MooncakeLayerwiseConnector", "kv_producer", prefill_tp_size=2,
                   decode_tp_size=1), "layer_buffer", "device", KV // 4 + 8 * MIB),
        (connector("MooncakeLayerwiseConnector", "kv_producer", prefill_tp_size=2,
                   decode_tp_size=1, HCCL_BUFFSIZE="1024"), "resharding_communicator", "device",
         2 * GIB),
        (connector("MooncakeConnectorV1", "kv_consumer", prefill_tp_size=2, decode_tp_size=1),
         "pull_buffer", "device", 1_024_000),
        (connector("MooncakeConnectorV1", ASCEND_BUFFER_POOL="4:8"), "buffer_pool", "device",
         32 * MIB),
    ],
)  # fmt: skip
def test_sizes_follow_from_arguments(
    given: dict[str, Any], owner: str, place: str, size: int | None
) -> None:
    row = rows_of(given)[given["name"], owner]
    assert (row.place, row.bytes) == (place, size)
    at_most = owner in ("pull_buffer", "layer_buffer", "resharding_communicator")
    assert row.how == ("estimated" if at_most else "derived")
    assert "::" in row.source or owner in ("pool_client", "ssd_buffer", "buffer_pool")


def test_what_does_not_apply_has_no_row() -> None:
    fabric = connector("AscendStoreConnector", ASCEND_ENABLE_USE_FABRIC_MEM="1")
    assert ("AscendStoreConnector", "local_buffer") not in rows_of(fabric)
    equal = connector(
        "MooncakeLayerwiseConnector", "kv_producer", prefill_tp_size=2, decode_tp_size=2
    )
    assert [owner for _, owner in rows_of(equal)] == ["alignment"]
    assert rows_of(connector("NixlConnector"), engine="vllm") == {}


def test_several_connectors_are_a_sum_and_tensors_are_measured() -> None:
    """Two connectors of a MultiConnector, whose tensors were found when they registered."""
    kept = [
        {"attribute": "worker.cpu_kv_caches", "place": "host", "bytes": 100, "count": 2,
         "pinned_bytes": 128},
        {"attribute": "worker.staging", "place": "device", "bytes": MIB, "count": 1,
         "pinned_bytes": 0},
    ]  # fmt: skip
    full = gib(1) + KV + 4 * 2 * 2 * MIB
    spans = (
        span("kv_cache_alloc", at(1, gib(1)), at(20, full + 3 * MIB, 64 * MIB), 0),
        span("kv_connector", at(2, gib(1)), at(3, gib(1), 64 * MIB), 1, parent=0, depth=1),
        span("kv_register", at(10, full), at(11, full), 2, parent=0, depth=1,
             detail={"tensors": [], "registered_bytes": KV}),
        span("kv_register", at(12, full), at(13, full + 3 * MIB), 3, parent=0, depth=1,
             detail={"tensors": kept, "registered_bytes": 0}),
    )  # fmt: skip
    found = rows_of(
        connector("MooncakeConnectorV1"), connector("SimpleCPUOffloadConnector"), spans=spans
    )
    sizes = {key: (row.bytes, row.how, row.part_of) for key, row in found.items()}
    offload = "SimpleCPUOffloadConnector"
    assert sizes == {
        (offload, "kv_offload"): (100, "measured", None),
        (offload, "pinned_rounding"): (28, "derived", None),
        (offload, "other_device"): (MIB, "measured", None),
        (None, "alignment"): (16 * MIB, "measured", None),
        # of 3 MiB that were allocated, one is known by its attribute
        (None, "other_device"): (2 * MIB, "measured", None),
        (None, "links"): (64 * MIB, "measured", None),
        (None, "registered"): (KV, "measured", "kv_cache"),
    }


def test_a_formula_with_an_unknown_name_is_unknown() -> None:
    assert evaluate("layers * 2 MiB + 1 KiB", {"layers": 3}) == 6 * MIB + 1024
    assert evaluate("layers * 2 MiB", {"layers": None}) is None


def test_settings_are_sizes_numbers_and_switches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Of variables, files and extra configuration; what may be a secret is none of them."""
    path = tmp_path / "mooncake.json"
    path.write_text('{"global_segment_size": "30GB", "master": "10.0.0.1:50051", "token": "abc"}')
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(path))
    monkeypatch.setenv("ASCEND_BUFFER_POOL", "4:8")
    inner = {
        "kv_connector": "A", "kv_role": "kv_both",
        "kv_connector_extra_config": {"prefill": {"tp_size": 2}, "key": "s3cret", "lazy": True},
    }  # fmt: skip
    given = {"kv_connector": "MultiConnector",
             "kv_connector_extra_config": {"connectors": [inner, inner]}}  # fmt: skip
    first, second = described(given)
    assert first == second
    known = {name: value for name, value in first["arguments"].items() if value is not None}
    assert first["name"] == "A"
    assert known == {
        "ASCEND_BUFFER_POOL": "4:8", "global_segment_size": "30GB", "prefill_tp_size": 2,
        "lazy": True,
    }  # fmt: skip
