"""``mooncake``, the transfer engine that vllm-ascend's connectors import: see ``engine``."""
