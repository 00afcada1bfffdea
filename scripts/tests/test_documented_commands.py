"""Commands are read off pages as a shell would read them; nothing of a page is run."""

from __future__ import annotations

import json

import pytest

from scripts import documented_commands
from scripts.documented_commands import Command, commands_of, main, outcome_of

PAGE = """\
# A model

  ```bash
  export HCCL_BUFFSIZE=512  # don't forget
  MODEL=/data/Qwen3-32B
  nohup vllm serve ${MODEL} --port $1 \\
    --additional-config '{"a": true,
      "b": [1, 2]}' \\
    --max-model-len 4096 > log.txt 2>&1 &
  ```

vllm serve Not/A-Command

::::{tab-item} A2 series
~~~shell
echo 0 > /proc/sys/vm/nr_hugepages
python -m vllm.entrypoints.openai.api_server --model Qwen/Qwen3-8B --seed 1 | tee log
~~~
::::
"""


def test_commands_have_their_variables_and_end_where_the_shell_goes_on():
    first, second = commands_of("a.md", PAGE)
    assert (first.line, first.model) == (6, "/data/Qwen3-32B")
    assert first.words[1:3] == ("--port", "$1")
    assert json.loads(first.words[4]) == {"a": True, "b": [1, 2]}
    assert first.words[-2:] == ("--max-model-len", "4096")
    assert first.env == {"HCCL_BUFFSIZE": "512", "MODEL": "/data/Qwen3-32B"}
    assert (first.device, second.device) == ("a3", "910b")
    assert (second.line, second.model) == (17, "Qwen/Qwen3-8B")
    assert second.words == ("--model", "Qwen/Qwen3-8B", "--seed", "1")


@pytest.mark.parametrize(
    ("words", "outcome"),
    [
        ("your_model_path --seed 1", "placeholder"),
        ("Qwen/Qwen3-8B --tensor-parallel-size $TP", "placeholder"),
        ("Qwen/Qwen3-8B --data-parallel-address <IP>", "placeholder"),
        ("Qwen/Qwen3-8B --tensor-parallel-size --seed 1", "placeholder"),
        ("someone/some-model", "no preset"),
        ("/data/Qwen3-8B --port $1", "planned"),
    ],
)
def test_what_a_page_leaves_open_is_not_planned(monkeypatch, words, outcome):
    planned = {"outcome": "planned", "reason": ""}
    monkeypatch.setattr(documented_commands, "plan", lambda *_: planned)
    command = Command("a.md", 1, tuple(words.split()), {})
    assert outcome_of(command, "stack", ())["outcome"] == outcome


def test_a_device_without_a_profile_is_told():
    command = Command("a.md", 1, ("Qwen/Qwen3-8B",), {}, "Ascend 950DT series")
    assert outcome_of(command, "stack", ())["outcome"] == "no device profile"


def test_the_table_keeps_what_was_planned(monkeypatch, tmp_path, capsys):
    (tmp_path / "a.md").write_text(PAGE)
    (tmp_path / "b.md").write_text(PAGE)  # the same words: not once more, nor in the second run
    monkeypatch.setattr(documented_commands, "TABLE", tmp_path / "table.json")
    asked = []

    def plan(command, stack, extra):
        asked.append((command.model, tuple(extra)))
        return {"outcome": "planned", "reason": ""}

    monkeypatch.setattr(documented_commands, "plan", plan)
    for _ in range(2):
        assert main([str(tmp_path), "--jobs", "1"]) == 0
    assert asked == [(name, ("--enforce-eager",)) for name in ("/data/Qwen3-32B", "Qwen/Qwen3-8B")]
    rows = json.loads((tmp_path / "table.json").read_text())
    assert [(row["page"], row["line"]) for row in rows] == [("a.md", 6), ("a.md", 17)]
    assert "2 planned" in capsys.readouterr().out
    main([str(tmp_path), "--only", "Qwen3-8B", "--again", "--graphs"])
    assert asked[2:] == [("Qwen/Qwen3-8B", ())]
