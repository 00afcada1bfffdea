"""A multimodal model's folder that lacks the files of its processor."""

from __future__ import annotations

import json

import pytest

from vllm_memprof.sim import presets
from vllm_memprof.sim.folders import PROCESSORS
from vllm_memprof.sim.presets import find_preset, resolve_model

QWEN35 = {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "text_config": {"model_type": "qwen3_5_text", "vocab_size": 248320},
    "vision_config": {"patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 4},
}
OMNI = {
    "model_type": "qwen2_5_omni",
    "architectures": ["Qwen2_5OmniModel"],
    "thinker_config": {
        "image_token_index": 151655,
        "audio_token_index": 151646,
        "video_token_index": 151656,
        "text_config": {"vocab_size": 152064},
        "vision_config": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
    },
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMPROF_CACHE_DIR", str(tmp_path / "cache"))


def folder_of(path, config, **files):
    path.mkdir()
    for name, content in {"config": config, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def made_of(folder):
    model = resolve_model(str(folder), [])
    made = presets.Path(model.path)
    return model, {path.name: json.loads(path.read_text()) for path in made.glob("*.json")}


def ids_of(files):
    return {token["content"]: token["id"] for token in files["tokenizer.json"]["added_tokens"]}


def test_the_newer_kind_has_its_patches_and_token_ids(tmp_path):
    model, files = made_of(folder_of(tmp_path / "m", QWEN35))
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        assert (files[name]["patch_size"], files[name]["merge_size"]) == (14, 4)
    ids = ids_of(files)
    assert (ids["<|image_pad|>"], ids["<|video_pad|>"]) == (248056, 248057)
    assert ids["<|vision_start|>"] == 248053
    assert [note for note in model.stand_ins if "has no preprocessor_config.json, video_" in note]


def test_the_kind_with_sound_has_the_names_that_its_processor_asks_for(tmp_path):
    _, files = made_of(folder_of(tmp_path / "m", OMNI))
    ids, names = ids_of(files), files["tokenizer_config.json"]["extra_special_tokens"]
    thinker = OMNI["thinker_config"]
    for kind in ("image", "audio", "video"):
        assert ids[names[f"{kind}_token"]] == thinker[f"{kind}_token_index"]
    assert files["preprocessor_config.json"]["feature_extractor_type"] == "WhisperFeatureExtractor"


def test_a_tokenizer_of_the_user_is_kept_and_the_processor_added(tmp_path):
    own = {"tokenizer_class": "Qwen2TokenizerFast", "mine": True}
    config = find_preset("Qwen/Qwen3-VL-8B-Instruct").config
    model, files = made_of(folder_of(tmp_path / "m", config, tokenizer_config=own))
    assert files["tokenizer_config.json"] == own
    assert "preprocessor_config.json" in files
    assert not [note for note in model.stand_ins if "has no tokenizer" in note]


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_of_the_user_is_kept(tmp_path, name):
    own = {name.removesuffix(".json"): {"mine": True}, "tokenizer_config": {}}
    folder = folder_of(tmp_path / "m", QWEN35, **own)
    assert resolve_model(str(folder), []).path == str(folder)


def test_an_unknown_kind_gets_nothing(tmp_path):
    config = {"model_type": "foo_vl", "vocab_size": 9999, "vision_config": {}}
    _, files = made_of(folder_of(tmp_path / "m", config))
    assert not [name for name in files if "processor" in name]


def test_another_vocabulary_moves_the_special_tokens(tmp_path):
    config = {**QWEN35, "image_token_id": 500_012, "text_config": {"vocab_size": 500_100}}
    model, files = made_of(folder_of(tmp_path / "m", config))
    assert ids_of(files)["<|image_pad|>"] == 500_012
    assert any("generated as for Qwen/Qwen3.5-" in note for note in model.stand_ins)
