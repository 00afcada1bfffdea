// Host kernels: the operators whose results steer the engine compute for real, on tensors up to host_compute_bytes: copies,
// arithmetic element by element, comparisons, sums, picking and placing by index. Products of matrices, norms and attention are
// in floats.cpp and attention.cpp, what orders values in picks.cpp. Everything else computes nothing.
#include "elements.h"

#include <unordered_map>

namespace memprof_sim {
namespace {

// ---- operators ----

void index_get(Call &call);

void copy_in_place(Call &call) {
  aclTensor *target = tensor_at(call, 0), *source = tensor_at(call, 1);
  if (target && source) copy(*target, *source);
}

// cast(self, type, out) and other copies whose result comes last.
void copy_to_last(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() == 2) copy(*tensors[1], *tensors[0]);
}

void fill_scalar(Call &call) {
  Value value = 0;
  aclTensor *target = tensor_at(call, 0);
  if (target && scalar_at(call, 1, &value)) fill(*target, value);
}

void fill_zero(Call &call) {
  if (aclTensor *target = tensor_at(call, 0)) fill(*target, 0);
}

void fill_one(Call &call) {
  if (aclTensor *target = tensor_at(call, 0)) fill(*target, 1);
}

void masked_fill(Call &call) {
  Value value = 0;
  aclTensor *target = tensor_at(call, 0), *mask = tensor_at(call, 1);
  if (!target || !mask || !scalar_at(call, 2, &value) || !usable(*target) || !addressable(*mask)) return;
  if (!broadcasts_to(*mask, target->shape)) return;
  walk(target->shape, {target, mask}, [&](auto &, int64_t *index) {
    if (load(element(*mask, index[1]), mask->type) != 0) store(element(*target, index[0]), target->type, value);
  });
}

// arange(start, end, step, out)
void arange(Call &call) {
  Value start = 0, step = 1;
  aclTensor *out = tensor_at(call, 3);
  if (!out || !scalar_at(call, 0, &start) || !scalar_at(call, 2, &step) || !usable(*out)) return;
  int64_t done = 0;
  walk(out->shape, {out}, [&](auto &, int64_t *index) { store(element(*out, index[0]), out->type, start + step * static_cast<Value>(done++)); });
}

// cumsum(self, dim, ...): the last tensor is the result.
void cumsum(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() != 2 || call.arguments.size() < 3 || call.name == "CumsumV2") return;
  const aclTensor &in = *tensors[0], &out = *tensors[1];
  int64_t rank = static_cast<int64_t>(out.shape.size()), dim = static_cast<int64_t>(call.arguments[1].word);
  if (dim < 0) dim += rank;
  if (float_result(out) || !usable(out) || !usable(in) || in.shape != out.shape || dim < 0 || dim >= std::max<int64_t>(rank, 1)) return;
  size_t axis = static_cast<size_t>(dim);
  aclTensor first = out, start = in;  // the first element of every line
  if (rank) first.shape[axis] = start.shape[axis] = std::min<int64_t>(out.shape[axis], 1);
  walk(first.shape, {&first, &start}, [&](auto &, int64_t *index) {
    Value sum = 0;
    for (int64_t step = 0; step < (rank ? out.shape[axis] : 1); ++step) {
      sum += load(element(in, index[1] + (rank ? step * in.strides[axis] : 0)), in.type);
      store(element(out, index[0] + (rank ? step * out.strides[axis] : 0)), out.type, sum);
    }
  });
}

using Binary = Value (*)(Value, Value, Value);  // left, right, alpha

