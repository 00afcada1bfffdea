"""A KV connector for tests: vLLM's example, for the lists of tensors that vllm-ascend keeps.

Loaded by the engine (``kv_connector_module_path``). The example keeps the KV cache of whole prompts
in files of a folder; its layers are one tensor each, on Ascend a list of keys and values.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class FileConnector(ExampleConnector):  # type: ignore[misc]
    """Writes the keys of each layer; loads nothing, since no kernel's output counts here."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        keys = kv_layer if hasattr(kv_layer, "shape") else kv_layer[0]
        super().save_kv_layer(layer_name, keys.unsqueeze(1), attn_metadata, **kwargs)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return
