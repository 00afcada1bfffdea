"""SGLang, driven without a server."""
