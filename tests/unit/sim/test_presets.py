"""Model presets: facts of the models, generated tokenizers, and who wins: folder, hub, preset."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from vllm_memprof.errors import UsageError
from vllm_memprof.layout import text_config
from vllm_memprof.options import value_of
from vllm_memprof.sim import hubs, presets
from vllm_memprof.sim.hubs import hub_answers
from vllm_memprof.sim.presets import (
    find_preset,
    fit_args,
    generate_model,
    list_presets,
    resolve_model,
)
from vllm_memprof.sim.tokenizers import tokenizer_files

ALIKE = {"MEMPROF_SIM_ALIKE": "1"}
NAMES = [preset.name for preset in list_presets()]
#: One model of each tokenizer.
TOKENIZERS = list({json.dumps(preset.tokenizer): preset.name for preset in list_presets()}.values())


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    for name in (
        "HF_HOME",
        "HF_HUB_CACHE",
        "HF_HUB_OFFLINE",
        "HF_ENDPOINT",
        "HF_TOKEN",
        "VLLM_USE_MODELSCOPE",
    ):
        monkeypatch.delenv(name, raising=False)
    for name in (
        "http_proxy",
        "https_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "all_proxy",
        "ALL_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MEMPROF_CACHE_DIR", str(tmp_path / "memprof"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def write_config(folder):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def is_preset(model):
    return presets.Path(model.path).parent == find_preset("memprof/tiny").folder.parent


#: Other names of what a text ends with: several may, the configuration lists them.
_ENDS = ("eos_token_id", "pad_token_id", "bos_token_id")


@cache
def files_of(name):
    return tokenizer_files(find_preset(name).tokenizer)


def added_ids(files):
    return {token["content"]: token["id"] for token in files["tokenizer.json"]["added_tokens"]}


def _flat(value):
    return value if isinstance(value, list) else [value]


@pytest.mark.parametrize("name", NAMES)
def test_ids_in_the_configuration_are_those_of_the_tokenizer(name):
    preset = find_preset(name)
    text = text_config(preset.config)  # of a model that thinks and talks: the part that is loaded
    generation = preset.files["generation_config.json"]
    ids = added_ids(
        files_of(
            next(other for other in TOKENIZERS if find_preset(other).tokenizer == preset.tokenizer)
        )
    )
    ends = [
        number
        for content in (text, generation)
        for number in _flat(content.get("eos_token_id", []))
    ]
    assert ids[preset.tokenizer["eos_token"]] in ends
    assert max(ids.values()) < text["vocab_size"]
    for content in (text, generation):
        named = [content[key] for key in _ENDS if content.get(key) is not None]
        assert {number for value in named for number in _flat(value)} <= set(ids.values())
    own = preset.tokenizer.get("extra_special_tokens", {})
    for key, token in {
        "image_token_id": own.get("context_image_token", own.get("image_token", "<|image_pad|>")),
        "video_token_id": own.get("video_token", "<|video_pad|>"),
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }.items():
        if key in preset.config:
            assert ids[token] == preset.config[key]


@pytest.mark.parametrize(
    ("name", "token", "number"),
    [
        ("deepseek-ai/DeepSeek-V3", "<｜begin▁of▁sentence｜>", 0),
        ("deepseek-ai/DeepSeek-V3", "<｜User｜>", 128803),
        ("deepseek-ai/DeepSeek-V3", "<｜tool▁sep｜>", 128814),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "<|eot_id|>", 128009),
        ("meta-llama/Llama-3.1-8B-Instruct", "<|eom_id|>", 128008),
        ("zai-org/GLM-4-32B-0414", "<|user|>", 151336),
        ("openai/gpt-oss-20b", "<|call|>", 200012),
        ("moonshotai/Kimi-K2-Instruct", "<|im_end|>", 163586),
        ("MiniMaxAI/MiniMax-M2", "[e~[", 200020),
        ("Qwen/Qwen3.5-27B", "<|im_end|>", 248046),
        ("openbmb/MiniCPM3-4B", "<|im_end|>", 73440),
        ("Qwen/Qwen2.5-Omni-7B", "<|AUDIO|>", 151646),
        ("Qwen/Qwen3-0.6B", "</think>", 151668),
    ],
)
def test_special_tokens_have_their_public_ids(name, token, number):
    assert added_ids(tokenizer_files(find_preset(name).tokenizer))[token] == number


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_vocabulary_has_no_holes_and_spells_bytes(name):
    table = find_preset(name).tokenizer
    files = files_of(name)
    first = len(table.get("first_tokens", []))
    vocabulary = files["tokenizer.json"]["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(first + table["plain_tokens"]))
    behind = [number for number in added_ids(files).values() if number >= first]
    assert behind == list(
        range(first + table["plain_tokens"], first + table["plain_tokens"] + len(behind))
    )
    assert vocabulary["A"] == first + 65
    assert vocabulary["Ġ"] == first + 32  # how byte-level BPE writes a blank
    assert vocabulary["Ċ"] == first + 10


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
    assert [path.name for path in preset.folder.parent.iterdir()] == [
        preset.folder.name
    ]  # nothing half made is left
    before = (preset.folder / "config.json").stat().st_mtime_ns
    generate_model(preset)
    assert (preset.folder / "config.json").stat().st_mtime_ns == before
    assert json.loads((preset.folder / "config.json").read_text()) == preset.files["config.json"]


def test_a_preset_gets_its_arguments():
    model = resolve_model("Qwen/Qwen3-14B", ["--max-model-len", "8192"])
    assert model.path == str(find_preset("Qwen/Qwen3-14B").folder)
    assert model.extra_args == ["--load-format", "dummy", "--served-model-name", "Qwen/Qwen3-14B"]
    assert model.env["HF_HUB_OFFLINE"] == "1"
    assert model.stand_ins == ()
    [note] = resolve_model(
        "deepseek-ai/DeepSeek-R1", []
    ).stand_ins  # where it is not the public checkpoint
    assert note.startswith("deepseek-ai/DeepSeek-R1: bfloat16")


def test_presets_have_all_names_of_their_model():
    assert find_preset("thudm/glm-4-32b-0414").name == "zai-org/GLM-4-32B-0414"
    of_models = [{name.lower() for name in (each.name, *each.also)} for each in list_presets()]
    assert sum(map(len, of_models)) == len(set().union(*of_models))


@pytest.mark.parametrize(
    "given", [["--load-format=auto"], ["--load_format", "auto"], ["--load-format", "auto"]]
)
def test_what_the_user_gave_is_not_overridden(given):
    assert "--load-format" not in resolve_model("Qwen/Qwen3-14B", given).extra_args
    mine = resolve_model("memprof/tiny", [*given, "--served-model-name", "mine"])
    assert mine.extra_args == []


@pytest.mark.parametrize(
    "given",
    [
        ["--speculative-config", '{"method": "eagle3", "model": "AngelSlim/Qwen3-14B_eagle3"}'],
        ["--speculative-config.method=eagle3", "--speculative-config.model", "/nowhere/draft"],
        ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "/nowhere/draft"],
    ],
)
def test_a_draft_model_of_eagle3_is_generated(given):
    """One layer of the model's own shapes; what a draft is named does not matter."""
    args, [note] = fit_args(["--seed", "1", *given], resolve_model("Qwen/Qwen3-14B", []))
    name = value_of(given, "--speculative-config.model", "--speculative-draft-model-path")
    folder = value_of(args, "--speculative-config.model", "--speculative-draft-model-path")
    assert note.startswith(f"{name}: a draft model was generated")
    assert [each.replace(folder, name) for each in args] == ["--seed", "1", *given]
    config = json.loads(presets.Path(folder, "config.json").read_text())
    own = find_preset("Qwen/Qwen3-14B").config
    assert config.pop("architectures") == ["LlamaForCausalLMEagle3"]
    assert config.pop("draft_vocab_size") == 32000
    assert (config.pop("num_hidden_layers"), config.pop("model_type")) == (1, "llama")
    assert config == {key: own[key] for key in config}
    assert {"hidden_size", "intermediate_size", "head_dim", "rope_theta"} <= config.keys()


