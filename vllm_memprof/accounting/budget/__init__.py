"""The engine's equation, and the KV cache that fits the request and the device."""