Value add(Value a, Value b, Value alpha) { return a + alpha * b; }
Value subtract(Value a, Value b, Value alpha) { return a - alpha * b; }
Value reverse_subtract(Value a, Value b, Value alpha) { return b - alpha * a; }
Value multiply(Value a, Value b, Value) { return a * b; }
Value divide(Value a, Value b, Value) { return a / b; }
Value power(Value a, Value b, Value) { return std::pow(a, b); }
Value floor_divide(Value a, Value b, Value) { return b == 0 ? 0 : std::floor(a / b); }
Value remainder(Value a, Value b, Value) { return b == 0 ? 0 : a - b * std::floor(a / b); }
Value equal(Value a, Value b, Value) { return a == b; }
Value not_equal(Value a, Value b, Value) { return a != b; }
Value greater(Value a, Value b, Value) { return a > b; }
Value greater_equal(Value a, Value b, Value) { return a >= b; }
Value less(Value a, Value b, Value) { return a < b; }
Value less_equal(Value a, Value b, Value) { return a <= b; }
Value minimum(Value a, Value b, Value) { return std::min(a, b); }
Value maximum(Value a, Value b, Value) { return std::max(a, b); }
Value logical_and(Value a, Value b, Value) { return a != 0 && b != 0; }
Value logical_or(Value a, Value b, Value) { return a != 0 || b != 0; }
Value bit_and(Value a, Value b, Value) { return static_cast<Value>(static_cast<int64_t>(a) & static_cast<int64_t>(b)); }
Value bit_or(Value a, Value b, Value) { return static_cast<Value>(static_cast<int64_t>(a) | static_cast<int64_t>(b)); }

// op(self, other, [alpha], out), other a tensor or a scalar; in place when the name says so.
template <Binary operation>
void binary(Call &call) {
  bool in_place = call.name.rfind("Inplace", 0) == 0;
  auto tensors = tensors_of(call);
  if (call.arguments.size() < 2 || tensors.size() < (in_place ? 1u : 2u)) return;
  const aclTensor &left = *tensors[0], &out = in_place ? *tensors[0] : *tensors.back();
  aclTensor *right = tensor_at(call, 1);
  Value other = 0, alpha = 1;
  if (!right && !scalar_at(call, 1, &other)) return;
  scalar_at(call, 2, &alpha);
  if (float_result(out) || !usable(out) || !usable(left) || !broadcasts_to(left, out.shape)) return;
  if (right && (!usable(*right) || !broadcasts_to(*right, out.shape))) return;
  walk(out.shape, {&out, &left, right ? right : &left}, [&](auto &, int64_t *index) {
    Value second = right ? load(element(*right, index[2]), right->type) : other;
    store(element(out, index[0]), out.type, operation(load(element(left, index[1]), left.type), second, alpha));
  });
}

// pow(base, self, out) with a base that is one number
void power_of_scalar(Call &call) {
  auto tensors = tensors_of(call);
  Value base = 0;
  if (tensors.size() != 2 || !scalar_at(call, 0, &base)) return;
  const aclTensor &in = *tensors[0], &out = *tensors[1];
  if (float_result(out) || !usable(in) || !usable(out) || in.shape != out.shape) return;
  walk(out.shape, {&out, &in}, [&](auto &, int64_t *index) {
    store(element(out, index[0]), out.type, power(base, load(element(in, index[1]), in.type), 0));
  });
}

// triu, tril(self, diagonal, out), in place without out
template <bool upper>
void triangle(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.empty() || tensors.size() > 2 || call.arguments.size() < 2) return;
  const aclTensor &in = *tensors[0], &out = *tensors.back();
  int64_t diagonal = static_cast<int64_t>(call.arguments[1].word);
  if (!usable(in) || !usable(out) || in.shape != out.shape || in.shape.size() < 2) return;
  walk(out.shape, {&out, &in}, [&](auto &position, int64_t *index) {
    int64_t above = position.back() - position[position.size() - 2] - diagonal;
    bool kept = upper ? above >= 0 : above <= 0;
    store(element(out, index[0]), out.type, kept ? load(element(in, index[1]), in.type) : 0);
  });
}

using Unary = Value (*)(Value, aclDataType);
Value negate(Value value, aclDataType) { return -value; }
Value absolute(Value value, aclDataType) { return std::fabs(value); }
Value logical_not(Value value, aclDataType) { return value == 0; }
Value bit_not(Value value, aclDataType type) { return type == ACL_BOOL ? Value(value == 0) : static_cast<Value>(~static_cast<int64_t>(value)); }