def test_a_draft_that_is_a_whole_model_is_a_preset():
    model = resolve_model("Qwen/Qwen3-32B", [])
    given = ["--speculative-config", '{"model": "/data/Qwen3-0.6B", "method": "draft_model"}']
    args, notes = fit_args(given, model)
    assert notes == ["/data/Qwen3-0.6B: the draft model is Qwen/Qwen3-0.6B"]
    folder = value_of(args, "--speculative-config.model")
    assert presets.Path(folder) == find_preset("Qwen/Qwen3-0.6B").folder


def test_dummy_weights_have_no_options_of_a_loader(tmp_path):
    given = [
        "--seed",
        "1",
        "--model_loader_extra_config",
        '{"enable_multithread_load": true}',
        "-q",
    ]
    assert fit_args(given, resolve_model("Qwen/Qwen3-14B", []))[0] == ["--seed", "1", "-q"]
    folder = write_config(tmp_path / "own")
    (folder / "model.safetensors").touch()
    assert fit_args(given, resolve_model(str(folder), []))[0] == given


def test_drafts_that_are_there_stay(tmp_path):
    model = resolve_model("Qwen/Qwen3-14B", [])
    own = ["--speculative-config", json.dumps({"method": "eagle3", "model": str(tmp_path)})]
    for given in ([], own, ["--speculative-config", '{"method": "mtp"}']):
        assert fit_args(given, model) == (given, [])
    assert (
        fit_args(
            ["--speculative-config.model=x/eagle3"], presets.ResolvedModel("on/a-hub", [], {})
        )[1]
        == []
    )


