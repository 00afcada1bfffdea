"""What arguments ask of host memory."""

from __future__ import annotations

import pytest

from tests.support.host_files import write_host
from vllm_memprof.accounting.titles import TITLES
from vllm_memprof.engines import ENGINES
from vllm_memprof.engines.host_asks import host_asks
from vllm_memprof.files import read_table
from vllm_memprof.record.host import HostLimit

GIB = 1 << 30
LIMITS = [HostLimit("MemAvailable", "memory", 100 * GIB, 0, "")]


def asked(engine, arguments, model, environ=()):
    found = host_asks(ENGINES[engine], arguments.split(), model, LIMITS, dict(environ))
    return {(each.owner, *each.limits, each.at_most): round(each.bytes / GIB, 2) for each in found}


@pytest.mark.parametrize(
    ("engine", "arguments", "found"),
    [
        ("vllm", "--max-model-len 4096", {}),
        ("vllm", "--kv-offloading-size 2.08 -tp 4",
         {("kv_offload", "memory", "memlock", False): 2.08,  # of all ranks
          ("pinned_rounding", "memory", "memlock", True): 2.08,
          ("message_queues", "memory", "shm", True): 0.94}),
        ("vllm", "--kv-offloading-size 2 --kv-offloading-backend lmcache", {}),
        ("vllm", "--mm-processor-cache-gb 3 --mm-processor-cache-type shm",
         {("mm_cache", "memory", "shm", False): 3.0}),
        ("vllm", "--cpu-offload-gb=2 --data-parallel-size 2",
         {("cpu_weights", "memory", "memlock", False): 4.0}),
        ("vllm", "--distributed-executor-backend ray",
         {("ray_object_store", "memory", "shm", True): 30.0}),
        ("sglang", "--enable-hierarchical-cache --hicache-size 10 --tp 2",
         {("kv_offload", "memory", "memlock", False): 18.63,  # of 10^9 bytes, a rank
          ("pinned_rounding", "memory", "memlock", True): 18.63}),
        ("sglang", "--hicache-size 10", {}),
        ("sglang-diffusion", "--num-gpus 2", {}),
    ],
)  # fmt: skip
def test_asked(engine, arguments, found, tmp_path):
    assert asked(engine, arguments, tmp_path) == found


def test_the_cache_of_a_multimodal_model_is_in_every_api_server_and_engine_core(tmp_path):
    write_host(tmp_path, {"config.json": '{"vision_config": {}}'})
    arguments = "--api-server-count 3 --data-parallel-size 2"
    found = host_asks(ENGINES["vllm"], arguments.split(), tmp_path, LIMITS, {})
    assert [each.bytes // GIB for each in found if each.owner == "mm_cache"] == [12, 8]


def test_the_environment_counts(tmp_path):
    found = asked(
        "vllm", "--tensor-parallel-size 2", tmp_path, {"VLLM_MQ_MAX_CHUNK_BYTES_MB": "64"}.items()
    )
    assert found == {("message_queues", "memory", "shm", True): 0.47}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_owner_has_a_title_and_every_row_a_limit(engine):
    for ask in read_table(ENGINES[engine].folder / "host_asks.toml")["asks"]:
        assert ask["owner"] in TITLES["host_owners"]
        assert set(ask["limits"]) <= {"memory", "shm", "memlock"}
