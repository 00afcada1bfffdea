"""Layers that go into Dynamo's graph as copies: the same graph as without, on the engine's torch."""

from __future__ import annotations

from typing import Any

import pytest

from tests.shim.conftest import Sim

MODELS = """
import types
from contextlib import ExitStack
from torch import nn
from vllm_memprof.engines.vllm import alike_layers
from vllm_memprof.engines.vllm.shortcuts import all_replaced

copied = [0]
copy = alike_layers._Layers._copy
def counted(*args):
    copied[0] += 1
    return copy(*args)
alike_layers._Layers._copy = counted

@torch.library.custom_op("toy::named", mutates_args=())
def named(x: torch.Tensor, name: str) -> torch.Tensor:
    return x.clone()
named.register_fake(lambda x, name: torch.empty_like(x))

class Shared:
    count = 0
OUTSIDE, KEPT = Shared(), Shared()
KINDS = {f"model.layers.{n}": "neg" if n == 5 else "relu" for n in range(8)}

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.kept = None
        self.weight = nn.Parameter(torch.ones(8))

class Layer(nn.Module):
    def __init__(self, number, width=8, act="relu", factor=1.0):
        super().__init__()
        self.up = nn.Linear(8, width, bias=False)
        self.down = nn.Linear(width, 8, bias=False)
        self.inner = Inner()
        self.name, self.number, self.act = f"model.layers.{number}", number, act
        self.factor = factor
        self.call = self.plain
    def forward(self, places, x, residual=None):
        residual = x if residual is None else x + residual
        halves = self.up(residual * self.inner.weight).chunk(2, -1)
        x = self.down(torch.cat([getattr(torch, self.act)(halves[0]), halves[1]], -1))
        return self.call(torch.ops.toy.named(x, self.name), places), residual
    def plain(self, x, places):
        return x + places.view(places.shape[0], 1)

class ReadsItsNumber(Layer):
    def plain(self, x, places):
        return x * 2 if self.number % 3 == 0 else x
class PassesItsNumber(Layer):
    def plain(self, x, places):
        return x * self.number
class CountsOutside(Layer):
    def plain(self, x, places):
        OUTSIDE.count += 1
        return x * OUTSIDE.count
class SetsItsOwn(Layer):
    def plain(self, x, places):
        if self.inner.kept is None:
            self.inner.kept = KEPT
        return x
class LooksItselfUp(Layer):
    def plain(self, x, places):
        return getattr(torch, KINDS[self.name])(x)
class SetsWhatItHolds(Layer):
    def __init__(self, number):
        super().__init__(number)
        self.method, self.outside = Shared(), OUTSIDE
    def plain(self, x, places):
        self.method.count = None
        return x
class SetsWhatAllHold(SetsWhatItHolds):
    def plain(self, x, places):
        self.outside.count = self.number
        return x
class GivesBack(Layer):
    def forward(self, places, x, residual=None):
        given = x if residual is None else residual
        return super().forward(places, x, residual)[0], given
class Other(Layer):
    def plain(self, x, places):
        return x - 1

class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
    def forward(self, places, x):
        residual = None
        for layer in self.layers:
            x, residual = layer(places, x, residual)
        return x + residual

N = range(8)
MODELS = {
    "alike": lambda: [Layer(n) for n in N],
    "sets an attribute of its own": lambda: [SetsItsOwn(n) for n in N],
    "sets what it holds": lambda: [SetsWhatItHolds(n) for n in N],
    "sets what all hold": lambda: [SetsWhatAllHold(n) for n in N],
    "gives an argument back": lambda: [GivesBack(n) for n in N],
    "two kinds": lambda: [(Other if n % 2 else Layer)(n) for n in N],
    "reads its number": lambda: [ReadsItsNumber(n) for n in N],
    "passes its number": lambda: [PassesItsNumber(n) for n in N],
    "counts outside": lambda: [CountsOutside(n) for n in N],
    "looks itself up": lambda: [LooksItselfUp(n) for n in N],
    "one is wider": lambda: [Layer(n, 16 if n == 5 else 8) for n in N],
    "one has another function": lambda: [Layer(n, act="neg" if n == 5 else "relu") for n in N],
    "one has another method": lambda: [Layer(n) for n in N],
    "one has a hook": lambda: [Layer(n) for n in N],
}

def traced(name, replacements):
    torch._dynamo.reset()
    torch.manual_seed(0)
    OUTSIDE.count, copied[0], graphs = 1, 0, []
    model = Model(MODELS[name]())
    if name == "one has another method":
        model.layers[5].call = types.MethodType(Other.plain, model.layers[5])
    if name == "one has a hook":
        model.layers[5].register_forward_hook(lambda module, args, out: (out[0] * 3, out[1]))
    def backend(graph, examples):
        graphs.append(str(graph.graph) + str([n.meta["example_value"].shape for n in graph.graph.nodes
                                              if hasattr(n.meta.get("example_value"), "shape")]))
        return graph.forward
    places, x = torch.arange(3), torch.ones(3, 8)
    torch._dynamo.mark_dynamic(places, 0)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad(), all_replaced(replacements):
        result = torch.compile(model, backend=backend, fullgraph=True)(places, x)
    state = [OUTSIDE.count, [[layer.inner.kept is KEPT, vars(getattr(layer, "method", KEPT))] for layer in model.layers]]
    return [graphs, result.tolist(), state], copied[0]

found = {}
for name in MODELS:
    (plain, _), (ours, count) = traced(name, []), traced(name, alike_layers.of_alike_layers())
    found[name] = [plain == ours, count, len(plain[0])]
print("RESULT", json.dumps(found))
"""


@pytest.fixture
def found(sim: Sim) -> dict[str, Any]:
    return sim.run_torch(MODELS)


def test_the_graph_is_the_one_without_copies(found: dict[str, Any]) -> None:
    assert {name: row[0] for name, row in found.items()} == dict.fromkeys(found, True)
    assert {row[2] for row in found.values()} == {1}
    # of eight layers the first has no residual, and two more are traced
    assert {name: row[1] for name, row in found.items()} == {
        "alike": 5,
        "sets an attribute of its own": 5,
        "sets what it holds": 5,
        "sets what all hold": 0,
        "gives an argument back": 5,
        "two kinds": 3,
        "reads its number": 0,
        "passes its number": 0,
        "counts outside": 0,
        "looks itself up": 0,
        "one is wider": 4,
        "one has another function": 4,
        "one has another method": 4,
        "one has a hook": 4,
    }
