"""What a log notes before an allocation fails: the request, parts of a step, a traceback."""

from __future__ import annotations

from pathlib import Path

from tests.unit.logs.conftest import explain
from vllm_memprof.accounting import build_report
from vllm_memprof.accounting.model import Oom, Report
from vllm_memprof.report.markdown import render_markdown

DATA = Path(__file__).parents[2] / "data" / "logs"
STORY = """
profiling:
mm_encoder_attention.py:141:forward_oot peak: 3.8 G
image1:
kv_cache: 52.921 G
mm_encoder_attention.py:141:forward_oot: 1.884 G (54.805 G)
_merge_multimodal_embeddings: 1.908 G (54.829 G) 24 M more
cache: 384 M
"""


OOM_NPU = (
    "RuntimeError: NPU out of memory. Tried to allocate 4.50 GiB (NPU 1; 60.96 GiB total capacity; "
    "52.87 GiB already allocated; 52.87 GiB current active; 2.77 GiB free; 56.89 GiB reserved in "
    "total by PyTorch)\n"
)


def reports_of(text: str) -> list[Report]:
    return [build_report(run) for run in explain(text)]


def failed(report: Report) -> Oom:
    [oom] = [rank.oom for rank in report.ranks if rank.oom is not None]
    return oom


def finding(report: Report) -> str:
    return next(each.evidence for each in report.findings if each.id == "out-of-memory")


def test_a_reported_death_at_an_image_is_told_with_its_figures() -> None:
    report = reports_of((DATA / "two_methods_910b_tp2.md").read_text())[3]
    oom = failed(report)
    assert (oom.at_request, oom.request_count) == (29, 60)
    assert oom.input == "MEITU_20251004_120005042.jpg"
    assert oom.phase == "request"
    assert oom.fragmentation_bytes == round(59.38 * 2**30) - round(54.77 * 2**30)  # 4.61 GiB
    told = finding(report)
    assert "request 29 of 60" in told
    assert (
        "the merge of multimodal embeddings took 1.908 GiB for image1; 0.024 GiB more than the "
        "encoder; what the log notes of its profile has no merge" in told
    )
    fragmentation = next(each for each in report.findings if each.id == "fragmentation")
    assert f"{(fragmentation.bytes or 0) / 2**30:.2f}" == "4.61"
    segments = next(each for each in oom.remedies if each.id == "expandable_segments")
    assert (segments.bytes, segments.bound) == (oom.fragmentation_bytes, "at_most")
    assert all(each.enough is None for each in oom.remedies)  # what was asked for is not known
    assert {each.id for each in oom.remedies if each.bytes is None} == {
        "utilization",
        "image_size",
        "images_per_prompt",
        "batched_tokens",
    }


def test_a_merge_that_the_profile_has_is_no_news() -> None:
    profiled = STORY.replace("image1:", "_merge_multimodal_embeddings: 1.9 G\nimage1:")
    assert "has no merge" in finding(reports_of(STORY + OOM_NPU)[0])
    assert "has no merge" not in finding(reports_of(profiled + OOM_NPU)[0])
    without = STORY.partition("image1:")[2]
    assert "has no merge" not in finding(reports_of("image1:\n" + without + OOM_NPU)[0])


def test_the_request_that_follows_the_last_one_done_is_in_turn() -> None:
    done = "request 1/4: 310 prompt tokens, 2 output tokens, 0.41 s\n"
    assert failed(reports_of(done + OOM_NPU)[0]).at_request == 2
    assert failed(reports_of(done.replace("1/4", "4/4") + OOM_NPU)[0]).at_request == 4
    assert failed(reports_of(OOM_NPU)[0]).at_request is None


def test_a_traceback_names_the_part_of_the_step() -> None:
    traceback = (
        "Traceback (most recent call last):\n"
        '  File "/vllm/v1/worker/gpu_model_runner.py", line 3441, in execute_model\n'
        '  File "/vllm/v1/worker/gpu_model_runner.py", line 2995, in _execute_mm_encoder\n'
        '  File "/vllm_ascend/ops/mm_encoder_attention.py", line 141, in forward_oot\n'
        '  File "/site-packages/torch/functional.py", line 10, in pad\n'
    )
    report = reports_of(traceback + OOM_NPU)[0]
    oom = failed(report)
    assert (oom.phase, oom.stage) == ("request", "mm_encoder")
    assert oom.site == "mm_encoder_attention.py:141"
    page = render_markdown(report)
    assert "part of the step" in page
    assert "multimodal encoder" in page
    assert "mm\\_encoder\\_attention.py:141" in page