def test_a_local_folder_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write_config(tmp_path / "Qwen" / "Qwen3-14B")
    model = resolve_model("Qwen/Qwen3-14B", [])
    assert (model.path, model.env) == ("Qwen/Qwen3-14B", ALIKE)
    assert model.extra_args == [
        "--load-format",
        "dummy",
        "--skip-tokenizer-init",
    ]  # "{}" has no vocabulary
    (folder / "model.safetensors").write_bytes(b"")
    assert resolve_model("Qwen/Qwen3-14B", []).extra_args == []


def test_a_cached_snapshot_wins_over_a_preset(tmp_path):
    write_config(tmp_path / "xdg/huggingface/hub/models--Qwen--Qwen3-14B/snapshots/abc")
    model = resolve_model("Qwen/Qwen3-14B", [])
    assert (model.path, model.env) == ("Qwen/Qwen3-14B", ALIKE)
    assert model.extra_args == ["--load-format", "dummy"]


@pytest.mark.parametrize(
    ("model", "args", "alike"),
    [
        ("deepseek-ai/DeepSeek-V4-Flash", [], True),
        ("vllm-ascend/DeepSeek-V4-Flash-w8a8-mtp", [], False),
        ("deepseek-ai/DeepSeek-V4-Flash", ["--quantization", "ascend"], False),
        ("zai-org/GLM-5.1", ["--quantization", "ascend", "--load-format", "dummy"], True),
        ("zai-org/GLM-5.1", ["--quantization", "ascend", "--load-format", "auto"], False),
    ],
)
def test_a_drafts_head_is_the_models_unless_msmodelslim_rotated_it(model, args, alike):
    assert ("MEMPROF_SIM_ALIKE" in resolve_model(model, args).env) is alike


def test_a_modelscope_cache_wins_over_a_preset(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "ms"))
    assert is_preset(resolve_model("Qwen/Qwen3-14B", []))
    folder = write_config(tmp_path / "ms/models/Qwen/Qwen3-14B")
    (folder / "model.safetensors").touch()
    model = resolve_model("Qwen/Qwen3-14B", [])
    assert (model.path, model.env["VLLM_USE_MODELSCOPE"]) == (str(folder), "False")
    assert model.extra_args == ["--served-model-name", "Qwen/Qwen3-14B"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("someone/some-model", "`memprof sim list` has the presets"),
        ("Qwen/Qwen3-14", "nearest: Qwen/Qwen3-14B, "),
        ("qwen3-33b", "nearest: Qwen/Qwen3-32B, "),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_preset(name, hint):
    with pytest.raises(UsageError, match=f"no preset for {name}, and no hub answers") as caught:
        resolve_model(name, ["--dtype", "float16"])
    assert caught.value.hint.startswith(hint)
    assert caught.value.hint.endswith("; or give a folder with config.json")


@pytest.mark.parametrize("path", sorted(presets.PRESETS_DIR.glob("*.json")), ids=lambda p: p.stem)
def test_a_preset_file_has_the_keys_of_a_family(path):
    known = {"note", "source", "files", "tokenizer", "models"}
    assert set(json.loads(path.read_text())) <= known


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("/data/Qwen3-32B", "Qwen/Qwen3-32B"),
        ("path/to/Qwen2.5-72B-Instruct/", "Qwen/Qwen2.5-72B-Instruct"),
        ("/hub/Qwen/Qwen2___5-VL-7B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct"),
        ("/weights/DeepSeek-V3.1_w8a8mix_mtp", "deepseek-ai/DeepSeek-V3.1"),
        ("/weights/Qwen3-235B-A22B-w8a8-rot", "Qwen/Qwen3-235B-A22B"),
        ("someone/gpt-oss-20b-BF16", "openai/gpt-oss-20b"),
    ],
)
def test_a_folder_that_is_elsewhere_is_planned_as_the_preset_that_it_is_named_after(folder, name):
    model = resolve_model(folder, [])
    assert is_preset(model)
    assert presets.Path(model.path).name.startswith(name.replace("/", "--"))
    assert model.stand_ins[-1 - ("w8a8" in folder)].endswith(f": {name} by its name")
    assert ("--quantization" in model.extra_args) == ("w8a8" in folder)


