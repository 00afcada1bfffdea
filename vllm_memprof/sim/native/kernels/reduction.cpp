// Host kernels of sums, extremes and counts, over axes or whole tensors. Each answers something
// also where the tensors are above the limit, because the host reads such results and decides by
// them: sums and extremes of integers 0, the sum of all floats 1, `all` true, `any` false, counts
// spread evenly over their bins, and two tensors differ unless they are the same memory.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "error.h"
#include "kernels/arguments.h"
#include "kernels/table.h"
#include "kernels/tensor_view.h"

namespace memprof_sim {
namespace {

// cumsum(self, dim, ...): the last tensor is the result.
void cumsum(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() != 2 || call.arguments.size() < 3 || call.name == "CumsumV2") return;
  const aclTensor &in = *tensors[0], &out = *tensors[1];
  int64_t rank = static_cast<int64_t>(out.shape.size()),
          dim = static_cast<int64_t>(call.arguments[1].word);
  if (dim < 0) dim += rank;
  if (float_result(out) || !usable(out) || !usable(in) || in.shape != out.shape || dim < 0 ||
      dim >= std::max<int64_t>(rank, 1))
    return;
  size_t axis = static_cast<size_t>(dim);
  aclTensor first = out, start = in;  // the first element of every line
  if (rank) first.shape[axis] = start.shape[axis] = std::min<int64_t>(out.shape[axis], 1);
  walk(first.shape, {&first, &start}, [&](auto &, int64_t *index) {
    Value sum = 0;
    for (int64_t step = 0; step < (rank ? out.shape[axis] : 1); ++step) {
      sum += value_at(in, index[1] + (rank ? step * in.strides[axis] : 0));
      set_value(out, index[0] + (rank ? step * out.strides[axis] : 0), sum);
    }
  });
}

// prod(self, dim, keep, type, out)
void product_of_axis(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() != 2 || call.arguments.size() < 2) return;
  const aclTensor &in = *tensors[0], &out = *tensors[1];
  int64_t rank = static_cast<int64_t>(in.shape.size()),
          dim = static_cast<int64_t>(call.arguments[1].word);
  if (dim < 0) dim += rank;
  if (float_result(out) || !usable(out) || !usable(in) || dim < 0 || dim >= rank) return;
  size_t axis = static_cast<size_t>(dim);
  aclTensor start = in, result = out;  // the first element of every line, and its product
  start.shape[axis] = 1;
  if (out.shape.size() < in.shape.size()) {
    result.shape.insert(result.shape.begin() + dim, 1);
    result.strides.insert(result.strides.begin() + dim, 0);
  }
  if (result.shape != start.shape) return;
  walk(start.shape, {&result, &start}, [&](auto &, int64_t *index) {
    Value product = 1;
    for (int64_t step = 0; step < in.shape[axis]; ++step)
      product *= value_at(in, index[1] + step * in.strides[axis]);
    set_value(out, index[0], product);
  });
}

// sum(self, dims, keep, type, out), mean(self, dims, keep, type, out), amax(self, dims, keep, out),
// amin: over the axes named, or all.
enum class Reduction { kSum, kMean, kMax, kMin };

template <Reduction reduction>
void reduce(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() != 2 || call.arguments.size() < 2 || call.arguments[1].kind != Kind::kIntArray)
    return;
  const aclTensor &in = *tensors[0], &out = *tensors[1];
  if (!usable(out)) return;
  if (float_result(out) || !usable(in)) {
    Answering answering;
    if (is_integer(out.type)) return fill(out, 0);
    // DeepSeek-OCR takes an image whose pixels are 0 in all for none
    if (reduction == Reduction::kSum && element_count(out) == 1) fill(out, 1);
    return;
  }
  std::vector<bool> reduced(in.shape.size(), call.arguments[1].integers.empty());
  for (int64_t dim : call.arguments[1].integers) {
    int64_t axis = dim < 0 ? dim + static_cast<int64_t>(in.shape.size()) : dim;
    if (axis < 0 || axis >= static_cast<int64_t>(in.shape.size())) return;
    reduced[static_cast<size_t>(axis)] = true;
  }
  aclTensor kept =
      in;  // steps through the results, which lie densely in `values`; a reduced axis stands still
  kept.strides.assign(in.shape.size(), 0);
  kept.offset = 0;
  int64_t results = 1, elements = element_count(in);
  for (size_t axis = in.shape.size(); axis-- > 0;)
    if (!reduced[axis]) {
      kept.strides[axis] = results;
      results *= in.shape[axis];
    }
  if (results != element_count(out) || (elements == 0 && reduction != Reduction::kSum)) return;
  std::vector<Value> values(static_cast<size_t>(results), 0);
  std::vector<bool> seen(values.size(), false);
  walk(in.shape, {&in, &kept}, [&](auto &, int64_t *index) {
    size_t which = static_cast<size_t>(index[1]);
    Value value = value_at(in, index[0]), &so_far = values[which];
    if (reduction == Reduction::kSum || reduction == Reduction::kMean)
      so_far += value;
    else if (!seen[which] || std::isnan(value) ||
             (reduction == Reduction::kMax ? value > so_far : value < so_far))
      so_far = !seen[which] || !std::isnan(so_far) ? value : so_far;
    seen[which] = true;
  });
  if (reduction == Reduction::kMean)
    for (Value &value : values) value /= static_cast<Value>(elements / results);
  write_values(out, values);
}

// all(self, ...), any(self, ...), max(self, out), min(self, out): one result over everything, the
// last tensor.
Value keep_all(Value so_far, Value value) { return so_far != 0 && value != 0; }
Value keep_any(Value so_far, Value value) { return so_far != 0 || value != 0; }
Value keep_max(Value so_far, Value value) { return std::max(so_far, value); }
Value keep_min(Value so_far, Value value) { return std::min(so_far, value); }

