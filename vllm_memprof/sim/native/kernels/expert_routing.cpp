// Host kernels that route tokens to experts: the softmax of the gate, the largest scores and their
// experts. Where the scores are not computed, experts are chosen evenly: an all-to-all of real
// tokens is sized by them.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/arguments.h"
#include "kernels/dense_floats.h"
#include "kernels/selection.h"
#include "kernels/table.h"
#include "kernels/tensor_view.h"

namespace memprof_sim {
namespace {

// Softmax of every row of `scores`, its k largest and their experts; with `renormalize` they sum to
// one.
bool route(const aclTensor &scores, size_t k, bool renormalize, const aclTensor &weights,
           const aclTensor &experts) {
  if (!usable(scores) || !usable(weights) || !usable(experts) || float_result(scores) ||
      scores.shape.size() != 2 || weights.shape != experts.shape)
    return false;
  size_t rows = static_cast<size_t>(scores.shape[0]), count = static_cast<size_t>(scores.shape[1]);
  if (k == 0 || k > count ||
      weights.shape != std::vector<int64_t>{scores.shape[0], static_cast<int64_t>(k)})
    return false;
  std::vector<float> values, kept;
  std::vector<int64_t> chosen;
  read_floats(scores, &values);
  for (size_t row = 0; row < rows; ++row) {
    std::vector<Value> line(values.begin() + static_cast<int64_t>(row * count),
                            values.begin() + static_cast<int64_t>((row + 1) * count));
    Value largest = *std::max_element(line.begin(), line.end()), sum = 0, picked = 0;
    for (Value &each : line) sum += each = std::exp(static_cast<double>(each - largest));
    for (Value &each : line) each /= sum;
    std::vector<int64_t> first = order(line, k, true, true);
    for (int64_t expert : first) picked += line[static_cast<size_t>(expert)];
    for (int64_t expert : first) {
      kept.push_back(
          static_cast<float>(line[static_cast<size_t>(expert)] / (renormalize ? picked : 1)));
      chosen.push_back(expert);
    }
  }
  write_floats(weights, kept);
  write_values(experts, chosen);
  return true;
}

// The experts of a gate that is not computed. In every gate they follow their weights.
void spread_experts(Call &call) {
  auto tensors = tensors_of(call);
  for (size_t index = 2; index < tensors.size(); ++index) {
    const aclTensor &weights = *tensors[index - 1], &experts = *tensors[index];
    if (experts.shape.empty() || experts.shape != weights.shape || is_integer(weights.type) ||
        !is_integer(experts.type))
      continue;
    return spread_choices(experts, experts.shape.size() - 1, tensors[0]->shape.back());
  }
}

// moe_gating_top_k_softmax(x, finished or null, k, y, experts, rows): rows[i][j] = j x number of
// rows + i
void gating_softmax(Call &call) {
  auto tensors = tensors_of(call);
  bool plain =
      tensors.size() == 4 && call.arguments.size() > 2 && call.arguments[1].kind == Kind::kNone;
  if (!plain || !route(*tensors[0], static_cast<size_t>(call.arguments[2].word), false, *tensors[1],
                       *tensors[2]))
    return spread_experts(call);
  const aclTensor &rows = *tensors[3];
  if (!usable(rows) || rows.shape != tensors[1]->shape) return;
  walk(rows.shape, {&rows}, [&](auto &position, int64_t *index) {
    set_value(rows, index[0], static_cast<Value>(position[1] * rows.shape[0] + position[0]));
  });
}

// moe_gating_top_k(x, bias or null, k, groups kept, groups, mode, renormalize, norm, flag, scale,
// epsilon, y, experts, ...): computed for softmax (norm 0) without bias and with one group.
void gating(Call &call) {
  auto tensors = tensors_of(call);
  bool plain = tensors.size() >= 3 && call.arguments.size() > 8 &&
               call.arguments[1].kind == Kind::kNone && call.arguments[3].word <= 1 &&
               call.arguments[4].word <= 1 && static_cast<int32_t>(call.arguments[7].word) == 0 &&
               call.real(0) == 1;
  if (!plain || !route(*tensors[0], static_cast<size_t>(call.arguments[2].word),
                       call.arguments[6].word == 1, *tensors[1], *tensors[2]))
    spread_experts(call);
}

constexpr KernelRow kRows[] = {
    {"MoeGatingTopK", gating},
    {"MoeGatingTopKHash", spread_experts},
    {"MoeGatingTopKSoftmax", gating_softmax},
    {"MoeGatingTopKSoftmaxV2", spread_experts},
};

}  // namespace

KernelRows expert_routing_kernels() { return KernelRows(kRows); }

}  // namespace memprof_sim