template <Unary operation>
void unary(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.empty() || tensors.size() > 2) return;
  const aclTensor &in = *tensors[0], &out = *tensors.back();
  if (float_result(out) || !usable(out) || !usable(in) || in.shape != out.shape) return;
  walk(out.shape, {&out, &in}, [&](auto &, int64_t *index) {
    store(element(out, index[0]), out.type, operation(load(element(in, index[1]), in.type), out.type));
  });
}

// where(condition, self, other, out)
void where(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() != 4 || !usable(*tensors[3])) return;
  for (int index = 0; index < 3; ++index)
    if (!usable(*tensors[index]) || !broadcasts_to(*tensors[index], tensors[3]->shape)) return;
  const aclTensor &condition = *tensors[0], &yes = *tensors[1], &no = *tensors[2], &out = *tensors[3];
  walk(out.shape, {&out, &condition, &yes, &no}, [&](auto &, int64_t *index) {
    bool chosen = load(element(condition, index[1]), condition.type) != 0;
    store(element(out, index[0]), out.type, chosen ? load(element(yes, index[2]), yes.type) : load(element(no, index[3]), no.type));
  });
}

// clamp(self, min, max, out); a null bound is absent.
void clamp(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() != 2 || !usable(*tensors[0]) || !usable(*tensors[1])) return;
  Value low = 0, high = 0;
  bool has_low = scalar_at(call, 1, &low), has_high = scalar_at(call, 2, &high);
  const aclTensor &in = *tensors[0], &out = *tensors[1];
  if (in.shape != out.shape) return;
  walk(out.shape, {&out, &in}, [&](auto &, int64_t *index) {
    Value value = load(element(in, index[1]), in.type);
    if (has_low) value = std::max(value, low);
    if (has_high) value = std::min(value, high);
    store(element(out, index[0]), out.type, value);
  });
}

// sum(self, dims, keep, type, out), mean(self, dims, keep, type, out), amax(self, dims, keep, out), amin: over the axes named, or all.
enum class Reduction { kSum, kMean, kMax, kMin };

template <Reduction reduction>
void reduce(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() != 2 || call.arguments.size() < 2 || call.arguments[1].kind != Kind::kIntArray) return;
  const aclTensor &in = *tensors[0], &out = *tensors[1];
  if (float_result(out) || !usable(out) || !usable(in)) return;
  std::vector<bool> reduced(in.shape.size(), call.arguments[1].integers.empty());
  for (int64_t dim : call.arguments[1].integers) {
    int64_t axis = dim < 0 ? dim + static_cast<int64_t>(in.shape.size()) : dim;
    if (axis < 0 || axis >= static_cast<int64_t>(in.shape.size())) return;
    reduced[static_cast<size_t>(axis)] = true;
  }
  aclTensor kept = in;  // steps through the results, which lie densely in `values`; a reduced axis stands still
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
    Value value = load(element(in, index[0]), in.type), &so_far = values[which];
    if (reduction == Reduction::kSum || reduction == Reduction::kMean)
      so_far += value;
    else if (!seen[which] || std::isnan(value) || (reduction == Reduction::kMax ? value > so_far : value < so_far))
      so_far = !seen[which] || !std::isnan(so_far) ? value : so_far;
    seen[which] = true;
  });
  size_t next = 0;
  Value share = reduction == Reduction::kMean ? static_cast<Value>(elements / results) : 1;
  walk(out.shape, {&out}, [&](auto &, int64_t *index) { store(element(out, index[0]), out.type, values[next++] / share); });
}

// all(self, ...), any(self, ...), max(self, out), min(self, out): one result over everything, the last tensor.
Value keep_all(Value so_far, Value value) { return so_far != 0 && value != 0; }
Value keep_any(Value so_far, Value value) { return so_far != 0 || value != 0; }
Value keep_max(Value so_far, Value value) { return std::max(so_far, value); }
Value keep_min(Value so_far, Value value) { return std::min(so_far, value); }

