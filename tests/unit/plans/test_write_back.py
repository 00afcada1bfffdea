"""A setting in the files that start engines: only its own characters change."""

from __future__ import annotations

import pytest

from vllm_memprof.errors import UsageError
from vllm_memprof.plans.write_back import find_start, write_back

SHARE = {"--gpu-memory-utilization": "0.93"}
SCRIPT = """#!/bin/sh
# vllm serve of last week: --gpu-memory-utilization 0.5
export HCCL_BUFFSIZE=200  # MiB
echo "vllm serve starts"
exec vllm serve Qwen/Qwen3-8B \\
    --tensor-parallel-size 2 \\
    --gpu_memory_utilization "0.85" \\
    --port $PORT 2>&1 | tee log  # the log
"""
CONFIG = """# of production
model: Qwen/Qwen3-8B   # by its name on the hub
gpu-memory-utilization: 0.85  # as last week
"max_model_len": 8192
enforce-eager: true
compilation-config:
  cudagraph_mode: FULL
cudagraph-capture-sizes: [1, 2, 4]
served-model-name:
  - a
  - 'b'
"""
FLOW = """apiVersion: v1
kind: Pod
spec:
  containers:
    - name: sidecar
      command: ["sh", "-c", "sleep 1"]
    - name: engine
      command: ["vllm", "serve"]  # of the image
      args: ["Qwen/Qwen3-8B", "--gpu-memory-utilization", "0.85",
             "--tensor-parallel-size=2"]
"""
BLOCK = """apiVersion: apps/v1
kind: Deployment
spec:
  template:
    spec:
      containers:
      - image: vllm
        args:
        - --model=Qwen/Qwen3-8B
        # twice as many as before
        - --tensor-parallel-size
        - "2"
        - '--gpu-memory-utilization=0.85'  # of the device
        ports:
        - containerPort: 8000
"""
SHELL_IN_LIST = """kind: Pod
apiVersion: v1
spec:
  containers:
  - command: [sh, -c]
    args:
    - |
      sleep 1
      vllm serve Qwen/Qwen3-8B \\
        --gpu-memory-utilization 0.85 \\
        --tensor-parallel-size 2
    env: []
"""
FOLDED = SHELL_IN_LIST.replace("- |", "- >-").replace(" \\\n", "\n")
QUOTED = """apiVersion: v1
kind: Pod
spec:
  containers:
  - command: ["/bin/sh", "-c", "vllm serve Qwen/Qwen3-8B --gpu-memory-utilization 0.85 -tp 2"]
"""


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("a.sh", SCRIPT, ["Qwen/Qwen3-8B", "--tensor-parallel-size", "2",
                          "--gpu_memory_utilization", "0.85", "--port", "$PORT"]),
        ("a.yaml", CONFIG, ["--model", "Qwen/Qwen3-8B", "--gpu-memory-utilization", "0.85",
                            "--max-model-len", "8192", "--enforce-eager",
                            "--compilation-config.cudagraph_mode", "FULL",
                            "--cudagraph-capture-sizes", "1 2 4",
                            "--served-model-name", "a", "b"]),
        ("a.yaml", FLOW, ["Qwen/Qwen3-8B", "--gpu-memory-utilization", "0.85",
                          "--tensor-parallel-size=2"]),
        ("a.yaml", BLOCK, ["--model=Qwen/Qwen3-8B", "--tensor-parallel-size", "2",
                           "--gpu-memory-utilization=0.85"]),
        ("a.yaml", SHELL_IN_LIST, ["Qwen/Qwen3-8B", "--gpu-memory-utilization", "0.85",
                                   "--tensor-parallel-size", "2"]),
        ("a.yaml", FOLDED, ["Qwen/Qwen3-8B", "--gpu-memory-utilization", "0.85",
                            "--tensor-parallel-size", "2"]),
        ("a.yaml", QUOTED, ["Qwen/Qwen3-8B", "--gpu-memory-utilization", "0.85", "-tp", "2"]),
    ],
    ids=["script", "config", "flow", "block", "shell", "folded", "quoted"],
)  # fmt: skip
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_the_value_alone_is_replaced(
    name: str, text: str, arguments: list[str], newline: str
) -> None:
    text = text.replace("\n", newline)
    start = find_start(text, name)
    assert start.arguments == arguments
    before, mark, after = text.rpartition("0.85")
    assert mark
    assert write_back(text, start, SHARE) == f"{before}0.93{after}"
    assert write_back(text, start, {"--gpu-memory-utilization": "0.85"}) == text


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.sh", "vllm serve m --port 1 > log &\n", "vllm serve m --port 1 --x 7 > log &\n"),
        ("a.sh", "vllm serve m", "vllm serve m --x 7"),
        ("a.sh", "vllm serve m \\\n  --port 1  # why\n", "vllm serve m \\\n  --port 1 \\\n  --x 7  # why\n"),
        ("a.sh", "A=1 python -m sglang.launch_server --model-path m; b\n",
         "A=1 python -m sglang.launch_server --model-path m --x 7; b\n"),
        ("a.yaml", "model: m\r\n", "model: m\r\nx: 7\r\n"),
        ("a.yaml", "model: m  # last", "model: m  # last\nx: 7\n"),
        ("a.yaml", FLOW, FLOW.replace('size=2"]', 'size=2", "--x=7"]')),
        ("a.yaml", BLOCK, BLOCK.replace("  # of the device", "\n        - --x=7  # of the device")),
        ("a.yaml", QUOTED, QUOTED.replace("-tp 2", "-tp 2 --x 7")),
    ],
)  # fmt: skip
def test_what_is_not_there_is_added(name: str, text: str, expected: str) -> None:
    assert write_back(text, find_start(text, name), {"--x": "7"}) == expected


