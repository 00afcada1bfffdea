"""Which failures of tests that others wrote have a reason, and which are defects."""

from __future__ import annotations

import json
import sys

import pytest

from scripts.peer_suites import MARK, TABLE, classify, run_file, tomllib

ROWS = tomllib.loads(TABLE.read_text())["row"]
CASE = '  File "…/torch_npu/testing/testcase.py", line 270 |     self.fail() | AssertionError: '


@pytest.mark.parametrize(
    ("test", "message", "reason"),
    [
        ("test/npu/test_x.py::T.test_a", f"{CASE}tensor(3) not less than or equal to", "operator"),
        ("test/npu/test_x.py::T.test_a", f"{CASE}result error", "operator"),
        # a figure of memory
        ("test/npu/test_x.py::T.test_a", f"{CASE}83887104 not less than or equal to 1e-05", None),
        ("test/npu/test_x.py::T.test_a", "[memprof simulated device] aclrtX: not there", None),
        ("test/npu/test_ipc_event.py::T.test_d2d_copy1", f"{CASE}False is not true", None),
        ("tests/e2e/test_x.py::test_a", "AssertionError: Test0: | eager: \t'a'", "texts"),
        ("tests/e2e/test_x.py::test_a", "Engine core initialization failed", None),
        ("tests/e2e/test_x.py::test_a", "modelscope_hub.errors.NetworkError: [E1020]", "network"),
    ],
)  # fmt: skip
def test_reasons(test: str, message: str, reason: str | None) -> None:
    assert classify(test, message, ROWS) == reason


def test_kinds_are_described() -> None:
    described = TABLE.read_text()
    for row in ROWS:
        assert f"\n# {row['reason']}: " in described


def test_what_failed_elsewhere_is_told() -> None:
    """A message that only says that another process failed has that one's error behind it."""
    lines = [
        "(EngineCore pid=9) ValueError: of the test before",
        MARK + json.dumps(["test_a", "failed", "AssertionError: assert 0"]),
        "(EngineCore pid=9) ERROR [core.py:1] ModuleNotFoundError: No module named 'xlite'",
        "RuntimeError: Engine core initialization failed. See root cause above.",
        MARK + json.dumps(["test_b", "failed", "RuntimeError: failed. See root cause above."]),
    ]
    command = [sys.executable, "-c", f"print({chr(10).join(lines)!r})"]
    told = run_file(command, timeout_s=60, limit=1 << 40)
    assert [message for _, _, message in told] == [
        "AssertionError: assert 0",
        "RuntimeError: failed. See root cause above. | "
        "ModuleNotFoundError: No module named 'xlite'",
    ]
    assert classify("tests/e2e/test_xlite.py::test_b", told[1][2], ROWS) == "package"
