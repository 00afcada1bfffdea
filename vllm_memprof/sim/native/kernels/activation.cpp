// Host kernels of activation functions: element by element, softmax, gates. They compute in float32
// or wider, whatever the type of the tensors, and round once, at the end.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/arguments.h"
#include "kernels/dense_floats.h"
#include "kernels/table.h"
#include "kernels/tensor_view.h"

// Sums are rounded after each product, the same floats on every machine.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "fp-contract=off")
#endif

namespace memprof_sim {
namespace {

using Function = double (*)(double);

double reciprocal(double x) { return 1 / x; }
double reciprocal_root(double x) { return 1 / std::sqrt(x); }
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double silu(double x) { return x / (1 + std::exp(-x)); }
double relu(double x) { return x > 0 || std::isnan(x) ? x : 0; }
double gelu(double x) { return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0))); }
double gelu_tanh(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}
double fast_gelu(double x) { return x / (1 + std::exp(-1.702 * x)); }
double exponential(double x) { return std::exp(x); }
double logarithm(double x) { return std::log(x); }
double root(double x) { return std::sqrt(x); }
double sine(double x) { return std::sin(x); }
double cosine(double x) { return std::cos(x); }
double hyperbolic_tangent(double x) { return std::tanh(x); }
double square(double x) { return x * x; }
double round_down(double x) { return std::floor(x); }
double round_up_whole(double x) { return std::ceil(x); }

// op(self, ..., out); in place when there is one tensor.
template <Function function>
void apply(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.empty() || tensors.size() > 2) return;
  const aclTensor &in = *tensors[0], &out = *tensors.back();
  if (!usable(out) || !usable(in) || in.shape != out.shape) return;
  walk(out.shape, {&out, &in}, [&](auto &, int64_t *index) {
    set_value(out, index[0], function(static_cast<double>(value_at(in, index[1]))));
  });
}

// gelu_v2(self, approximate, out)
void gelu_either(Call &call) {
  if (call.arguments.size() < 2 || call.arguments[1].kind != Kind::kNone) return;
  (call.arguments[1].word & 0xff ? apply<gelu_tanh> : apply<gelu>)(call);
}

// softmax, log_softmax(self, dim, out)
template <bool logarithmic>
void softmax(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() != 2 || call.arguments.size() < 3) return;
  const aclTensor &in = *tensors[0], &out = *tensors[1];
  size_t axis = 0;
  if (!usable(in) || !usable(out) || in.shape != out.shape || !axis_of(call, 1, in, &axis)) return;
  for_lines(in, out, axis, [&](std::vector<float> &line) {
    float largest = *std::max_element(line.begin(), line.end());
    double sum = 0;
    for (float value : line) sum += std::exp(static_cast<double>(value) - largest);
    for (float &value : line)
      value =
          static_cast<float>(logarithmic ? value - largest - std::log(sum)
                                         : std::exp(static_cast<double>(value) - largest) / sum);
  });
}

// swiglu(x, dim, out): silu of the first half times the second
void swiglu(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() != 2 || call.arguments.size() < 3) return;
  const aclTensor &in = *tensors[0], &out = *tensors[1];
  size_t axis = 0;
  if (!usable(in) || !usable(out) || in.shape.size() != out.shape.size() ||
      !axis_of(call, 1, in, &axis))
    return;
  aclTensor gate = in, up = in;
  if (in.shape[axis] != 2 * out.shape[axis]) return;
  gate.shape[axis] = up.shape[axis] = out.shape[axis];
  up.offset += out.shape[axis] * in.strides[axis];
  if (gate.shape != out.shape) return;
  std::vector<float> gates, ups;
  read_floats(gate, &gates);
  read_floats(up, &ups);
  for (size_t at = 0; at < gates.size(); ++at)
    gates[at] = gates[at] / (1 + std::exp(-gates[at])) * ups[at];
  write_floats(out, gates);
}

constexpr KernelRow kRows[] = {
    {"Reciprocal", apply<reciprocal>},
    {"Rsqrt", apply<reciprocal_root>},
    {"Sqrt", apply<root>},
    {"Sigmoid", apply<sigmoid>},
    {"Silu", apply<silu>},
    {"Relu", apply<relu>},
    {"Gelu", apply<gelu>},
    {"GeluV2", gelu_either},
    {"FastGelu", apply<fast_gelu>},
    {"Exp", apply<exponential>},
    {"Log", apply<logarithm>},
    {"Sin", apply<sine>},
    {"Cos", apply<cosine>},
    {"Tanh", apply<hyperbolic_tangent>},
    {"Square", apply<square>},
    {"Floor", apply<round_down>},
    {"Ceil", apply<round_up_whole>},
    {"InplaceReciprocal", apply<reciprocal>},
    {"InplaceRsqrt", apply<reciprocal_root>},
    {"InplaceSqrt", apply<root>},
    {"InplaceSigmoid", apply<sigmoid>},
    {"InplaceExp", apply<exponential>},
    {"InplaceLog", apply<logarithm>},
    {"Softmax", softmax<false>},
    {"LogSoftmax", softmax<true>},
    {"SwiGlu", swiglu},
};

}  // namespace

KernelRows activation_kernels() { return KernelRows(kRows); }

}  // namespace memprof_sim
