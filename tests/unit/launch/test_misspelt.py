"""A misspelt option of the engine is refused before its start; any other is left to the engine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from vllm_memprof.engines import ENGINES, VLLM
from vllm_memprof.errors import UsageError
from vllm_memprof.launch.engine_log import LogPump
from vllm_memprof.launch.interpreter import InterpreterFacts, probe_interpreter
from vllm_memprof.launch.misspelt import refuse_misspelt
from vllm_memprof.launch.verdict import find_error_line

#: As vLLM 0.13.0 and pydantic 2.14 refuse --gpu-memory-utilization 1.01.
OUT_OF_RANGE = """\
{process}pydantic_core._pydantic_core.ValidationError: 1 validation error for CacheConfig
{process}gpu_memory_utilization
{process}  Input should be less than or equal to 1 [type=less_than_equal, input_value=1.01]
{process}    For further information visit https://errors.pydantic.dev/2.14/v/less_than_equal
"""
#: As vllm-ascend 0.23.0 refuses flashcomm1 without tensor parallelism.
ASSERTED = """\
{process}pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig
{process}  Assertion failed, Flash Comm v1 is only supported when tp_size > 1. [type=assertion_error]
"""
#: As vllm-ascend 0.30.0rc2 refuses a key of --additional-config.
UNKNOWN_KEY = """\
{process}pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig
{process}enable_weight_nz_layout
{process}  Unexpected keyword argument [type=unexpected_keyword_argument, input_value=True]
"""


@pytest.mark.parametrize("process", ["", "(APIServer pid=7) "])
@pytest.mark.parametrize(
    ("log", "said"),
    [
        (UNKNOWN_KEY, "enable_weight_nz_layout: Unexpected keyword argument ["),
        (OUT_OF_RANGE, "gpu_memory_utilization: Input should be less than or equal to 1 ["),
        (ASSERTED, "Assertion failed, Flash Comm v1 is only supported when tp_size > 1. ["),
    ],
)
def test_what_pydantic_refuses_is_named(tmp_path: Path, process: str, log: str, said: str) -> None:
    pump = LogPump(tmp_path / "engine.log")
    os.write(pump.fd, log.format(process=process).encode())
    pump.start()
    pump.join(10)
    assert (find_error_line(list(pump.error_lines)) or "").strip().startswith(said)


@pytest.fixture
def facts(tmp_path: Path) -> InterpreterFacts:
    """An interpreter with the sources of an engine and of a plug-in of it."""
    for name, text in {
        "vllm/__init__.py": "",
        "vllm/engine/arg_utils.py": "class EngineArgs:\n    max_model_len: int = 0\n"
        "    enforce_eager: bool = False\ndef add(parser):\n    parser.add('--headless')\n",
        "vllm/late.py": "parser.add('--max-model-lens')\n",
        "theirs/__init__.py": "def register():\n    add('--enforce_eagerly')\n",
        "theirs-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: theirs\nVersion: 1\n",
        "theirs-1.dist-info/entry_points.txt": f"[{VLLM.group}]\nits = theirs:register\n",
        "vllm-0.23.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.23.0\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return probe_interpreter(Path(sys.executable), {**os.environ, "PYTHONPATH": str(tmp_path)})


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--max-modl-len", "--max-model-len"),
        ("--max_modl_len=8", "--max-model-len"),
        ("--enforce_eagr", "--enforce-eager"),
        ("--no-enforce-eagr", "--enforce-eager"),
        ("--headlss", "--headless"),
        ("--devise", "--device"),  # memprof's own
    ],
)
def test_a_misspelt_option_is_answered_from_the_engine_s_sources(
    typed: str, meant: str, facts: InterpreterFacts
) -> None:
    with pytest.raises(UsageError) as caught:
        refuse_misspelt(["-tp", "2", typed, "8"], facts, VLLM)
    shown = typed.partition("=")[0].replace("_", "-")
    assert caught.value.message == (
        f"the engine (vllm 0.23.0) has no option {shown}; nearest: {meant}"
    )


@pytest.mark.parametrize(
    "typed",
    [
        "--enforce-eager",
        "--no-enforce-eager",
        "--max-model",  # argparse takes the beginning of an option
        "--max-model-len.key",
        "--max-model-lens",  # elsewhere in the engine's sources
        "--enforce-eagerly",  # in those of a plug-in
        "--xyzzy",  # like none: the engine has the word
        "max-modl-len",  # a value
    ],
)
def test_what_the_engine_may_know_is_left_to_it(typed: str, facts: InterpreterFacts) -> None:
    refuse_misspelt([typed, "8"], facts, VLLM)


def test_without_sources_nothing_is_refused() -> None:
    refuse_misspelt(["--max-modl-len", "8"], InterpreterFacts(Path("python3"), "3.11"), VLLM)


def test_every_engine_that_parses_a_command_names_its_sources() -> None:
    assert all(row.option_files for row in ENGINES.values() if "serve" in row.modes)
