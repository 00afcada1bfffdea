"""Tables of npu-smi in a log."""

from __future__ import annotations


def test_npu_smi_tables_become_notes(runs_of):
    table = (
        "| npu-smi 24.1.rc2                 Version: 24.1.rc2                                      |\n"
        "| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|\n"
        "| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |\n"
        "| 0     910B3               | OK            | 93.1        36                0    / 0             |\n"
        "| 0                         | 0000:C1:00.0  | 0           0    / 0          54735/ 65536         |\n"
        "| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |\n"
        "| 0       0                 | 1234          | python                   | 51341                   |\n"
    )
    (run,) = runs_of(table)
    assert (
        "npu-smi: NPU 0 chip 0 uses 54,735 of 65,536 MiB, 51,341 of them in 1 processes"
        in run.info.notes
    )
    (run,) = runs_of(table + "INFO Available KV cache memory: 43.40 GiB\n")
    assert run.info.engine == "vllm-ascend"