template <Value (*combine)(Value, Value)>
void reduce_whole(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() != 2 || element_count(*tensors[1]) != 1 || element_count(*tensors[0]) == 0) return;
  const aclTensor &in = *tensors[0], &out = *tensors[1];
  if (float_result(out) || !usable(in) || !usable(out)) return;
  bool first = true;
  Value result = 0;
  walk(in.shape, {&in}, [&](auto &, int64_t *index) {
    Value value = load(element(in, index[0]), in.type);
    result = first ? combine(value, value) : combine(result, value);
    first = false;
  });
  fill(out, result);
}

// equal(self, other, out)
void equal_whole(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() != 3 || !usable(*tensors[0]) || !usable(*tensors[1]) || tensors[0]->shape != tensors[1]->shape) return;
  const aclTensor &left = *tensors[0], &right = *tensors[1];
  bool same = true;
  walk(left.shape, {&left, &right}, [&](auto &, int64_t *index) {
    same = same && load(element(left, index[0]), left.type) == load(element(right, index[1]), right.type);
  });
  fill(*tensors[2], same);
}

// flip(self, dims, out)
void flip(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() != 2 || call.arguments.size() < 2 || call.arguments[1].kind != Kind::kIntArray || !addressable(*tensors[0])) return;
  aclTensor source = *tensors[0];
  for (int64_t dim : call.arguments[1].integers) {
    size_t axis = static_cast<size_t>(dim < 0 ? dim + static_cast<int64_t>(source.shape.size()) : dim);
    if (axis >= source.shape.size()) return;
    source.offset += (source.shape[axis] - 1) * source.strides[axis];
    source.strides[axis] = -source.strides[axis];
  }
  copy(*tensors[1], source);
}

// embedding(weight, indices, out)
void embedding(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() != 3 || !usable(*tensors[1]) || !usable(*tensors[2]) || !addressable(*tensors[0])) return;
  Call as_index;
  as_index.name = "Index";
  Argument list;
  list.kind = Kind::kTensorList;
  list.tensors = {*tensors[1]};
  as_index.arguments = {call.arguments[0], list, call.arguments[2]};
  index_get(as_index);
}

// scatter(self, dim, index, src, reduce, out) and inplace scatter(self, dim, index, src, reduce); only plain replacement is computed.
void scatter(Call &call) {
  auto tensors = tensors_of(call);
  bool in_place = call.name.rfind("Inplace", 0) == 0, by_value = call.name.find("Value") != std::string::npos;
  aclTensor *self = tensor_at(call, 0), *which = tensor_at(call, 2), *source = by_value ? nullptr : tensor_at(call, 3);
  Value value = 0;
  if (!self || !which || (!source && !scalar_at(call, 3, &value)) || call.arguments.size() < 5 || call.arguments[4].word != 0) return;
  const aclTensor &out = in_place ? *self : *tensors.back();
  if (!in_place) copy(out, *self);
  if (!usable(out) || !usable(*which) || (source && !addressable(*source)) || which->shape.size() != out.shape.size()) return;
  int64_t dim = static_cast<int64_t>(call.arguments[1].word), rank = static_cast<int64_t>(out.shape.size());
  if (dim < 0) dim += rank;
  if (dim < 0 || dim >= rank || (source && source->shape.size() != which->shape.size())) return;
  for (size_t axis = 0; source && axis < which->shape.size(); ++axis)
    if (source->shape[axis] < which->shape[axis]) return;
  walk(which->shape, {which}, [&](auto &position, int64_t *index) {
    int64_t chosen = static_cast<int64_t>(load(element(*which, index[0]), which->type));
    if (chosen < 0 || chosen >= out.shape[static_cast<size_t>(dim)]) return;
    int64_t at = out.offset, from = source ? source->offset : 0;
    for (size_t axis = 0; axis < position.size(); ++axis) {
      if (static_cast<int64_t>(axis) != dim && position[axis] >= out.shape[axis]) return;
      at += (static_cast<int64_t>(axis) == dim ? chosen : position[axis]) * out.strides[axis];
      if (source) from += position[axis] * source->strides[axis];
    }
    store(element(out, at), out.type, source ? load(element(*source, from), source->type) : value);
  });
}

