"""Model presets: facts of the models, generated tokenizers, and who wins: folder, hub, preset."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from vllm_memprof.sim import presets
from vllm_memprof.sim.presets import find_preset, generate_model, hub_answers, list_presets, resolve_model

NAMES = [preset.name for preset in list_presets()]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    for name in ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_TOKEN", "VLLM_USE_MODELSCOPE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MEMPROF_CACHE_DIR", str(tmp_path / "memprof"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def write_config(folder):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_the_promised_models_are_there():
    promised = {"Qwen/Qwen3-VL-8B-Instruct", "Qwen/Qwen3-14B", "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3-30B-A3B"}
    assert promised | {"memprof/tiny"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_ids_in_the_configuration_are_those_of_the_tokenizer(name):
    preset = find_preset(name)
    config = preset.files["config.json"]
    text = config.get("text_config", config)
    files = presets.tokenizer_files(preset)
    ids = {token["content"]: token["id"] for token in files["tokenizer.json"]["added_tokens"]}
    assert ids["<|im_end|>"] == text["eos_token_id"]
    assert max(ids.values()) < text["vocab_size"]
    for key, token in {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }.items():
        if key in config:
            assert ids[token] == config[key]


@pytest.mark.parametrize("name", NAMES)
def test_the_vocabulary_has_no_holes_and_spells_bytes(name):
    preset = find_preset(name)
    vocabulary = presets.tokenizer_files(preset)["tokenizer.json"]["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(preset.tokenizer["plain_tokens"]))
    assert vocabulary["A"] == 65
    assert vocabulary["Ġ"] == 32  # how byte-level BPE writes a blank
    assert vocabulary["Ċ"] == 10


def test_parameters_of_the_dense_text_model():
    """Qwen3-14B has 14,768,307,200 parameters; as bfloat16 that is 27.51 GiB."""
    config = find_preset("Qwen/Qwen3-14B").files["config.json"]
    hidden, heads, kv_heads, size = 5120, config["num_attention_heads"], config["num_key_value_heads"], 128
    layer = hidden * size * (heads + 2 * kv_heads) + heads * size * hidden + 2 * size + 2 * hidden
    layer += 3 * hidden * config["intermediate_size"]
    total = config["num_hidden_layers"] * layer + 2 * config["vocab_size"] * hidden + hidden
    assert total == 14_768_307_200


def test_a_folder_is_generated_once_and_whole():
    preset = find_preset("memprof/tiny")
    with ThreadPoolExecutor(8) as pool:
        folders = set(pool.map(lambda _: generate_model(preset), range(16)))
    assert folders == {preset.folder}
    assert {path.name for path in preset.folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert [path.name for path in preset.folder.parent.iterdir()] == [preset.folder.name]  # nothing half made is left
    before = (preset.folder / "config.json").stat().st_mtime_ns
    generate_model(preset)
    assert (preset.folder / "config.json").stat().st_mtime_ns == before
    assert json.loads((preset.folder / "config.json").read_text()) == preset.files["config.json"]


def test_a_preset_gets_its_arguments():
    model = resolve_model("Qwen/Qwen3-14B", ["--max-model-len", "8192"])
    assert model.source == "preset"
    assert model.extra_args == ["--load-format", "dummy", "--served-model-name", "Qwen/Qwen3-14B"]
    assert model.env["HF_HUB_OFFLINE"] == "1"
    assert "synthetic" in model.note


@pytest.mark.parametrize("given", [["--load-format=auto"], ["--load_format", "auto"], ["--load-format", "auto"]])
def test_what_the_user_gave_is_not_overridden(given):
    assert "--load-format" not in resolve_model("Qwen/Qwen3-14B", given).extra_args
    mine = resolve_model("memprof/tiny", [*given, "--served-model-name", "mine"])
    assert mine.extra_args == []


def test_a_local_folder_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write_config(tmp_path / "Qwen" / "Qwen3-14B")
    model = resolve_model("Qwen/Qwen3-14B", [])
    assert (model.source, model.path) == ("folder", "Qwen/Qwen3-14B")
    assert model.extra_args == ["--load-format", "dummy"]
    (folder / "model.safetensors").write_bytes(b"")
    assert resolve_model("Qwen/Qwen3-14B", []).extra_args == []


def test_a_cached_snapshot_wins_over_a_preset(tmp_path):
    write_config(tmp_path / "xdg/huggingface/hub/models--Qwen--Qwen3-14B/snapshots/abc")
    model = resolve_model("Qwen/Qwen3-14B", [])
    assert (model.source, model.path) == ("hub", "Qwen/Qwen3-14B")
    assert model.extra_args == ["--load-format", "dummy"]


def test_a_modelscope_cache_wins_over_a_preset(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "ms"))
    assert resolve_model("Qwen/Qwen3-14B", []).source == "preset"
    folder = write_config(tmp_path / "ms/models/Qwen/Qwen3-14B")
    assert resolve_model("Qwen/Qwen3-14B", []).path == str(folder)


def test_an_unknown_name_passes_through():
    model = resolve_model("someone/some-model", ["--dtype", "float16"])
    assert (model.path, model.extra_args, model.env) == ("someone/some-model", [], {})
    assert "no hub answered" in model.note


def test_names_are_found_in_any_case():
    assert find_preset("qwen/qwen3-14b").name == "Qwen/Qwen3-14B"


@pytest.fixture
def hub(monkeypatch):
    """A hub that knows one model."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(200 if self.path == "/Qwen/Qwen3-14B/resolve/main/config.json" else 404)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_hub_that_answers_wins_over_a_preset(hub):
    model = resolve_model("Qwen/Qwen3-14B", [])
    assert (model.source, model.path) == ("hub", "Qwen/Qwen3-14B")
    assert resolve_model("Qwen/Qwen3-30B-A3B", []).source == "preset"  # this hub does not have it


def test_a_silent_hub_costs_its_time_limit_at_most(monkeypatch):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        started = time.monotonic()
        assert not hub_answers("a/b", 0.2)
        assert time.monotonic() - started < 1.0


def test_own_models_are_never_looked_for_on_a_hub(monkeypatch):
    monkeypatch.setattr(presets, "hub_answers", lambda *_: pytest.fail("asked the hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert resolve_model("memprof/tiny", []).source == "preset"
