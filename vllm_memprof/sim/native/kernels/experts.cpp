// Host kernels of expert layers: tokens sorted by expert, a product of matrices per expert, and the
// way back. Unquantized only.
#include <algorithm>
#include <numeric>
#include <vector>

#include "kernels/arguments.h"
#include "kernels/dense_floats.h"
#include "kernels/matmul.h"
#include "kernels/table.h"
#include "kernels/tensor_view.h"

namespace memprof_sim {
namespace {

// moe_init_routing_custom and _v3(x, experts, scale, offset, active, capacity, experts, drop mode,
// counts' type, flag, quantization, [first, last), index type, sorted x, positions, counts,
// scales): rows of x by expert, in the order of the tokens; where each (token, choice) went, -1
// when its expert is not of this rank; how many each expert got.
void sort_by_expert(Call &call) {
  aclTensor *x = tensor_at(call, 0), *experts = tensor_at(call, 1);
  if (!x || !experts || call.arguments.size() < 16 || !usable(*x) || !usable(*experts) ||
      x->shape.size() != 2 || experts->shape.size() != 2)
    return;
  aclTensor *sorted = tensor_at(call, 13), *positions = tensor_at(call, 14),
            *counts = tensor_at(call, 15);
  bool plain = static_cast<int32_t>(word_at(call, 10)) == -1 && word_at(call, 7) == 0 &&
               word_at(call, 12) == 0 && word_at(call, 8) <= 1;
  if (!plain || !sorted || !positions || !counts || !usable(*sorted) || !usable(*positions) ||
      !usable(*counts))
    return;
  std::vector<int64_t> chosen = read_values<int64_t>(*experts), order(chosen.size()),
                       places(chosen.size(), -1);
  std::vector<int64_t> range = call.arguments[11].integers;
  int64_t first = range.size() == 2 ? range[0] : 0,
          last = range.size() == 2 ? range[1] : word_at(call, 6), choices = experts->shape[1];
  if (experts->shape[0] != x->shape[0] || sorted->shape.size() != 2 ||
      sorted->shape[1] != x->shape[1])
    return;
  if (element_count(*positions) != static_cast<int64_t>(places.size()) ||
      counts->shape != std::vector<int64_t>{last - first})
    return;
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return chosen[static_cast<size_t>(a)] < chosen[static_cast<size_t>(b)];
  });
  std::vector<int64_t> got(static_cast<size_t>(last - first), 0);
  int64_t next = 0;
  aclTensor source = *x, target = *sorted;
  source.shape = target.shape = {x->shape[1]};
  source.strides = {x->strides[1]};
  target.strides = {sorted->strides[1]};
  for (int64_t which : order) {
    int64_t expert = chosen[static_cast<size_t>(which)];
    if (expert < first || expert >= last) continue;
    ++got[static_cast<size_t>(expert - first)];
    if (next >= sorted->shape[0]) break;
    source.offset = x->offset + which / choices * x->strides[0];
    target.offset = sorted->offset + next * sorted->strides[0];
    copy(target, source);
    places[static_cast<size_t>(which)] = next++;
  }
  write_values(*positions, places);
  if (word_at(call, 8) == 0) std::partial_sum(got.begin(), got.end(), got.begin());
  write_values(*counts, got);
}

