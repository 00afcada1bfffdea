from typing import Any, NamedTuple


class GPUTarget(NamedTuple):
    backend: str
    arch: Any
    warp_size: int


class BaseBackend:
    def __init__(self, target):
        self.target = target

    def hash(self):
        return f"memprof-null-triton-{self.target.arch}"

    def parse_options(self, options):
        from types import SimpleNamespace

        return SimpleNamespace(**options)

    def get_attrs_descriptor(self, args, params):
        return AttrsDescriptor()

    def load_dialects(self, context):
        pass

    def get_codegen_implementation(self, options=None):
        return {}


class AttrsDescriptor:
    """Divisibility facts about arguments; torch builds one when it describes a kernel."""

    def __init__(self, params=None, hash=None):
        self.arg_properties = {}
        self.property_values = {"tt.divisibility": 16, "tt.equal_to": 1}
        self.constant_properties = {"tt.equal_to"}

    @classmethod
    def from_dict(cls, data):
        descriptor = cls()
        descriptor.arg_properties = dict(data.get("arg_properties", {}))
        return descriptor

    def to_dict(self):
        return {"arg_properties": dict(self.arg_properties), "cls": type(self).__name__}

    def __getattr__(self, name):
        if name.startswith("_") or name == "arg_properties":
            raise AttributeError(name)
        return self.arg_properties.get(f"tt.{name}", [])
