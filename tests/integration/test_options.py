"""Options against the parsers of the engines: none of theirs is refused, a misspelt one is."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from tests.support.engine import OLD_STACK, STACK, require_stack
from vllm_memprof.engines import ENGINES, VLLM
from vllm_memprof.engines.base import EngineRow
from vllm_memprof.errors import UsageError
from vllm_memprof.launch.interpreter import probe_interpreter
from vllm_memprof.launch.misspelt import refuse_misspelt
from vllm_memprof.sim.runtime import prepare_runtime

pytestmark = [pytest.mark.sim, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("stack", "row", "asked", "wrong"),
    [
        (STACK, VLLM, "--help=all", "--gpu-memory-utilisation"),
        pytest.param(
            OLD_STACK, VLLM, "--help=all", "--gpu-memory-utilisation", marks=pytest.mark.full
        ),
        pytest.param(
            "sglang-0.5.23",
            ENGINES["sglang"],
            "--help",
            "--mem-fraction-statik",
            marks=pytest.mark.full,
        ),
    ],
)
def test_no_option_of_the_engine_s_help_is_refused(
    stack: str, row: EngineRow, asked: str, wrong: str
) -> None:
    runtime = prepare_runtime("910b", require_stack(stack))
    env = {**os.environ, **runtime.env}
    start = [arg for arg in row.server if not arg.startswith("--")]
    command = [str(runtime.python), *start, asked]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    options = sorted(set(re.findall(r"(?<![\w-])--[a-z][\w-]+", done.stdout)))
    assert len(options) > 150, done.stderr[-2000:]
    facts = probe_interpreter(runtime.python, env)
    refuse_misspelt(options, facts, row)
    with pytest.raises(UsageError, match=f"has no option {wrong}; nearest: "):
        refuse_misspelt([wrong, "0.9"], facts, row)