@pytest.mark.parametrize(
    "folder", ["/data/Qwen3-32B-AWQ", "/data/Qwen3-32B-w8a8c8", "/data/Qwen3-52B", "Qwen3-32B-w4a4"]
)
def test_a_folder_of_another_format_or_model_is_none_of_a_preset(folder):
    with pytest.raises(UsageError, match="no preset for"):
        resolve_model(folder, [])


def test_no_two_presets_have_the_same_name_of_a_folder():
    named: dict[str, set[str]] = {}
    for preset in list_presets():
        for name in (preset.name, *preset.also):
            named.setdefault(presets._words(name.lower()), set()).add(preset.name)
    assert {name: found for name, found in named.items() if len(found) > 1} == {}


def test_names_are_found_in_any_case():
    assert find_preset("qwen/qwen3-14b").name == "Qwen/Qwen3-14B"


@pytest.fixture
def hub(monkeypatch):
    """A hub that knows one model."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(
                200 if self.path == "/Qwen/Qwen3-14B/resolve/main/config.json" else 404
            )
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
    assert (model.path, model.env) == ("Qwen/Qwen3-14B", ALIKE)
    assert is_preset(resolve_model("Qwen/Qwen3-30B-A3B", []))  # this hub does not have it


def test_a_silent_hub_costs_its_time_limit_at_most(monkeypatch):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        started = time.monotonic()
        monkeypatch.setattr(hubs, "HUB_TIMEOUT_S", 0.2)
        assert not hub_answers("a/b")
        assert time.monotonic() - started < 60  # without a limit it waits for ever


def test_own_models_are_never_looked_for_on_a_hub(monkeypatch):
    monkeypatch.setattr(hubs, "hub_answers", lambda *_: pytest.fail("asked the hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert is_preset(resolve_model("memprof/tiny", []))


SMALL = {
    "model_type": "llama",
    "vocab_size": 500,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def model_folder(path, config, **files):
    path.mkdir()
    for name, content in {"config": config, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_a_config_without_a_size_says_that_the_class_has_one(tmp_path):
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4}
    folder = model_folder(tmp_path / "mine", {**config, "vocab_size": 500})
    said = resolve_model(str(folder), []).stand_ins
    assert said[0].startswith(f"config.json of {folder} has no hidden_size: the engine takes the")
    whole = model_folder(tmp_path / "whole", {**config, "vocab_size": 500, "hidden_size": 64})
    assert not any("config.json of" in each for each in resolve_model(str(whole), []).stand_ins)


def test_a_folder_without_a_tokenizer_gets_one_elsewhere(tmp_path):
    folder = model_folder(tmp_path / "mine", SMALL, chat={"a": 1})
    before = sorted(folder.iterdir())
    model = resolve_model(str(folder), [])
    made = presets.Path(model.path)
    assert sorted(folder.iterdir()) == before
    assert {path.name for path in made.iterdir()} == {
        "config.json",
        "chat.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert json.loads((made / "config.json").read_text()) == SMALL
    assert (made / "config.json").resolve() == folder / "config.json"
    vocabulary = json.loads((made / "tokenizer.json").read_text())
    assert len(vocabulary["model"]["vocab"]) + len(vocabulary["added_tokens"]) == 500
    assert model.extra_args == ["--load-format", "dummy", "--served-model-name", str(folder)]
    assert model.stand_ins == (f"{folder} has no tokenizer: a synthetic one was generated",)
    again = resolve_model(str(folder), [])
    assert again == model
    (folder / "config.json").write_text(json.dumps({**SMALL, "vocab_size": 600}))
    assert resolve_model(str(folder), []).path != model.path


def test_a_configuration_class_that_is_not_there_is_generated(tmp_path):
    own = {**SMALL, "model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.Mine"}}
    folder = model_folder(tmp_path / "mine", own)
    model = resolve_model(str(folder), [])
    code = (presets.Path(model.path) / "configuration_mine.py").read_text()
    assert "--trust-remote-code" in model.extra_args
    assert "no defaults of its own" in model.stand_ins[0]
    base = type(
        "PretrainedConfig", (), {"__init__": lambda self, **fields: vars(self).update(fields)}
    )
    of_type = {kind: type(kind, (base,), {}) for kind in ("siglip_vision_model", "siglip", "qwen3")}
    names = {"PretrainedConfig": base, "CONFIG_MAPPING": of_type}
    exec(code.partition("\n")[2], names)
    assert names["Mine"].model_type == "mine"
    parts = {"vision_config": "siglip", "llm_config": "qwen3", "audio_config": "another"}
    fields = {name: {"model_type": kind, "hidden_size": 8} for name, kind in parts.items()}
    made = names["Mine"](hidden_size=8, quantization_config={"bits": 8}, **fields)
    assert (made.hidden_size, made.quantization_config) == (8, {"bits": 8})
    classes = [type(getattr(made, name)).__name__ for name in parts]
    assert classes == ["siglip_vision_model", "qwen3", "PretrainedConfig"]
    assert made.vision_config.hidden_size == 8
    # code of the user's is never run without being asked to
    (folder / "configuration_mine.py").write_text("")
    assert "--trust-remote-code" not in resolve_model(str(folder), []).extra_args


def test_a_processor_that_is_code_of_the_model_s_own_is_ours():
    model = resolve_model("moonshotai/Kimi-K2.6", [])
    code = (presets.Path(model.path) / "kimi_k25_vision_processing.py").read_text()
    assert code == "from memprof_processors import KimiK25VisionProcessor\n"
    assert "--trust-remote-code" in model.extra_args
    other = presets.Path(resolve_model("openbmb/MiniCPM-V-4_5", []).path)
    modules = {path.name for path in other.glob("*.py")}
    assert modules == {"configuration_minicpm.py", "processing_minicpmv.py"}
    named = resolve_model("Eco-Tech/Kimi-K2.6-W4A8", [])
    types = json.loads((presets.Path(named.path) / "quant_model_description.json").read_text())
    assert types["language_model.model.layers.1.mlp.experts.0.up_proj.weight"] == "W4A8_DYNAMIC"
    assert types["vision_tower.encoder.blocks.0.wqkv.weight"] == "FLOAT"


def test_a_tokenizer_of_the_user_is_kept(tmp_path):
    folder = model_folder(tmp_path / "mine", SMALL)
    for given in (["--tokenizer", "/t"], ["--skip-tokenizer-init"]):
        model = resolve_model(str(folder), given)
        assert (model.path, model.extra_args) == (str(folder), ["--load-format", "dummy"])
    (folder / "tokenizer.model").write_bytes(b"")
    assert resolve_model(str(folder), []).path == str(folder)


def test_a_folder_of_a_known_kind_gets_what_that_kind_needs(tmp_path):
    """A Qwen3-VL of another size: its images need a preprocessor's settings, and its tokenizer the
    image's token."""
    config = {**find_preset("Qwen/Qwen3-VL-8B-Instruct").config, "hidden_size": 5120}
    made = presets.Path(resolve_model(str(model_folder(tmp_path / "vl", config)), []).path)
    assert (made / "video_preprocessor_config.json").is_file()
    assert json.loads((made / "config.json").read_text()) == config
    ids = added_ids({"tokenizer.json": json.loads((made / "tokenizer.json").read_text())})
    assert ids["<|image_pad|>"] == 151655


