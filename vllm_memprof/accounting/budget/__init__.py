"""The engine's equation, and the KV cache that fits into requested memory and the device."""
