"""The set-up of a run, read from single lines."""

from __future__ import annotations

import pytest

from vllm_memprof.logs.config import Config, ConfigReader, arguments_of


@pytest.mark.parametrize(
    ("line", "kind", "config"),
    [
        (
            "Initializing a V1 LLM engine (v0.23.0) with config: model='org/m', max_seq_len=4096, "
            "enforce_eager=True, tensor_parallel_size=2",
            "init",  # a number at the end of a line may have been cut
            Config(model="org/m", max_model_len=4096, enforce_eager=True, vllm_version="0.23.0"),
        ),
        ("vLLM API server version 0.13.0", "api", Config(vllm_version="0.13.0")),
        (
            "non-default args: {'model_tag': 'org/m', 'gpu_memory_utilization': 0.92}",
            "args",
            Config(
                model="org/m",
                gpu_memory_utilization=0.92,
                arguments=("--gpu-memory-utilization", "0.92"),
            ),
        ),
        (
            "$ vllm serve org/m -tp 4 --max_model_len=8192",
            "command",
            Config(
                model="org/m",
                tensor_parallel_size=4,
                max_model_len=8192,
                command=("vllm", "serve", "org/m", "-tp", "4", "--max_model_len=8192"),
            ),
        ),
        ("## second try", "heading", Config(heading="second try")),
        ("Block size is set to 128 if unset", "trace", Config(block_size=128)),
    ],
)
def test_lines_about_the_set_up(line, kind, config):
    found = ConfigReader().read(line)
    assert (found.kind, found.config) == (kind, config)


def test_a_command_over_several_lines():
    reader = ConfigReader()
    assert reader.read("vllm serve org/m \\") is None
    found = reader.read("  -pp 2 --enforce-eager")
    assert (found.config.pipeline_parallel_size, found.config.enforce_eager) == (2, True)


@pytest.mark.parametrize(
    "said",
    [
        "Try to use vllm serve to start bge-large-zh-v1.5 model, error shows like this:",
        "run command: vllm serve {model_path}",
        "usage: vllm serve <model>",
    ],
)
def test_a_sentence_about_a_command_is_none(said):
    assert ConfigReader().read(said) is None


def test_later_values_replace_earlier_ones_and_vllm_ascend_stays():
    first = Config(model="a", enforce_eager=True, engine="vllm-ascend")
    second = Config(enforce_eager=False, block_size=16, engine="vllm")
    expected = Config(model="a", enforce_eager=False, block_size=16, engine="vllm-ascend")
    assert first.merged(second) == expected


def test_allocator_settings_are_kept_in_their_order():
    reader = ConfigReader()
    for value in ("a:1", "b:2", "a:1"):
        reader.read(f'export PYTORCH_NPU_ALLOC_CONF="{value}"')
    assert reader.exports == {"PYTORCH_NPU_ALLOC_CONF": ["a:1", "b:2"]}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("{'model': 'm', 'max_num_seqs': 8, 'seed': None}", ["--max-num-seqs", "8"]),
        ("{'enforce_eager': True, 'async_scheduling': False}",
         ["--enforce-eager", "--no-async-scheduling"]),
        ("{'speculative_config': {'method': 'mtp', 'n': 1}}",
         ["--speculative-config", '{"method": "mtp", "n": 1}']),
        ("{'cudagraph_capture_sizes': [1, 8], 'api_key': ['sk-abcdefgh12345678']}",
         ["--cudagraph-capture-sizes", "1", "8", "--api-key", "***"]),
        ("{'seed': -1}", ["--seed=-1"]),
        ("{'max_model_len': 4096, 'max_num_se", []),  # cut: half of a command is another command
        ("{'kv_transfer_config': KVTransferConfig(kv_role='kv_both')}", []),
        ("{'limit': (1, 2)}", []),
    ],
)  # fmt: skip
def test_non_default_args_are_a_command_or_none(said, words):
    assert list(arguments_of(said)) == words