def test_json_of_other_options_is_read_and_left() -> None:
    json = '{"cudagraph_mode": "FULL"}'
    config = f"model: m\ncompilation-config: {json}\nx: 1\n"
    block = BLOCK.replace("# twice", f"- '--compilation-config={json}'\n        # twice")
    flow = FLOW.replace("]\n", """, "-cc", "{\\"a\\": 1}"]\n""").replace('serve", "-cc"', 'serve"')
    assert json in find_start(config, "a.yaml").arguments
    assert f"--compilation-config={json}" in find_start(block, "a.yaml").arguments
    assert '{"a": 1}' in find_start(flow, "a.yaml").arguments
    for text, old in ((config, "x: 1"), (block, "0.85"), (flow, "0.85")):
        setting = {"--x": "1"} if text == config else SHARE
        found = write_back(text, find_start(text, "a.yaml"), setting)
        assert found == text.replace(old, "x: 1" if text == config else "0.93")


def test_a_key_of_json_and_a_flag() -> None:
    text = """vllm serve m --limit-mm-per-prompt '{"image": 9, "video": 1}'\n"""
    found = write_back(text, find_start(text, "a"), {"--limit-mm-per-prompt.image": "4"})
    assert found == text.replace("9", "4")
    text = "model: m\nlimit-mm-per-prompt:\n  image: 9  # each\n  video: 1\n"
    found = write_back(text, find_start(text, "a.yml"), {"--limit-mm-per-prompt.image": "4"})
    assert found == text.replace("9", "4")
    text = "vllm serve m\n"
    assert write_back(text, find_start(text, "a"), {"--enforce-eager": "true"}) == (
        "vllm serve m --enforce-eager\n"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("vllm serve a\nvllm serve b\n", "several engines are started, in lines 1, 2"),
        ("echo 'vllm serve a'\n# vllm serve b\n", "no engine is started"),
    ],
)
def test_a_file_that_leaves_open_which(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        find_start(text, "a.sh")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a", "vllm serve m --gpu-memory-utilization $UTIL\n", r"line 1: \$UTIL decides"),
        ("a", 'vllm serve m --gpu-memory-utilization="${UTIL:-0.9}"\n', "line 1: .*UTIL"),
        ("a", '\nvllm serve m "$@"\n', r"line 2: \$@ decides"),
        ("a.yaml", "gpu-memory-utilization: {{ .Values.util }}\n", "line 1: .*Values"),
        ("a.yaml", "gpu-memory-utilization:\n  - 1\n  - 2\n", "has not one value"),
        ("a.yaml", FLOW.replace('"0.85"', '"$(UTIL)"'), r"line 9: \$\(UTIL\)"),
    ],
)
def test_a_value_from_elsewhere_is_left(name: str, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        write_back(text, find_start(text, name), SHARE)