def test_a_description_of_quantized_weights_is_generated(tmp_path):
    plain = resolve_model("Qwen/Qwen3-14B", [])
    for given in (["--quantization", "ascend"], ["--quantization=ascend"]):
        model = resolve_model("Qwen/Qwen3-14B", given)
        assert model.path != plain.path
        description = json.loads(
            (presets.Path(model.path) / "quant_model_description.json").read_text()
        )
        assert description["model.layers.39.mlp.down_proj.weight"] == "W8A8"
        assert model.stand_ins[0].startswith("quant_model_description.json was generated")
    assert not (presets.Path(plain.path) / "quant_model_description.json").exists()
    assert (
        resolve_model("Qwen/Qwen3-14B", ["--quantization", "compressed-tensors"]).path == plain.path
    )

    config = {**find_preset("memprof/tiny").config, "num_hidden_layers": 5}
    folder = model_folder(tmp_path / "mine", config, tokenizer={})
    made = presets.Path(resolve_model(str(folder), ["--quantization", "ascend"]).path)
    description = json.loads((made / "quant_model_description.json").read_text())
    assert description["model.layers.4.self_attn.q_proj.weight"] == "W8A8"
    (folder / "quant_model_description.json").write_text("{}")
    assert resolve_model(str(folder), ["--quantization", "ascend"]).path == str(folder)