// repeat_interleave: (self, repeats, dim, size, out) with `repeats` a number, or without the dim.
void repeat_interleave(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() != 2 || !usable(*tensors[0]) || !usable(*tensors[1]) || call.arguments.size() < 3) return;
  const aclTensor &in = *tensors[0], &out = *tensors[1];
  if (in.shape.size() != 1 || out.shape.size() != 1) return;
  int64_t times = static_cast<int64_t>(call.arguments[1].word);
  if (times <= 0 || out.shape[0] != in.shape[0] * times) return;
  walk(out.shape, {&out}, [&](auto &position, int64_t *index) {
    store(element(out, index[0]), out.type, load(element(in, in.offset + position[0] / times * in.strides[0]), in.type));
  });
}

// nonzero(self, out): out has room for every element; its view shape tells how many there are.
void nonzero(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() != 2 || !usable(*tensors[0]) || !addressable(*tensors[1])) return;
  const aclTensor &in = *tensors[0], &out = *tensors[1];
  bool transposed = call.name == "NonzeroV2";  // one row per axis instead of one per element
  std::vector<std::vector<int64_t>> found;
  walk(in.shape, {&in}, [&](auto &position, int64_t *index) {
    if (load(element(in, index[0]), in.type) != 0) found.push_back(position);
  });
  int64_t rank = static_cast<int64_t>(in.shape.size()), count = static_cast<int64_t>(found.size());
  if (count * rank > element_count(out)) return;
  for (int64_t row = 0; row < count; ++row)
    for (int64_t axis = 0; axis < rank; ++axis)
      store(element(out, out.offset + (transposed ? axis * count + row : row * rank + axis)), out.type,
            static_cast<Value>(found[static_cast<size_t>(row)][static_cast<size_t>(axis)]));
  uint64_t original = call.arguments.back().word;
  if (kind_of(original) == Kind::kTensor)
    reinterpret_cast<aclTensor *>(original)->shape = transposed ? std::vector<int64_t>{rank, count} : std::vector<int64_t>{count, rank};
}

// The element index that self[i0, i1, ...] means at `position` of the broadcast index shape; -1 when out of range.
struct Indexing {
  const aclTensor *self = nullptr;
  std::vector<const aclTensor *> indices;  // one per leading axis
  std::vector<int64_t> shape;              // of the indices, broadcast

  bool prepare(const aclTensor &target, const std::vector<aclTensor> &list) {
    self = &target;
    for (const aclTensor &index : list) {
      if (!index.data || (index.type != ACL_INT64 && index.type != ACL_INT32) || !usable(index)) return false;  // masks and gaps are not computed
      indices.push_back(&index);
      if (index.shape.size() > shape.size()) shape.insert(shape.begin(), index.shape.size() - shape.size(), 1);
      size_t missing = shape.size() - index.shape.size();
      for (size_t axis = 0; axis < index.shape.size(); ++axis) shape[missing + axis] = std::max(shape[missing + axis], index.shape[axis]);
    }
    if (indices.empty() || indices.size() > target.shape.size()) return false;
    for (const aclTensor *index : indices)
      if (!broadcasts_to(*index, shape)) return false;
    return true;
  }

