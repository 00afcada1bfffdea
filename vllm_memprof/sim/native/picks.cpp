// Host kernels that order values: argmax, top-k, sorting, the routing of experts, counting. On tensors above
// host_compute_bytes the positions they answer are 0: one that always exists, for a token id or an expert.
#include "elements.h"
#include "float_rows.h"

#include <numeric>

namespace memprof_sim {
namespace {

void zero_indices(Call &call) {
  auto tensors = tensors_of(call);
  for (size_t index = tensors.size() < 2 ? 0 : 1; index < tensors.size(); ++index)
    if (tensors[index]->type == ACL_INT32 || tensors[index]->type == ACL_INT64) fill(*tensors[index], 0);
}

// NaN is larger than any number when values are ordered; a search for the least or largest finds it first either way. As in torch.
bool before(Value left, Value right, bool descending, bool nan_first) {
  if (std::isnan(left) || std::isnan(right)) return nan_first ? std::isnan(left) && !std::isnan(right) : !std::isnan(left) && std::isnan(right);
  return descending ? left > right : left < right;
}

// The first `count` positions of a line in order; equal values in the order of their positions.
std::vector<int64_t> order(const std::vector<Value> &line, size_t count, bool descending, bool nan_first) {
  std::vector<int64_t> positions(line.size());
  std::iota(positions.begin(), positions.end(), 0);
  auto first = [&](int64_t left, int64_t right) {
    Value a = line[static_cast<size_t>(left)], b = line[static_cast<size_t>(right)];
    return before(a, b, descending, nan_first) || (!before(b, a, descending, nan_first) && left < right);
  };
  count = std::min(count, positions.size());
  std::partial_sort(positions.begin(), positions.begin() + static_cast<int64_t>(count), positions.end(), first);
  positions.resize(count);
  return positions;
}

// Along `axis` of `in`, the first `count` values in order to `values` and their positions to `indices`, either of which may be
// null. A result has the axis with `count` elements; one that lacks the axis (count 1) has one axis less.
bool pick(const aclTensor &in, size_t axis, size_t count, bool descending, bool nan_first, const aclTensor *values, const aclTensor *indices) {
  aclTensor starts = in;
  if (!usable(in) || in.shape.empty() || in.shape[axis] < static_cast<int64_t>(count)) return false;
  starts.shape[axis] = 1;
  std::vector<int64_t> shape = in.shape;
  shape[axis] = static_cast<int64_t>(count);
  aclTensor views[2];
  const aclTensor *results[2] = {values, indices};
  for (int which = 0; which < 2; ++which) {
    if (!results[which]) continue;
    views[which] = *results[which];
    if (views[which].shape.size() + 1 == shape.size() && count == 1) {
      views[which].shape.insert(views[which].shape.begin() + static_cast<int64_t>(axis), 1);
      views[which].strides.insert(views[which].strides.begin() + static_cast<int64_t>(axis), 0);
    }
    if (!usable(views[which]) || views[which].shape != shape) return false;
  }
  std::vector<Value> line(static_cast<size_t>(in.shape[axis]));
  walk(starts.shape, {&starts}, [&](auto &position, int64_t *index) {
    for (size_t at = 0; at < line.size(); ++at) line[at] = load(element(in, index[0] + static_cast<int64_t>(at) * in.strides[axis]), in.type);
    std::vector<int64_t> chosen = order(line, count, descending, nan_first);
    for (int which = 0; which < 2; ++which) {
      if (!results[which]) continue;
      int64_t start = views[which].offset;
      for (size_t step = 0; step < position.size(); ++step) start += position[step] * views[which].strides[step];
      for (size_t at = 0; at < chosen.size(); ++at)
        store(element(views[which], start + static_cast<int64_t>(at) * views[which].strides[axis]), views[which].type,
              which ? static_cast<Value>(chosen[at]) : line[static_cast<size_t>(chosen[at])]);
    }
  });
  return true;
}

bool flag_at(const Call &call, size_t index) { return index < call.arguments.size() && (call.arguments[index].word & 0xff) != 0; }

// argmax(self, dim, keep, out), max_dim(self, dim, keep, values, indices) and their kin
template <bool largest>
void extreme(Call &call) {
  auto tensors = tensors_of(call);
  size_t axis = 0;
  bool done = false;
  if (tensors.size() >= 2 && axis_of(call, 1, *tensors[0], &axis))
    done = pick(*tensors[0], axis, 1, largest, true, tensors.size() > 2 ? tensors[1] : nullptr, tensors.back());
  if (!done) zero_indices(call);
}

// topk(self, k, dim, largest, sorted, values, indices)
void topk(Call &call) {
  auto tensors = tensors_of(call);
  size_t axis = 0;
  if (tensors.size() != 3 || !axis_of(call, 2, *tensors[0], &axis) ||
      !pick(*tensors[0], axis, static_cast<size_t>(call.arguments[1].word), flag_at(call, 3), flag_at(call, 3), tensors[1], tensors[2]))
    zero_indices(call);
}

// sort(self, stable, dim, descending, values, indices)
void sort(Call &call) {
  auto tensors = tensors_of(call);
  size_t axis = 0;
  if (tensors.size() != 3 || !axis_of(call, 2, *tensors[0], &axis) ||
      !pick(*tensors[0], axis, static_cast<size_t>(tensors[0]->shape[axis]), flag_at(call, 3), flag_at(call, 3), tensors[1], tensors[2]))
    zero_indices(call);
}

// argsort(self, dim, descending, out)
void argsort(Call &call) {
  auto tensors = tensors_of(call);
  size_t axis = 0;
  if (tensors.size() != 2 || !axis_of(call, 1, *tensors[0], &axis) ||
      !pick(*tensors[0], axis, static_cast<size_t>(tensors[0]->shape[axis]), flag_at(call, 2), flag_at(call, 2), nullptr, tensors[1]))
    zero_indices(call);
}

// ---- routing of experts ----

// Softmax of every row of `scores`, its k largest and their experts; with `renormalize` they sum to one.
bool route(const aclTensor &scores, size_t k, bool renormalize, const aclTensor &weights, const aclTensor &experts) {
  if (!usable(scores) || !usable(weights) || !usable(experts) || scores.shape.size() != 2 || weights.shape != experts.shape) return false;
  size_t rows = static_cast<size_t>(scores.shape[0]), count = static_cast<size_t>(scores.shape[1]);
  if (k == 0 || k > count || weights.shape != std::vector<int64_t>{scores.shape[0], static_cast<int64_t>(k)}) return false;
  std::vector<float> values, kept;
  std::vector<int64_t> chosen;
  read_floats(scores, &values);
  for (size_t row = 0; row < rows; ++row) {
    std::vector<Value> line(values.begin() + static_cast<int64_t>(row * count), values.begin() + static_cast<int64_t>((row + 1) * count));
    Value largest = *std::max_element(line.begin(), line.end()), sum = 0, picked = 0;
    for (Value &each : line) sum += each = std::exp(static_cast<double>(each - largest));
    for (Value &each : line) each /= sum;
    std::vector<int64_t> first = order(line, k, true, true);
    for (int64_t expert : first) picked += line[static_cast<size_t>(expert)];
    for (int64_t expert : first) {
      kept.push_back(static_cast<float>(line[static_cast<size_t>(expert)] / (renormalize ? picked : 1)));
      chosen.push_back(expert);
    }
  }
  write_floats(weights, kept);
  size_t next = 0;
  walk(experts.shape, {&experts}, [&](auto &, int64_t *index) { store(element(experts, index[0]), experts.type, static_cast<Value>(chosen[next++])); });
  return true;
}

// moe_gating_top_k_softmax(x, finished or null, k, y, experts, rows): rows[i][j] = j x number of rows + i
void gating_softmax(Call &call) {
  auto tensors = tensors_of(call);
  bool plain = tensors.size() == 4 && call.arguments.size() > 2 && call.arguments[1].kind == Kind::kNone;
  if (!plain || !route(*tensors[0], static_cast<size_t>(call.arguments[2].word), false, *tensors[1], *tensors[2])) return zero_indices(call);
  const aclTensor &rows = *tensors[3];
  if (!usable(rows) || rows.shape != tensors[1]->shape) return;
  walk(rows.shape, {&rows}, [&](auto &position, int64_t *index) {
    store(element(rows, index[0]), rows.type, static_cast<Value>(position[1] * rows.shape[0] + position[0]));
  });
}

// moe_gating_top_k(x, bias or null, k, groups kept, groups, mode, renormalize, norm, flag, scale, epsilon, y, experts, ...): computed for
// softmax (norm 0) without bias and with one group.
void gating(Call &call) {
  auto tensors = tensors_of(call);
  bool plain = tensors.size() >= 3 && call.arguments.size() > 8 && call.arguments[1].kind == Kind::kNone && call.arguments[3].word <= 1 &&
               call.arguments[4].word <= 1 && static_cast<int32_t>(call.arguments[7].word) == 0 && call.real(0) == 1;
  if (!plain || !route(*tensors[0], static_cast<size_t>(call.arguments[2].word), call.arguments[6].word == 1, *tensors[1], *tensors[2])) zero_indices(call);
}

// ---- counting ----

// bincount(self, weights or null, least length, out)
void bincount(Call &call) {
  aclTensor *in = tensor_at(call, 0), *weights = tensor_at(call, 1), *out = tensor_at(call, call.arguments.empty() ? 0 : call.arguments.size() - 1);
  if (!in || !out || in == out || !usable(*in) || !usable(*out) || out->shape.size() != 1) return;
  if (weights && (!usable(*weights) || weights->shape != in->shape)) return;
  std::vector<Value> counts(static_cast<size_t>(out->shape[0]), 0);
  walk(in->shape, {in, weights ? weights : in}, [&](auto &, int64_t *index) {
    Value value = load(element(*in, index[0]), in->type);
    if (value >= 0 && value < static_cast<Value>(counts.size()))
      counts[static_cast<size_t>(value)] += weights ? load(element(*weights, index[1]), weights->type) : 1;
  });
  size_t next = 0;
  walk(out->shape, {out}, [&](auto &, int64_t *index) { store(element(*out, index[0]), out->type, counts[next++]); });
}

// histc(self, bins, least, largest, out): equal bounds mean those of the values
void histc(Call &call) {
  auto tensors = tensors_of(call);
  Value low = 0, high = 0;
  if (tensors.size() != 2 || !scalar_at(call, 2, &low) || !scalar_at(call, 3, &high)) return;
  const aclTensor &in = *tensors[0], &out = *tensors[1];
  if (!usable(in) || !usable(out) || out.shape.size() != 1 || out.shape[0] == 0) return;
  if (low == high && element_count(in) > 0) {
    low = INFINITY, high = -INFINITY;
    walk(in.shape, {&in}, [&](auto &, int64_t *index) {
      Value value = load(element(in, index[0]), in.type);
      low = std::min(low, value), high = std::max(high, value);
    });
  }
  if (low == high) --low, ++high;
  std::vector<Value> counts(static_cast<size_t>(out.shape[0]), 0);
  walk(in.shape, {&in}, [&](auto &, int64_t *index) {
    Value value = load(element(in, index[0]), in.type);
    if (!(value >= low && value <= high)) return;
    size_t bin = static_cast<size_t>((value - low) / (high - low) * static_cast<Value>(counts.size()));
    ++counts[std::min(bin, counts.size() - 1)];
  });
  size_t next = 0;
  walk(out.shape, {&out}, [&](auto &, int64_t *index) { store(element(out, index[0]), out.type, counts[next++]); });
}

// one_hot(self, classes, on, off, axis, out): the new axis is the last
void one_hot(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() != 4 || call.arguments.size() < 6) return;
  const aclTensor &in = *tensors[0], &on = *tensors[1], &off = *tensors[2], &out = *tensors[3];
  int64_t axis = static_cast<int32_t>(call.arguments[4].word), rank = static_cast<int64_t>(in.shape.size());
  for (const aclTensor *tensor : {&in, &on, &off, &out})
    if (!usable(*tensor) || ((tensor == &on || tensor == &off) && element_count(*tensor) != 1)) return;
  if ((axis != -1 && axis != rank) || out.shape.size() != in.shape.size() + 1) return;
  for (size_t step = 0; step < in.shape.size(); ++step)
    if (in.shape[step] != out.shape[step]) return;
  Value yes = load(element(on, on.offset), on.type), no = load(element(off, off.offset), off.type);
  walk(out.shape, {&out}, [&](auto &position, int64_t *index) {
    int64_t at = in.offset;
    for (size_t step = 0; step < in.shape.size(); ++step) at += position[step] * in.strides[step];
    bool hit = load(element(in, at), in.type) == static_cast<Value>(position.back());
    store(element(out, index[0]), out.type, hit ? yes : no);
  });
}

}  // namespace

const std::vector<KernelRow> &pick_kernel_rows() {
  static const auto *rows = new std::vector<KernelRow>{
      {"ArgMax", extreme<true>},
      {"ArgMin", extreme<false>},
      {"MaxDim", extreme<true>},
      {"MinDim", extreme<false>},
      {"Topk", topk},
      {"Sort", sort},
      {"Argsort", argsort},
      {"MoeGatingTopK", gating},
      {"MoeGatingTopKSoftmax", gating_softmax},
      {"Bincount", bincount},
      {"Histc", histc},
      {"OneHot", one_hot},
      {"Multinomial", zero_indices},
      {"MultinomialTensor", zero_indices},
      {"Kthvalue", zero_indices},
      {"TopKTopPSample", zero_indices},
      {"TopKTopPSampleV2", zero_indices},
  };
  return *rows;
}

}  // namespace memprof_sim