def test_a_description_for_what_a_hub_s_cache_holds(tmp_path):
    folder = write_config(tmp_path / "xdg/huggingface/hub/models--me--mine/snapshots/abc")
    (folder / "config.json").write_text(json.dumps(find_preset("memprof/tiny").config))
    model = resolve_model("me/mine", ["--quantization", "ascend"])
    assert (presets.Path(model.path) / "quant_model_description.json").is_file()
    assert model.extra_args[-2:] == ["--served-model-name", "me/mine"]
    (folder / "model.safetensors").write_bytes(
        b""
    )  # now it is the user's own: the engine says what it lacks
    assert resolve_model("me/mine", ["--quantization", "ascend"]).path == "me/mine"


def test_a_hub_s_name_alone_has_no_place_for_a_description(hub):
    model = resolve_model("Qwen/Qwen3-14B", ["--quantization", "ascend"])
    assert is_preset(model)
    given = ["--quantization", "ascend", "--load-format", "auto"]
    assert resolve_model("Qwen/Qwen3-14B", given).path == "Qwen/Qwen3-14B"


def test_a_kind_without_rules_is_refused_by_name(tmp_path):
    with pytest.raises(UsageError, match=r"openai/gpt-oss-20b.*'gpt_oss'") as caught:
        resolve_model("openai/gpt-oss-20b", ["--quantization", "ascend"])
    assert "qwen3_moe" in caught.value.hint
    folder = model_folder(tmp_path / "mine", {**SMALL, "model_type": "nobody"}, tokenizer={})
    with pytest.raises(UsageError, match=r"mine has no quant_model_description\.json"):
        resolve_model(str(folder), ["--quantization=ascend"])


def test_a_w8a8_name_of_the_hub_is_started_quantized():
    """As the checkpoint of that name would be; what the user asks for stays."""
    model = resolve_model("vllm-ascend/Qwen3-8B-W8A8", [])
    assert model.extra_args[:4] == ["--load-format", "dummy", "--quantization", "ascend"]
    assert (presets.Path(model.path) / "quant_model_description.json").is_file()
    plain = resolve_model("vllm-ascend/Qwen3-8B-W8A8", ["--quantization", "fp8"])
    assert "ascend" not in plain.extra_args
    of_sglang = resolve_model("vllm-ascend/Qwen3-8B-W8A8", [], "modelslim")
    assert of_sglang.extra_args[:4] == ["--load-format", "dummy", "--quantization", "modelslim"]
    assert of_sglang.path == model.path


@pytest.mark.parametrize(
    ("name", "draft", "kind"),
    [
        ("Eco-Tech/DeepSeek-V3.1-Terminus-w4a8-mtp-QuaRot", 61, "FLOAT"),
        ("Eco-Tech/GLM-5-w4a8", 78, "W8A8_DYNAMIC"),
    ],
)
def test_a_w4a8_model_has_its_routed_experts_in_four_bits(name, draft, kind):
    """One scale per channel; the layer for drafts is as in the W8A8 models."""
    model = resolve_model(name, [])
    assert "ascend" in model.extra_args
    assert "W4A8 in the layers" in model.stand_ins[-1]
    path = presets.Path(model.path) / "quant_model_description.json"
    types = json.loads(path.read_text())
    assert (types["model_quant_type"], types["group_size"]) == ("W4A8_DYNAMIC", 0)
    experts = {name: kind for name, kind in types.items() if ".experts." in name}
    drafts = {name for name in experts if name.startswith(f"model.layers.{draft}.")}
    assert {experts[name] for name in drafts} == {kind}
    assert {kind for name, kind in experts.items() if name not in drafts} == {"W4A8_DYNAMIC"}
    assert types["model.layers.3.mlp.shared_experts.up_proj.weight"] == "W8A8_DYNAMIC"
    assert types["model.layers.3.self_attn.o_proj.weight"] == "W8A8"


def test_a_quantized_model_has_no_note_about_bfloat16():
    def notes(*args):
        return resolve_model("deepseek-ai/DeepSeek-R1", [*args]).stand_ins

    assert any("bfloat16" in each for each in notes())
    assert not any("bfloat16" in each for each in notes("--quantization", "ascend"))