  int64_t resolve(const std::vector<int64_t> &position) const {
    int64_t at = self->offset;
    for (size_t axis = 0; axis < indices.size(); ++axis) {
      const aclTensor &index = *indices[axis];
      int64_t offset = index.offset;
      size_t missing = shape.size() - index.shape.size();
      for (size_t dim = 0; dim < index.shape.size(); ++dim)
        if (index.shape[dim] != 1) offset += position[missing + dim] * index.strides[dim];
      int64_t value = static_cast<int64_t>(load(element(index, offset), index.type));
      if (value < 0) value += self->shape[axis];
      if (value < 0 || value >= self->shape[axis]) return -1;
      at += value * self->strides[axis];
    }
    for (size_t axis = indices.size(); axis < self->shape.size(); ++axis)
      at += position[shape.size() + axis - indices.size()] * self->strides[axis];
    return at;
  }

  std::vector<int64_t> result_shape() const {
    std::vector<int64_t> result = shape;
    result.insert(result.end(), self->shape.begin() + static_cast<int64_t>(indices.size()), self->shape.end());
    return result;
  }
};

// index(self, indices, out)
void index_get(Call &call) {
  auto tensors = tensors_of(call);
  const std::vector<aclTensor> *list = list_at(call, 1);
  Indexing indexing;
  if (!list || tensors.size() != 2 || !usable(*tensors[1]) || !addressable(*tensors[0]) || !indexing.prepare(*tensors[0], *list)) return;
  const aclTensor &self = *tensors[0], &out = *tensors[1];
  if (out.shape != indexing.result_shape()) return;
  walk(out.shape, {&out}, [&](auto &position, int64_t *index) {
    int64_t at = indexing.resolve(position);
    if (at >= 0) store(element(out, index[0]), out.type, load(element(self, at), self.type));
  });
}

// index_put(self, indices, values, accumulate, unsafe)
void index_put(Call &call) {
  auto tensors = tensors_of(call);
  const std::vector<aclTensor> *list = list_at(call, 1);
  Indexing indexing;
  if (!list || tensors.size() != 2 || call.arguments.size() < 4 || !is_plain(tensors[0]->type) || !addressable(*tensors[0])) return;
  if (!usable(*tensors[1]) || !indexing.prepare(*tensors[0], *list)) return;
  const aclTensor &self = *tensors[0], &values = *tensors[1];
  std::vector<int64_t> shape = indexing.result_shape();
  bool accumulate = call.arguments[3].word & 1;
  uint64_t count = 1;
  for (int64_t extent : shape) count *= static_cast<uint64_t>(extent);
  if (!broadcasts_to(values, shape) || count * element_bytes(self.type) > profile().host_compute_bytes) return;
  walk(shape, {&values}, [&](auto &position, int64_t *index) {
    int64_t at = indexing.resolve(position);
    if (at < 0) return;
    Value value = load(element(values, index[0]), values.type);
    if (accumulate) value += load(element(self, at), self.type);
    store(element(self, at), self.type, value);
  });
}

// index_select(self, dim, index, out) and gather(self, dim, index, out)
void select(Call &call) {
  aclTensor *self = tensor_at(call, 0), *which = tensor_at(call, 2), *out = tensor_at(call, 3);
  if (!self || !which || !out || !usable(*out) || !usable(*which) || !is_plain(self->type) || !addressable(*self)) return;
  if (self->shape.empty() || self->shape.size() != out->shape.size()) return;
  int64_t dim = static_cast<int32_t>(call.arguments[1].word), rank = static_cast<int64_t>(self->shape.size());
  if (dim < 0) dim += rank;
  bool gather = call.name == "Gather";
  if (dim < 0 || dim >= rank || (gather && which->shape != out->shape) || (!gather && which->shape.size() > 1)) return;
  size_t axis = static_cast<size_t>(dim);
  walk(out->shape, {out}, [&](auto &position, int64_t *index) {
    int64_t offset = which->offset, at = self->offset;
    if (gather)
      for (size_t step = 0; step < position.size(); ++step) offset += position[step] * which->strides[step];
    else if (!which->shape.empty())
      offset += position[axis] * which->strides[0];
    int64_t chosen = static_cast<int64_t>(load(element(*which, offset), which->type));
    if (chosen < 0 || chosen >= self->shape[axis]) return;
    for (size_t step = 0; step < position.size(); ++step) at += (step == axis ? chosen : position[step]) * self->strides[step];
    store(element(*out, index[0]), out->type, load(element(*self, at), self->type));
  });
}

