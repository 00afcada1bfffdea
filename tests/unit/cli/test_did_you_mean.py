"""Each kind of name that a command takes, misspelt: what is like it is said at once, status 2.

Options of an engine: ``tests/unit/launch/test_misspelt.py``.
"""

from __future__ import annotations

import shlex

import pytest

from vllm_memprof.cli import main
from vllm_memprof.errors import MemprofError
from vllm_memprof.sim.presets import resolve_model

SIM = "--device sim:910b"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("explian a.log", "did you mean explain"),
        ("sim setpu", "Did you mean 'setup'"),
        ("report --formt json", "(Possible options: --format)"),
        ("plan Qwen/Qwen3-8B --device smi", "did you mean sim?"),
        ("plan Qwen/Qwen3-8B --device sim:910bb", "did you mean 910b or "),
        ("plan Qwen/Qwen3-8B --device sim:x --devise=npu", "did you mean --device?"),
        (f"plan Qwen/Qwen3-8B {SIM} --stack vllm-ascend-0.32.0", "did you mean vllm-ascend-0.23.0"),
        ("plan Qwen/Qwen3-8B --engine sglng", "nearest: sglang; one of vllm, "),
        (f"plan Qwen/Qwen3-8B {SIM} --until readi", "nearest: ready; one of kv, ready"),
        (f"fit Qwen/Qwen3-8B {SIM} --find max-modl-len", "did you mean max-model-len"),
        (f"sweep Qwen/Qwen3-8B {SIM} --over max-num-seqs=1 --format jsn", "nearest: json; one of "),
    ],
)
def test_a_misspelt_name_is_answered_with_what_is_like_it(
    typed: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "200")
    try:
        status = main(shlex.split(typed))
    except SystemExit as ended:  # of Typer's own usage errors
        status = int(ended.code or 0)
    assert status == 2
    assert said in capsys.readouterr().err


def test_a_misspelt_model_is_answered_with_the_nearest_presets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Asked of what a plan asks, which needs no engine stack."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(MemprofError) as refused:
        resolve_model("Qwen/Qwn3-8B", [])
    assert "nearest: Qwen/Qwen3-8B, " in f"{refused.value} {refused.value.hint}"
