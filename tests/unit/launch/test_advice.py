"""What is advised after the messages by which engines refuse a model."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from vllm_memprof.engines import ENGINES, VLLM
from vllm_memprof.launch import advice as module
from vllm_memprof.launch.engine_log import LogPump
from vllm_memprof.launch.verdict import find_error_line

#: As vLLM 0.23.0 and transformers 5.5.4 say it, over the lines that they take.
UNKNOWN_TYPE = """\
(APIServer pid=7) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
(APIServer pid=7)   Value error, The checkpoint you are trying to load has model type `foo` \
but Transformers does not recognize this architecture. This could be because of an issue with the \
checkpoint, or because your version is old.
(APIServer pid=7)     For further information visit https://errors.pydantic.dev/2.13/v/value_error
"""
UNKNOWN_ARCHITECTURE = """\
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, Model architectures ['BarForCausalLM'] are not supported for now. \
Supported architectures: dict_keys([])
"""
#: As vLLM 0.13.0 and pydantic 2.14 refuse --gpu-memory-utilization 1.01.
OUT_OF_RANGE = """\
{process}pydantic_core._pydantic_core.ValidationError: 1 validation error for CacheConfig
{process}gpu_memory_utilization
{process}  Input should be less than or equal to 1 [type=less_than_equal, input_value=1.01]
{process}    For further information visit https://errors.pydantic.dev/2.14/v/less_than_equal
"""


def error_lines(log, tmp_path):
    """What the launcher keeps of an engine's output."""
    pump = LogPump(tmp_path / "engine.log")
    os.write(pump.fd, log.encode())
    pump.start()
    pump.join(10)
    return list(pump.error_lines)


@pytest.mark.parametrize(
    ("log", "found", "advice"),
    [
        (
            UNKNOWN_TYPE,
            "Value error, The checkpoint you are trying",
            "does not know this model_type",
        ),
        (
            UNKNOWN_ARCHITECTURE,
            "Value error, Model architectures ['BarForCausalLM']",
            "no such architecture",
        ),
    ],
)
def test_the_line_that_says_what_is_wrong(tmp_path, log, found, advice):
    line = find_error_line(error_lines(log, tmp_path))
    assert line.startswith(found)
    assert advice in advise(f"the engine exited with status 1 before any worker reported: {line}")


@pytest.mark.parametrize("process", ["", "(APIServer pid=7) "])
def test_an_argument_out_of_its_range_is_named(tmp_path, process):
    line = find_error_line(error_lines(OUT_OF_RANGE.format(process=process), tmp_path))
    said = "gpu_memory_utilization: Input should be less than or equal to 1 ["
    assert line.startswith(said)


def test_tensor_parallel_size():
    text = (
        "Value error, Total number of attention heads (28) must be divisible by "
        "tensor parallel size (8)."
    )
    assert "divides the model's attention heads" in advise(text)


def test_nothing_is_advised_without_knowledge():
    assert advise("worker TP1 (pid 3) was killed by SIGKILL in weight_load") is None
    assert advise(None) is None


@pytest.mark.parametrize(
    "said",
    [
        "OSError: Can't load image processor for '/m'. If you were trying to load it from",
        "ValueError: Unrecognized processing class in /m. Can't instantiate a processor",
        "OSError: /m does not appear to have a file named preprocessor_config.json",
    ],
)
def test_a_model_without_the_files_of_its_processor(said):
    advice = advise(f"DP0 TP0 failed in device_init: {said}")
    assert advice is not None
    for name in ("preprocessor", "processor", "video_preprocessor"):
        assert f" {name}_config.json" in advice


def advise(reason: str | None) -> str | None:
    return module.advise(reason, sys.executable, VLLM)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--max-modl-len", "--max-model-len"),
        ("--enforce_eagr", "--enforce-eager"),
        ("--headles", "--headless"),
        ("--devise", "--device"),  # memprof's own
    ],
)
def test_a_misspelt_option_is_answered_from_the_engine_s_sources(
    typed: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm" / "engine").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").touch()
    (tmp_path / "vllm" / "engine" / "arg_utils.py").write_text(
        "class EngineArgs:\n    max_model_len: int = 0\n    enforce_eager: bool = False\n"
        "def add(parser):\n    parser.add_argument('--headless')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = advise(
        f"the engine exited with status 2: vllm: error: unrecognized arguments: {typed} 8"
    )
    assert found is not None
    assert found.startswith(f"to try: did you mean {meant}")


def test_an_option_like_none_is_to_be_left_out() -> None:
    found = advise("unrecognized arguments: --xyzzy")
    assert found == "to try: leave --xyzzy out"


def test_every_engine_that_parses_a_command_names_its_sources() -> None:
    assert all(row.option_files for row in ENGINES.values() if "serve" in row.modes)