// cat(tensors, dim, out) and stack(tensors, dim, out)
void concatenate(Call &call) {
  const std::vector<aclTensor> *list = list_at(call, 0);
  auto tensors = tensors_of(call);
  if (!list || tensors.size() != 1 || call.arguments.size() < 3 || !usable(*tensors[0])) return;
  const aclTensor &out = *tensors[0];
  int64_t dim = static_cast<int64_t>(call.arguments[1].word), rank = static_cast<int64_t>(out.shape.size());
  if (dim < 0) dim += rank;
  if (dim < 0 || dim >= rank) return;
  size_t axis = static_cast<size_t>(dim);
  int64_t start = 0;
  for (const aclTensor &part : *list) {
    if (element_count(part) == 0) continue;
    aclTensor source = part, slice = out;
    if (call.name == "Stack") {
      source.shape.insert(source.shape.begin() + dim, 1);
      source.strides.insert(source.strides.begin() + dim, 0);
    }
    if (source.shape.size() != out.shape.size()) return;
    slice.shape[axis] = source.shape[axis];
    slice.offset += start * out.strides[axis];
    start += source.shape[axis];
    if (start > out.shape[axis]) return;
    copy(slice, source);
  }
}

// repeat(self, repeats, out)
void repeat(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() != 2 || !usable(*tensors[0]) || !usable(*tensors[1]) || tensors[0]->shape.size() > tensors[1]->shape.size()) return;
  const aclTensor &in = *tensors[0], &out = *tensors[1];
  size_t missing = out.shape.size() - in.shape.size();
  if (element_count(in) == 0) return;
  walk(out.shape, {&out}, [&](auto &position, int64_t *index) {
    int64_t at = in.offset;
    for (size_t axis = 0; axis < in.shape.size(); ++axis) at += position[missing + axis] % in.shape[axis] * in.strides[axis];
    store(element(out, index[0]), out.type, load(element(in, at), in.type));
  });
}

}  // namespace