// grouped_matmul([x], [weights], [bias], 5 of quantization, group list, 3 of activation, split,
// group type, group list's type, activation,
// ..., [out], ...): rows in groups, a matrix for each. The group list is counts (type 1) or their
// running sum (0).
void multiply_groups(Call &call) {
  const auto *xs = list_at(call, 0), *weights = list_at(call, 1);
  aclTensor *groups = tensor_at(call, 8);
  const std::vector<aclTensor> *outs = nullptr;
  for (size_t index = 16; index < call.arguments.size() && (!outs || outs->empty()); ++index)
    outs = list_at(call, index);
  for (size_t index = 2; index < 12; ++index) {  // neither bias nor quantization nor activation
    if (index == 8 || index >= call.arguments.size()) continue;
    const auto *list = list_at(call, index);
    if (list ? !list->empty() && list->front().data : call.arguments[index].kind != Kind::kNone)
      return;
  }
  if (!xs || !weights || !groups || !outs || xs->size() != 1 || weights->size() != 1 ||
      outs->size() != 1 || !usable(*groups))
    return;
  const aclTensor &x = xs->front(), &weight = weights->front(), &out = outs->front();
  int64_t list_type = static_cast<int64_t>(call.arguments[14].word);
  if (static_cast<int32_t>(word_at(call, 13)) != 0 || list_type > 1 || x.shape.size() != 2 ||
      weight.shape.size() != 3 || out.shape.size() != 2)
    return;
  std::vector<int64_t> ends = read_values<int64_t>(*groups);
  if (static_cast<int64_t>(ends.size()) != weight.shape[0]) return;
  if (list_type == 1) std::partial_sum(ends.begin(), ends.end(), ends.begin());
  int64_t begin = 0;
  for (size_t which = 0; which < ends.size(); begin = ends[which++]) {
    if (ends[which] < begin || ends[which] > x.shape[0] || ends[which] > out.shape[0]) return;
    if (ends[which] == begin) continue;
    aclTensor rows = x, matrix = weight, result = out;
    rows.shape[0] = result.shape[0] = ends[which] - begin;
    rows.offset += begin * x.strides[0];
    result.offset += begin * out.strides[0];
    matrix.offset += static_cast<int64_t>(which) * weight.strides[0];
    matrix.shape.erase(matrix.shape.begin());
    matrix.strides.erase(matrix.strides.begin());
    multiply_matrices(rows, matrix, result, nullptr, 1, 0);
  }
}

// moe_token_unpermute(rows, positions, weights or null, padded, shape, out): each token's rows,
// weighted and summed.
void gather_from_experts(Call &call) {
  auto tensors = tensors_of(call);
  bool weighted = tensors.size() == 4;
  if ((tensors.size() != 3 && !weighted) || call.arguments.size() < 4 ||
      (call.arguments[3].word & 0xff))
    return;
  const aclTensor &rows = *tensors[0], &positions = *tensors[1], &out = *tensors.back();
  if (!usable(rows) || !usable(positions) || !usable(out) || rows.shape.size() != 2 ||
      out.shape.size() != 2 || out.shape[0] == 0)
    return;
  std::vector<int64_t> places = read_values<int64_t>(positions);
  size_t width = static_cast<size_t>(out.shape[1]), tokens = static_cast<size_t>(out.shape[0]),
         choices = places.size() / tokens;
  if (rows.shape[1] != out.shape[1] || choices * tokens != places.size()) return;
  std::vector<float> values, weights(places.size(), 1), sums(tokens * width, 0);
  read_floats(rows, &values);
  if (weighted) {
    if (!usable(*tensors[2]) || element_count(*tensors[2]) != static_cast<int64_t>(places.size()))
      return;
    read_floats(*tensors[2], &weights);
  }
  for (size_t which = 0; which < places.size(); ++which) {
    int64_t place = places[which];
    if (place < 0 || place >= rows.shape[0]) continue;
    for (size_t axis = 0; axis < width; ++axis)
      sums[which / choices * width + axis] +=
          weights[which] * values[static_cast<size_t>(place) * width + axis];
  }
  write_floats(out, sums);
}

constexpr KernelRow kRows[] = {
    {"MoeInitRoutingCustom", sort_by_expert},   {"MoeInitRoutingV3", sort_by_expert},
    {"GroupedMatmulV4", multiply_groups},       {"GroupedMatmulV5", multiply_groups},
    {"MoeTokenUnpermute", gather_from_experts},
};

}  // namespace

KernelRows expert_kernels() { return KernelRows(kRows); }

}  // namespace memprof_sim
