"""Secrets stay out of the record, figures stay in."""

from __future__ import annotations

import json

import pytest

from vllm_memprof.redact import REDACTED, is_secret, redact_command, select_env

X = REDACTED


@pytest.mark.parametrize(
    "name",
    ["--api-key", "--api_key", "--hf-token", "HF_TOKEN", "VLLM_API_KEY", "--ssl-keyfile-password",
     "aws_secret",
     "S3_SECRET_ACCESS_KEY", "--client-secret", "apiKey", "Authorization",
     "HUGGING_FACE_HUB_TOKEN"],
)  # fmt: skip
def test_secret_names(name):
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    ["--max-num-batched-tokens", "--tokenizer", "--tokenizer-mode", "--ssl-keyfile",
     "--return-tokens-as-token-ids",
     "--long-prefill-token-threshold", "--max-tokens", "bytes_per_token", "--skip-tokenizer-init",
     "--seed"],
)  # fmt: skip
def test_harmless_names(name):
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("serve M --api-key a b -tp 2", f"serve M --api-key {X} {X} -tp 2"),
        ("--api-key=a --port 80", f"--api-key={X} --port 80"),
        ("--hf-token --seed 1", "--hf-token --seed 1"),
        ("-kv.api_key=a -x.y=b", f"-kv.api_key={X} -x.y=b"),
        ("--otlp-traces-endpoint http://u:p@h:1/x", f"--otlp-traces-endpoint http://{X}@h:1/x"),
        ("--max-num-batched-tokens 5", "--max-num-batched-tokens 5"),
    ],
)
def test_commands(command, expected):
    assert redact_command(command.split()) == expected.split()


def test_json_values_are_redacted_by_key():
    config = json.dumps({"kv_connector": "x", "extra": {"api_key": "s3cret", "n": 1}})
    for command in (["--kv-transfer-config", config], [f"--kv-transfer-config={config}"]):
        text = " ".join(redact_command(command))
        assert "s3cret" not in text
        assert '"n": 1' in text
    broken = '{"api_key": "s3cret", "n": 1'
    assert "s3cret" not in redact_command(["--x", broken])[1]
    untouched = '{"a":1}'
    assert redact_command(["--x", untouched]) == ["--x", untouched]


def test_only_variables_that_bear_on_memory_are_kept():
    env = {
        "VLLM_API_KEY": "s3cret",
        "VLLM_PLUGINS": "ascend",
        "HCCL_BUFFSIZE": "200",
        "HF_TOKEN": "s3cret",
        "HOME": "/root",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_NPU_ALLOC_CONFX": "no",
        "VLLMX": "no",
    }
    assert select_env(env) == {
        "HCCL_BUFFSIZE": "200",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
        "VLLM_API_KEY": X,
        "VLLM_PLUGINS": "ascend",
    }
