"""Which pieces of a compiled model are alike: the same operators on inputs of the same form, and
nothing else."""

from __future__ import annotations

from tests.shim.conftest import Sim

PIECES = """
from torch.fx import symbolic_trace
from vllm_memprof.engines.vllm.shortcuts import _piece

def content_of(graph, inputs):
    return _piece(None, graph, inputs, None, None)

def layer(x, weight, scale=2.0, keep=slice(0, 2)):
    return torch.relu(x @ weight)[keep] * scale, x

def content(function=layer, x=(4, 8), weight=(8, 8), dtype=torch.float32, **constants):
    graph = symbolic_trace(function, concrete_args={"scale": 2.0, "keep": slice(0, 2), **constants})
    return content_of(graph, [torch.zeros(x, dtype=dtype), torch.ones(weight, dtype=dtype)])

def other_operator(x, weight, scale=2.0, keep=slice(0, 2)):
    return torch.sigmoid(x @ weight)[keep] * scale, x

def other_order(x, weight, scale=2.0, keep=slice(0, 2)):
    return x, torch.relu(x @ weight)[keep] * scale

def other_input(x, weight, scale=2.0, keep=slice(0, 2)):
    return torch.relu(weight @ weight)[keep] * scale, x

def renamed(activation, matrix, scale=2.0, keep=slice(0, 2)):
    return torch.relu(activation @ matrix)[keep] * scale, activation

class WithWeight(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8, 8))
    def forward(self, x):
        return x @ self.weight

one = content()
graph = symbolic_trace(layer, concrete_args={"scale": 2.0, "keep": slice(0, 2)})
square = torch.zeros(8, 8)
apart = content_of(graph, [square, torch.zeros(8, 8)])
print("RESULT", json.dumps({
    "alike": [one == content(), one == content(renamed)],
    "hash": hash(one) == hash(content()),
    "other": {
        "operator": one == content(other_operator),
        "order": one == content(other_order),
        "input": one == content(other_input),
        "scale": one == content(scale=3.0),
        "slice": one == content(keep=slice(0, 3)),
        "shape": one == content(x=(5, 8)),
        "type": one == content(dtype=torch.float16),
        "form": apart == content_of(graph, [square, torch.zeros(8, 8).t()]),
        "shared": apart == content_of(graph, [square, square]),
        "device": apart == content_of(graph, [square, torch.zeros(8, 8, device="meta")]),
    },
    "with a weight of its own": content_of(symbolic_trace(WithWeight()), [torch.zeros(4, 8)]),
}))
"""


def test_alike_and_other_pieces(sim: Sim) -> None:
    found = sim.run_torch(PIECES)
    assert found["alike"] == [True, True]
    assert found["hash"]
    assert not [name for name, alike in found["other"].items() if alike]
    assert found["with a weight of its own"] is None


NAMED = """
from types import SimpleNamespace
from torch.fx import symbolic_trace, wrap
from vllm_memprof.engines.vllm import shortcuts

LAYERS = {"experts.0": 1.0, "experts.1": 2.0, "experts.2": 3.0}
shortcuts._layers_by_name = lambda: LAYERS

@wrap
def of_layer(x, name):
    return x * LAYERS.get(name, 0)

compiled = []
def compile_piece(compiler, graph, inputs, config, compile_range):
    compiled.append(str(graph.code))
    return graph.forward, len(compiled)

compile_piece = shortcuts._once_for_alike(compile_piece)
def run(*names):
    def piece(x):
        for name in names:
            x = of_layer(x, name)
        return x
    function, number = compile_piece(None, symbolic_trace(piece), [torch.ones(1)], None, None)
    return [function(torch.ones(1)).item(), number]

print("RESULT", json.dumps([
    [run(f"experts.{n}") for n in range(3)],
    [run("experts.1", "experts.2"), run("experts.2", "experts.0"), run("experts.2", "experts.2")],
    [run("another"), run("experts.1")],
    LAYERS,
]))
"""


def test_a_piece_with_another_layer_s_name_runs_with_its_own_layer(sim: Sim) -> None:
    one, two, others, layers = sim.run_torch(NAMED)
    assert one == [[1.0, 1], [2.0, 1], [3.0, 1]]
    assert two == [[6.0, 2], [3.0, 2], [9.0, 3]]
    assert others == [[0.0, 4], [2.0, 1]]
    assert list(layers.items()) == [("experts.0", 1.0), ("experts.1", 2.0), ("experts.2", 3.0)]


PACKED = """
from vllm_memprof.engines.vllm.shortcuts import of_a_worker

def grown_by(pack):
    weight = torch.zeros(24, 4096, dtype=torch.int32).npu()
    before = torch.npu.memory_allocated()
    torch.npu.reset_peak_memory_stats()
    packed = pack(weight)
    after, peak = torch.npu.memory_allocated(), torch.npu.max_memory_allocated()
    return [list(packed.shape), str(packed.dtype), str(packed.device), after - before, peak - before]

ours = {name: value for _, name, value in of_a_worker()}["npu_convert_weight_to_int4pack"]
print("RESULT", json.dumps([grown_by(torch_npu.npu_convert_weight_to_int4pack), grown_by(ours)]))
"""


def test_weights_of_four_bits_take_what_torch_npu_packs_them_into(sim: Sim) -> None:
    theirs, ours = sim.run_torch(PACKED)
    assert ours == theirs
    assert ours[0] == [24, 512]


KEPT = """
from types import SimpleNamespace
from torch.fx import symbolic_trace
from torch.fx.passes.split_module import split_module
from vllm_memprof.engines.vllm.shortcuts import _without_inner_results

def model(x, weight):
    product = x @ weight
    inner = torch.relu(product)
    crossing = torch.sigmoid(inner)
    doubled = crossing * 2
    return doubled + product

def kept(split):
    graph = symbolic_trace(model)
    for node in graph.graph.nodes:
        node.meta["example_value"] = torch.zeros(2)
    pieces = split and split_module(graph, None, lambda node: node.name in ("mul", "add"))
    of_node = {node.name: node.meta["example_value"] for node in graph.graph.nodes}
    keep = _without_inner_results(
        lambda _, compiled: [node.name for node in compiled.graph_module.graph.nodes
                             if node.meta.get("example_value") is of_node[node.name]])
    backend = SimpleNamespace(split_gm=pieces)
    return keep(None, SimpleNamespace(graph_module=graph, vllm_backend=backend))

print("RESULT", json.dumps([kept(True), kept(None)]))
"""


def test_a_kept_model_has_the_results_that_go_from_one_piece_to_another(sim: Sim) -> None:
    split, whole = sim.run_torch(KEPT)
    assert set(whole) - set(split) == {"relu", "mul", "output"}
    assert split == ["x", "weight", "matmul", "sigmoid", "add"]
