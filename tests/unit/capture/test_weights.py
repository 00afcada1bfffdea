"""The reading of a model: each storage once, and its time."""

from __future__ import annotations

import sys
import time
import types

import pytest

from vllm_memprof.capture import weights


class Tensor:
    dtype, device = "torch.bfloat16", types.SimpleNamespace(type="npu")

    def __init__(self, address, shape=(4, 2), size=16, device="npu"):
        self.address, self.shape, self.size = address, shape, size
        self.device = types.SimpleNamespace(type=device)

    def untyped_storage(self):
        return types.SimpleNamespace(data_ptr=lambda: self.address, nbytes=lambda: self.size)


class Module:
    def __init__(self, parameters=(), buffers=(), children=(), **attributes):
        self._parameters, self._buffers = dict(parameters), dict(buffers)
        self._modules, self._non_persistent_buffers_set = dict(children), {"cos_sin"}
        vars(self).update(attributes)

    def named_modules(self, prefix=""):
        yield prefix, self
        for name, child in self._modules.items():
            yield from child.named_modules(f"{prefix}.{name}" if prefix else name)


class Events:
    def __init__(self):
        self.told = {}
        blocks = [{"size": 512, "state": "active_allocated"}] * 3
        free = [{"size": 512, "state": "inactive"}]
        segments = [{"address": 1000, "blocks": blocks + free}]
        runtime = types.SimpleNamespace(memory_snapshot=lambda: segments)
        self.probe = types.SimpleNamespace(runtime=runtime)

    def emit(self, kind, **fields):
        self.told = {"kind": kind, **fields}


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(Tensor=Tensor))
    return Events()


def test_each_storage_once_under_its_first_name(recorder):
    embed = Module({"weight": Tensor(1000), "host": Tensor(5000, device="cpu")}, tp_size=2)
    layers = [
        Module({"weight": Tensor(1512 + 512 * n), "bias": None}, {"cos_sin": Tensor(9000)},
               kept=[Tensor(9512 + n)], again=Tensor(1000))
        for n in range(2)
    ]  # fmt: skip
    children = {"embed": embed, "layers": Module(children={str(n): layers[n] for n in range(2)})}
    model = Module(children=children, lm_head=embed)
    weights.tell(recorder, types.SimpleNamespace(model=model, tp_size=2))
    told = recorder.told
    rows = {row["name"]: row for row in told["rows"]}
    assert (told["kind"], told["ranks"]) == ("weights", {"tp": 2})
    assert set(rows) == {"embed.weight", "layers.*.weight", "layers.*.cos_sin", "layers.*.kept.*"}
    assert (rows["embed.weight"]["block_bytes"], rows["embed.weight"]["facts"]) == (
        512,
        {"tp_size": 2},
    )
    assert (rows["layers.*.weight"]["count"], rows["layers.*.weight"]["layers"]) == (2, [0, 1])
    assert rows["layers.*.cos_sin"]["kind"] == "buffer"
    assert (
        rows["layers.*.kept.*"] | {"kind": "attribute", "block_bytes": None}
        == rows["layers.*.kept.*"]
    )


def test_tensors_of_no_module(recorder, monkeypatch):
    """Those of the engine's own code, also in its objects, that were not there before."""
    dispatcher = type("Dispatcher", (), {"__module__": "vllm_ascend.ops"})()
    dispatcher.ids = Tensor(7000)
    method = type("Method", (), {"__module__": "vllm_ascend.ops"})()
    method.dispatcher = dispatcher

    class Lazy(dict):
        def items(self):
            raise AssertionError("it imports all that it names")

    code = types.SimpleNamespace(_cos=Tensor(1512), _old=Tensor(1000), methods={"all": method})
    code.lazy = Lazy()
    monkeypatch.setitem(sys.modules, "vllm_ascend.ops", code)
    assert sorted(weights.blocks_of(recorder)) == [1000, 1512, 2024]
    weights.tell(recorder, types.SimpleNamespace(model=Module()), {1000})
    rows = {row["name"]: row["kind"] for row in recorder.told["rows"]}
    assert rows == dict.fromkeys(
        ("vllm_ascend.ops._cos", "vllm_ascend.ops.methods.all.dispatcher.ids"), "shared"
    )


def test_a_thousand_tensors_in_50_ms(recorder):
    layers = {
        str(n): Module({f"w{k}": Tensor(10_000 + 16 * (20 * n + k)) for k in range(20)})
        for n in range(50)
    }
    holder = types.SimpleNamespace(model=Module(children=layers))
    spent = []
    for _ in range(5):
        begun = time.process_time()
        weights.tell(recorder, holder)
        spent.append(time.process_time() - begun)
    assert sum(row["count"] for row in recorder.told["rows"]) == 1000
    assert min(spent) < 0.05
