// Host kernels of RMS norm and layer norm. They compute in float32 or
// wider, whatever the type of the tensors, and round once, at the end.
#include <cmath>
#include <utility>
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

// Rows of the last axes that `gamma` spans: y = x / sqrt(mean(x^2) + epsilon) x gamma [+ beta].
// `reciprocals` may be null.
void normalize_rows(std::vector<float> &values, const std::vector<float> &gamma,
                    const std::vector<float> &beta, double epsilon,
                    std::vector<float> *reciprocals) {
  size_t width = gamma.size();
  for (size_t start = 0; start + width <= values.size(); start += width) {
    float *row = values.data() + start;
    float squares = 0;
    for (size_t at = 0; at < width; ++at) squares += row[at] * row[at];
    float factor = 1 / std::sqrt(squares / static_cast<float>(width) + static_cast<float>(epsilon));
    if (reciprocals) reciprocals->push_back(factor);
    for (size_t at = 0; at < width; ++at)
      row[at] = row[at] * factor * gamma[at] + (beta.empty() ? 0 : beta[at]);
  }
}

bool rows_of(const aclTensor &in, const aclTensor &gamma) {
  int64_t width = element_count(gamma);
  return width > 0 && !in.shape.empty() && element_count(in) % width == 0;
}

// rms_norm(x, gamma, epsilon, y, rstd), gemma_rms_norm with 1 + gamma
void rms_norm(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() != 4) return;
  const aclTensor &x = *tensors[0], &weight = *tensors[1], &y = *tensors[2], &rstd = *tensors[3];
  if (!usable(x) || !usable(weight) || !usable(y) || x.shape != y.shape || !rows_of(x, weight))
    return;
  std::vector<float> values, gamma, reciprocals;
  read_floats(x, &values);
  read_floats(weight, &gamma);
  if (call.name == "GemmaRmsNorm")
    for (float &each : gamma) each += 1;
  normalize_rows(values, gamma, {}, call.real(0), &reciprocals);
  write_floats(y, values);
  if (usable(rstd) && element_count(rstd) == static_cast<int64_t>(reciprocals.size()))
    write_floats(rstd, reciprocals);
}

// add_rms_norm(x1, x2, gamma, epsilon, y, rstd, x), add_rms_norm_bias(x1, x2, gamma, beta or null,
// epsilon, y, rstd, x): x = x1 + x2, y its norm
void add_rms_norm(Call &call) {
  auto tensors = tensors_of(call);
  bool biased = tensors.size() == 7;
  if (tensors.size() != 6 && !biased) return;
  size_t results = biased ? 4 : 3;
  const aclTensor &first = *tensors[0], &second = *tensors[1], &weight = *tensors[2];
  const aclTensor &y = *tensors[results], &rstd = *tensors[results + 1],
                  &sum = *tensors[results + 2];
  for (const aclTensor *tensor : {&first, &second, &weight, &y, &sum})
    if (!usable(*tensor)) return;
  if (first.shape != second.shape || first.shape != y.shape || first.shape != sum.shape ||
      !rows_of(first, weight))
    return;
  std::vector<float> values, others, gamma, beta, reciprocals;
  read_floats(first, &values);
  read_floats(second, &others);
  read_floats(weight, &gamma);
  if (biased) {
    if (!usable(*tensors[3]) || element_count(*tensors[3]) != element_count(weight)) return;
    read_floats(*tensors[3], &beta);
  }
  for (size_t at = 0; at < values.size(); ++at) values[at] += others[at];
  write_floats(sum, values);
  normalize_rows(values, gamma, beta, call.real(0), &reciprocals);
  write_floats(y, values);
  if (usable(rstd) && element_count(rstd) == static_cast<int64_t>(reciprocals.size()))
    write_floats(rstd, reciprocals);
}

// layer_norm(x, normalized shape, weight or null, bias or null, epsilon, y, mean, rstd)
void layer_norm(Call &call) {
  aclTensor *x = tensor_at(call, 0), *weight = tensor_at(call, 2), *bias = tensor_at(call, 3),
            *y = tensor_at(call, 4);
  if (!x || !y || call.arguments[1].kind != Kind::kIntArray || !usable(*x) || !usable(*y) ||
      x->shape != y->shape)
    return;
  int64_t width = 1;
  for (int64_t extent : call.arguments[1].integers) width *= extent;
  if (width <= 0 || element_count(*x) % width) return;
  std::vector<float> values, gamma, beta;
  for (auto [tensor, into] : {std::pair(weight, &gamma), std::pair(bias, &beta)}) {
    if (!tensor) continue;
    if (!usable(*tensor) || element_count(*tensor) != width) return;
    read_floats(*tensor, into);
  }
  read_floats(*x, &values);
  size_t count = static_cast<size_t>(width);
  for (size_t start = 0; start < values.size(); start += count) {
    float *row = values.data() + start;
    double sum = 0, squares = 0;
    for (size_t at = 0; at < count; ++at) sum += row[at];
    double mean = sum / static_cast<double>(count);
    for (size_t at = 0; at < count; ++at) squares += (row[at] - mean) * (row[at] - mean);
    double factor = 1 / std::sqrt(squares / static_cast<double>(count) + call.real(0));
    for (size_t at = 0; at < count; ++at)
      row[at] = static_cast<float>((row[at] - mean) * factor * (gamma.empty() ? 1 : gamma[at]) +
                                   (beta.empty() ? 0 : beta[at]));
  }
  write_floats(*y, values);
}

constexpr KernelRow kRows[] = {
    {"RmsNorm", rms_norm},        {"GemmaRmsNorm", rms_norm},
    {"AddRmsNorm", add_rms_norm}, {"AddRmsNormBias", add_rms_norm},
    {"LayerNorm", layer_norm},
};

}  // namespace

KernelRows normalization_kernels() { return KernelRows(kRows); }

}  // namespace memprof_sim