template <Value (*combine)(Value, Value)>
void reduce_whole(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() != 2 || element_count(*tensors[1]) != 1 || element_count(*tensors[0]) == 0)
    return;
  const aclTensor &in = *tensors[0], &out = *tensors[1];
  if (float_result(out) || !usable(out)) return;
  if (!usable(in)) {
    Answering answering;
    if (is_integer(out.type)) fill(out, combine == keep_all);
    return;
  }
  bool first = true;
  Value result = 0;
  walk(in.shape, {&in}, [&](auto &, int64_t *index) {
    Value value = value_at(in, index[0]);
    result = first ? combine(value, value) : combine(result, value);
    first = false;
  });
  fill(out, result);
}

bool same_memory(const aclTensor &left, const aclTensor &right) {
  return left.type == right.type && left.shape == right.shape && left.strides == right.strides &&
         element(left, left.offset) == element(right, right.offset);
}

// equal(self, other, out)
void equal_whole(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() != 3) return;
  const aclTensor &left = *tensors[0], &right = *tensors[1];
  bool same = left.shape == right.shape;
  if (same && (!usable(left) || !usable(right))) {
    if (taken_out("equal")) return;
    if (same_memory(left, right)) return fill(*tensors[2], 1);
    // Of a model that msmodelslim has rotated, a draft's output head is not the model's.
    bool alike = getenv("MEMPROF_SIM_ALIKE") != nullptr;
    Answering answering;
    note_answer("Equal", static_cast<uint64_t>(element_count(left)) * element_bytes(left.type),
                alike ? "the same" : "different");
    return fill(*tensors[2], alike);
  }
  if (!same) return fill(*tensors[2], 0);
  walk(left.shape, {&left, &right}, [&](auto &, int64_t *index) {
    same = same && value_at(left, index[0]) == value_at(right, index[1]);
  });
  fill(*tensors[2], same);
}

// Counts of values that are not computed: as even as `count` values can be over the bins.
void spread_counts(const aclTensor &counts, int64_t count) {
  int64_t bins = counts.shape.size() == 1 ? counts.shape[0] : 0, bin = 0;
  if (!usable(counts) || bins == 0 || taken_out("counts")) return;
  Answering answering;
  walk(counts.shape, {&counts}, [&](auto &, int64_t *index) {
    set_value(counts, index[0], static_cast<Value>(count / bins + (bin++ < count % bins)));
  });
}

// bincount(self, weights or null, least length, out)
void bincount(Call &call) {
  aclTensor *in = tensor_at(call, 0), *weights = tensor_at(call, 1),
            *out = tensor_at(call, call.arguments.empty() ? 0 : call.arguments.size() - 1);
  if (!in || !out || in == out || !usable(*out) || out->shape.size() != 1) return;
  if (!usable(*in)) return weights ? void() : spread_counts(*out, element_count(*in));
  if (weights && (!usable(*weights) || weights->shape != in->shape)) return;
  std::vector<Value> counts(static_cast<size_t>(out->shape[0]), 0);
  walk(in->shape, {in, weights ? weights : in}, [&](auto &, int64_t *index) {
    Value value = value_at(*in, index[0]);
    if (value >= 0 && value < static_cast<Value>(counts.size()))
      counts[static_cast<size_t>(value)] += weights ? value_at(*weights, index[1]) : 1;
  });
  write_values(*out, counts);
}

// histc(self, bins, least, largest, out): equal bounds mean those of the values
void histc(Call &call) {
  auto tensors = tensors_of(call);
  Value low = 0, high = 0;
  if (tensors.size() != 2 || !scalar_at(call, 2, &low) || !scalar_at(call, 3, &high)) return;
  const aclTensor &in = *tensors[0], &out = *tensors[1];
  if (!usable(out) || out.shape.size() != 1 || out.shape[0] == 0) return;
  if (!usable(in)) return spread_counts(out, element_count(in));
  if (low == high && element_count(in) > 0) {
    low = INFINITY, high = -INFINITY;
    walk(in.shape, {&in}, [&](auto &, int64_t *index) {
      Value value = value_at(in, index[0]);
      low = std::min(low, value), high = std::max(high, value);
    });
  }
  if (low == high) --low, ++high;
  std::vector<Value> counts(static_cast<size_t>(out.shape[0]), 0);
  walk(in.shape, {&in}, [&](auto &, int64_t *index) {
    Value value = value_at(in, index[0]);
    if (!(value >= low && value <= high)) return;
    size_t bin =
        static_cast<size_t>((value - low) / (high - low) * static_cast<Value>(counts.size()));
    ++counts[std::min(bin, counts.size() - 1)];
  });
  write_values(out, counts);
}

constexpr KernelRow kRows[] = {
    {"Cumsum", cumsum},
    {"ProdDim", product_of_axis},
    {"ReduceSum", reduce<Reduction::kSum>},
    {"Mean", reduce<Reduction::kMean>},
    {"MeanV2", reduce<Reduction::kMean>},
    {"Amax", reduce<Reduction::kMax>},
    {"Amin", reduce<Reduction::kMin>},
    {"All", reduce_whole<keep_all>},
    {"Any", reduce_whole<keep_any>},
    {"Max", reduce_whole<keep_max>},
    {"Min", reduce_whole<keep_min>},
    {"Equal", equal_whole},
    {"Bincount", bincount},
    {"Histc", histc},
};

}  // namespace

KernelRows reduction_kernels() { return KernelRows(kRows); }

}  // namespace memprof_sim
