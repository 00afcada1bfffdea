"""memprof: where device memory goes when vLLM serves a model."""

__version__ = "0.1.0"