const std::vector<KernelRow> &kernel_rows() {
  static const auto *rows = new std::vector<KernelRow>{
      {"InplaceCopy", copy_in_place},
      {"Cast", copy_to_last},
      {"InplaceFillScalar", fill_scalar},
      {"InplaceFillTensor", copy_in_place},
      {"InplaceZero", fill_zero},
      {"InplaceOne", fill_one},
      {"InplaceMaskedFillScalar", masked_fill},
      {"Arange", arange},
      {"Range", arange},
      {"Cumsum", cumsum},
      {"Add", binary<add>},
      {"Adds", binary<add>},
      {"InplaceAdd", binary<add>},
      {"InplaceAdds", binary<add>},
      {"Sub", binary<subtract>},
      {"Subs", binary<subtract>},
      {"InplaceSub", binary<subtract>},
      {"InplaceSubs", binary<subtract>},
      {"Rsubs", binary<reverse_subtract>},
      {"Mul", binary<multiply>},
      {"Muls", binary<multiply>},
      {"InplaceMul", binary<multiply>},
      {"InplaceMuls", binary<multiply>},
      {"Div", binary<divide>},
      {"Divs", binary<divide>},
      {"InplaceDiv", binary<divide>},
      {"InplaceDivs", binary<divide>},
      {"PowTensorScalar", binary<power>},
      {"PowTensorTensor", binary<power>},
      {"PowScalarTensor", power_of_scalar},
      {"InplacePowTensorScalar", binary<power>},
      {"FloorDivide", binary<floor_divide>},
      {"FloorDivides", binary<floor_divide>},
      {"InplaceFloorDivide", binary<floor_divide>},
      {"InplaceFloorDivides", binary<floor_divide>},
      {"RemainderTensorTensor", binary<remainder>},
      {"RemainderTensorScalar", binary<remainder>},
      {"InplaceRemainderTensorTensor", binary<remainder>},
      {"InplaceRemainderTensorScalar", binary<remainder>},
      {"EqTensor", binary<equal>},
      {"EqScalar", binary<equal>},
      {"NeTensor", binary<not_equal>},
      {"NeScalar", binary<not_equal>},
      {"GtTensor", binary<greater>},
      {"GtScalar", binary<greater>},
      {"GeTensor", binary<greater_equal>},
      {"GeScalar", binary<greater_equal>},
      {"LtTensor", binary<less>},
      {"LtScalar", binary<less>},
      {"LeTensor", binary<less_equal>},
      {"LeScalar", binary<less_equal>},
      {"Minimum", binary<minimum>},
      {"Maximum", binary<maximum>},
      {"LogicalAnd", binary<logical_and>},
      {"LogicalOr", binary<logical_or>},
      {"BitwiseAndTensor", binary<bit_and>},
      {"BitwiseAndScalar", binary<bit_and>},
      {"BitwiseOrTensor", binary<bit_or>},
      {"BitwiseOrScalar", binary<bit_or>},
      {"InplaceBitwiseAndTensor", binary<bit_and>},
      {"InplaceBitwiseOrTensor", binary<bit_or>},
      {"LogicalNot", unary<logical_not>},
      {"InplaceLogicalNot", unary<logical_not>},
      {"BitwiseNot", unary<bit_not>},
      {"Neg", unary<negate>},
      {"Abs", unary<absolute>},
      {"Triu", triangle<true>},
      {"Tril", triangle<false>},
      {"InplaceTriu", triangle<true>},
      {"InplaceTril", triangle<false>},
      {"Clamp", clamp},
      {"ClampMin", clamp},
      {"SWhere", where},
      {"ReduceSum", reduce<Reduction::kSum>},
      {"Mean", reduce<Reduction::kMean>},
      {"MeanV2", reduce<Reduction::kMean>},
      {"Amax", reduce<Reduction::kMax>},
      {"Amin", reduce<Reduction::kMin>},
      {"Nonzero", nonzero},
      {"NonzeroV2", nonzero},
      {"Index", index_get},
      {"IndexPutImpl", index_put},
      {"IndexSelect", select},
      {"Gather", select},
      {"Cat", concatenate},
      {"Stack", concatenate},
      {"Repeat", repeat},
      {"RepeatInterleaveInt", repeat_interleave},
      {"RepeatInterleaveIntWithDim", repeat_interleave},
      {"All", reduce_whole<keep_all>},
      {"Any", reduce_whole<keep_any>},
      {"Max", reduce_whole<keep_max>},
      {"Min", reduce_whole<keep_min>},
      {"Equal", equal_whole},
      {"Flip", flip},
      {"Embedding", embedding},
      {"Scatter", scatter},
      {"InplaceScatter", scatter},
      {"ScatterValue", scatter},
      {"InplaceScatterValue", scatter},
  };
  return *rows;
}

Kernel find_kernel(const std::string &operator_name) {
  struct Found {
    Kernel kernel;
    bool of_floats;
  };
  static const auto *kernels = [] {
    auto *table = new std::unordered_map<std::string, Found>;
    for (const auto *rows : {&kernel_rows(), &pick_kernel_rows()})
      for (const KernelRow &row : *rows) table->emplace(row.name, Found{row.kernel, false});
    for (const auto *rows : {&float_kernel_rows(), &attention_kernel_rows(), &expert_kernel_rows()})
      for (const KernelRow &row : *rows) table->emplace(row.name, Found{row.kernel, true});
    return table;
  }();
  auto found = kernels->find(operator_name);
  if (found == kernels->end() || (found->second.of_floats && floats_given_up.load(std::memory_order_relaxed))) return nullptr;
  return found->second.kernel;
}

}  // namespace memprof_sim
