// Host kernels: the operators whose results steer the engine compute for real, on tensors up to host_compute_bytes. Everything
// else computes nothing. Arithmetic is done where the result is an integer or a truth value; floats are only copied, cast
// and filled. Values pass through long double, which holds every 64-bit integer exactly.
#include "tensor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <unordered_map>

namespace memprof_sim {
namespace {

using Value = long double;

// ---- elements ----

float from_half(uint16_t half) {
  uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, exponent = half >> 10 & 0x1f, fraction = half & 0x3ff;
  float magnitude = exponent == 0    ? std::ldexp(static_cast<float>(fraction), -24)
                    : exponent == 31 ? (fraction ? NAN : INFINITY)
                                     : std::ldexp(static_cast<float>(fraction | 0x400), static_cast<int>(exponent) - 25);
  return sign ? -magnitude : magnitude;
}

uint16_t to_half(float value) {
  uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  float magnitude = std::fabs(value);
  if (std::isnan(value)) return 0x7e00;
  if (magnitude >= 65520.0f) return sign | 0x7c00;
  if (magnitude < 6.103515625e-05f) return sign | static_cast<uint16_t>(std::nearbyint(magnitude * 16777216.0f));
  int exponent = 0;
  float fraction = std::frexp(magnitude, &exponent);  // in [0.5, 1)
  uint32_t bits = static_cast<uint32_t>(std::nearbyint(fraction * 2048.0f));
  return static_cast<uint16_t>(sign | (((static_cast<uint32_t>(exponent + 14) << 10) + bits - 1024) & 0x7fff));
}

float from_bfloat(uint16_t bits) {
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

uint16_t to_bfloat(float value) {
  uint32_t wide;
  memcpy(&wide, &value, sizeof wide);
  if (std::isnan(value)) return 0x7fc0;
  return static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
}

template <typename T>
Value load_as(const void *address) {
  T value;
  memcpy(&value, address, sizeof value);
  return static_cast<Value>(value);
}

template <typename T>
void store_as(void *address, Value value) {
  T narrow = std::isfinite(value) ? static_cast<T>(value) : T{};
  memcpy(address, &narrow, sizeof narrow);
}

bool is_integer(aclDataType type) {
  switch (type) {
    case ACL_INT8:
    case ACL_UINT8:
    case ACL_INT16:
    case ACL_UINT16:
    case ACL_INT32:
    case ACL_UINT32:
    case ACL_INT64:
    case ACL_UINT64:
    case ACL_BOOL: return true;
    default: return false;
  }
}

bool is_plain(aclDataType type) {
  return is_integer(type) || type == ACL_FLOAT || type == ACL_DOUBLE || type == ACL_FLOAT16 || type == ACL_BF16;
}

Value load(const void *address, aclDataType type) {
  switch (type) {
    case ACL_BOOL: return *static_cast<const unsigned char *>(address) ? 1 : 0;
    case ACL_INT8: return load_as<int8_t>(address);
    case ACL_UINT8: return load_as<uint8_t>(address);
    case ACL_INT16: return load_as<int16_t>(address);
    case ACL_UINT16: return load_as<uint16_t>(address);
    case ACL_INT32: return load_as<int32_t>(address);
    case ACL_UINT32: return load_as<uint32_t>(address);
    case ACL_INT64: return load_as<int64_t>(address);
    case ACL_UINT64: return load_as<uint64_t>(address);
    case ACL_FLOAT: return load_as<float>(address);
    case ACL_DOUBLE: return load_as<double>(address);
    case ACL_FLOAT16: return from_half(*static_cast<const uint16_t *>(address));
    case ACL_BF16: return from_bfloat(*static_cast<const uint16_t *>(address));
    default: return 0;
  }
}

void store(void *address, aclDataType type, Value value) {
  switch (type) {
    case ACL_BOOL: *static_cast<unsigned char *>(address) = value != 0; break;
    case ACL_INT8: store_as<int8_t>(address, value); break;
    case ACL_UINT8: store_as<uint8_t>(address, value); break;
    case ACL_INT16: store_as<int16_t>(address, value); break;
    case ACL_UINT16: store_as<uint16_t>(address, value); break;
    case ACL_INT32: store_as<int32_t>(address, value); break;
    case ACL_UINT32: store_as<uint32_t>(address, value); break;
    case ACL_INT64: store_as<int64_t>(address, value); break;
    case ACL_UINT64: store_as<uint64_t>(address, value); break;
    case ACL_FLOAT: {
      float narrow = static_cast<float>(value);
      memcpy(address, &narrow, sizeof narrow);
      break;
    }
    case ACL_DOUBLE: {
      double narrow = static_cast<double>(value);
      memcpy(address, &narrow, sizeof narrow);
      break;
    }
    case ACL_FLOAT16: *static_cast<uint16_t *>(address) = to_half(static_cast<float>(value)); break;
    case ACL_BF16: *static_cast<uint16_t *>(address) = to_bfloat(static_cast<float>(value)); break;
    default: break;
  }
}

Value scalar_value(const aclScalar &scalar) { return load(scalar.bytes, scalar.type); }

// ---- tensors ----

// Every element lies in one device allocation.
bool addressable(const aclTensor &tensor) {
  uint64_t width = element_bytes(tensor.type);
  int64_t count = element_count(tensor);
  if (count == 0) return true;
  if (!tensor.data || !width || count < 0 || tensor.strides.size() != tensor.shape.size()) return false;
  int64_t low = tensor.offset, high = tensor.offset;
  for (size_t axis = 0; axis < tensor.shape.size(); ++axis) {
    int64_t reach = (tensor.shape[axis] - 1) * tensor.strides[axis];
    (reach < 0 ? low : high) += reach;
  }
  uint64_t left = 0;
  return low >= 0 && device_range(tensor.data, &left, nullptr) && static_cast<uint64_t>(high + 1) * width <= left;
}

bool small(const aclTensor &tensor) {
  return static_cast<uint64_t>(element_count(tensor)) * element_bytes(tensor.type) <= profile().host_compute_bytes;
}

// A small tensor of plain numbers that lies where it should.
bool usable(const aclTensor &tensor) { return is_plain(tensor.type) && small(tensor) && addressable(tensor); }

bool contiguous(const aclTensor &tensor) {
  int64_t expected = 1;
  for (size_t axis = tensor.shape.size(); axis-- > 0;) {
    if (tensor.shape[axis] != 1 && tensor.strides[axis] != expected) return false;
    expected *= tensor.shape[axis];
  }
  return true;
}

char *element(const aclTensor &tensor, int64_t index) {
  return static_cast<char *>(tensor.data) + index * static_cast<int64_t>(element_bytes(tensor.type));
}

// Calls visit(position, indices...) with the element index of every tensor at each position of `shape`; tensors broadcast.
template <typename Visit, size_t N>
void walk(const std::vector<int64_t> &shape, const aclTensor *const (&tensors)[N], Visit visit) {
  std::vector<int64_t> strides[N];
  int64_t index[N];
  for (size_t which = 0; which < N; ++which) {
    const aclTensor &tensor = *tensors[which];
    index[which] = tensor.offset;
    strides[which].assign(shape.size(), 0);
    size_t missing = shape.size() - std::min(shape.size(), tensor.shape.size());
    for (size_t axis = 0; axis < tensor.shape.size() && missing + axis < shape.size(); ++axis)
      if (tensor.shape[axis] != 1) strides[which][missing + axis] = tensor.strides[axis];
  }
  int64_t count = 1;
  for (int64_t extent : shape) count *= extent;
  std::vector<int64_t> position(shape.size(), 0);
  for (int64_t done = 0; done < count; ++done) {
    visit(position, index);
    for (size_t axis = shape.size(); axis-- > 0;) {
      bool carry = ++position[axis] == shape[axis];
      for (size_t which = 0; which < N; ++which) index[which] += strides[which][axis] * (carry ? 1 - shape[axis] : 1);
      if (!carry) break;
      position[axis] = 0;
    }
  }
}

bool broadcasts_to(const aclTensor &tensor, const std::vector<int64_t> &shape) {
  if (tensor.shape.size() > shape.size()) return false;
  size_t missing = shape.size() - tensor.shape.size();
  for (size_t axis = 0; axis < tensor.shape.size(); ++axis)
    if (tensor.shape[axis] != 1 && tensor.shape[axis] != shape[missing + axis]) return false;
  return true;
}

void fill(const aclTensor &tensor, Value value) {
  if (!usable(tensor)) return;
  walk(tensor.shape, {&tensor}, [&](auto &, int64_t *index) { store(element(tensor, index[0]), tensor.type, value); });
}

void copy(const aclTensor &target, const aclTensor &source) {
  if (!small(target) || !addressable(target) || !addressable(source) || !broadcasts_to(source, target.shape)) return;
  if (target.type == source.type && contiguous(target) && contiguous(source) && target.shape == source.shape) {
    memmove(element(target, target.offset), element(source, source.offset),
            static_cast<uint64_t>(element_count(target)) * element_bytes(target.type));
    return;
  }
  if (!is_plain(target.type) || !is_plain(source.type)) return;
  walk(target.shape, {&target, &source}, [&](auto &, int64_t *index) {
    store(element(target, index[0]), target.type, load(element(source, index[1]), source.type));
  });
}

// ---- arguments ----

aclTensor *tensor_at(Call &call, size_t index) {
  return index < call.arguments.size() && call.arguments[index].kind == Kind::kTensor ? &call.arguments[index].tensor : nullptr;
}

std::vector<aclTensor *> tensors_of(Call &call) {
  std::vector<aclTensor *> result;
  for (Argument &argument : call.arguments)
    if (argument.kind == Kind::kTensor) result.push_back(&argument.tensor);
  return result;
}

bool scalar_at(Call &call, size_t index, Value *value) {
  if (index >= call.arguments.size() || call.arguments[index].kind != Kind::kScalar) return false;
  *value = scalar_value(call.arguments[index].scalar);
  return true;
}

// ---- operators ----

void index_get(Call &call);

// Position 0 always exists: operators that pick positions, token ids among them, answer with it.
void zero_indices(Call &call) {
  auto tensors = tensors_of(call);
  for (size_t index = tensors.size() < 2 ? 0 : 1; index < tensors.size(); ++index)
    if (tensors[index]->type == ACL_INT32 || tensors[index]->type == ACL_INT64) fill(*tensors[index], 0);
}

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
  if (!is_integer(out.type) || !usable(out) || !usable(in) || in.shape != out.shape || dim < 0 || dim >= std::max<int64_t>(rank, 1)) return;
  int64_t back = rank ? out.strides[static_cast<size_t>(dim)] : 0;
  walk(out.shape, {&out, &in}, [&](auto &position, int64_t *index) {
    Value before = rank && position[static_cast<size_t>(dim)] ? load(element(out, index[0] - back), out.type) : 0;
    store(element(out, index[0]), out.type, before + load(element(in, index[1]), in.type));
  });
}

using Binary = Value (*)(Value, Value, Value);  // left, right, alpha

Value add(Value a, Value b, Value alpha) { return a + alpha * b; }
Value subtract(Value a, Value b, Value alpha) { return a - alpha * b; }
Value reverse_subtract(Value a, Value b, Value alpha) { return b - alpha * a; }
Value multiply(Value a, Value b, Value) { return a * b; }
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
  if (!is_integer(out.type) || !usable(out) || !usable(left) || !broadcasts_to(left, out.shape)) return;
  if (right && (!usable(*right) || !broadcasts_to(*right, out.shape))) return;
  walk(out.shape, {&out, &left, right ? right : &left}, [&](auto &, int64_t *index) {
    Value second = right ? load(element(*right, index[2]), right->type) : other;
    store(element(out, index[0]), out.type, operation(load(element(left, index[1]), left.type), second, alpha));
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
  if (!is_integer(out.type) || !usable(out) || !usable(in) || in.shape != out.shape) return;
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
  if (tensors.size() != 2 || !is_integer(tensors[1]->type) || !usable(*tensors[0]) || !usable(*tensors[1])) return;
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

// sum(self, dims, keep, type, out): over everything the result lacks.
void reduce_sum(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() != 2 || call.arguments.size() < 2 || call.arguments[1].kind != Kind::kIntArray) return;
  const aclTensor &in = *tensors[0], &out = *tensors[1];
  if (!is_integer(out.type) || !usable(out) || !usable(in)) return;
  std::vector<bool> reduced(in.shape.size(), call.arguments[1].integers.empty());
  for (int64_t dim : call.arguments[1].integers) {
    int64_t axis = dim < 0 ? dim + static_cast<int64_t>(in.shape.size()) : dim;
    if (axis < 0 || axis >= static_cast<int64_t>(in.shape.size())) return;
    reduced[static_cast<size_t>(axis)] = true;
  }
  aclTensor view = out;  // the result as if the reduced axes were kept
  view.shape = in.shape;
  view.strides.assign(in.shape.size(), 0);
  bool kept = out.shape.size() == in.shape.size();
  for (size_t axis = 0, next = 0; axis < in.shape.size(); ++axis) {
    if (!reduced[axis] && (kept ? axis : next) < out.strides.size()) view.strides[axis] = out.strides[kept ? axis : next];
    next += !reduced[axis];
  }
  if (!addressable(view)) return;
  fill(out, 0);
  walk(in.shape, {&view, &in}, [&](auto &, int64_t *index) {
    char *sum = element(out, index[0]);
    store(sum, out.type, load(sum, out.type) + load(element(in, index[1]), in.type));
  });
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
  if (!is_integer(in.type) || !is_integer(out.type) || !usable(in) || !usable(out)) return;
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
  if (tensors.size() != 3 || !usable(*tensors[1]) || !usable(*tensors[2]) || !addressable(*tensors[0]) || !is_integer(tensors[0]->type)) return;
  Call as_index{"Index", {}};
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

const std::vector<aclTensor> *list_at(Call &call, size_t index) {
  return index < call.arguments.size() && call.arguments[index].kind == Kind::kTensorList ? &call.arguments[index].tensors : nullptr;
}

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

Kernel find_kernel(const std::string &operator_name) {
  static const auto *kernels = new std::unordered_map<std::string, Kernel>{
      {"ArgMax", zero_indices},
      {"ArgMin", zero_indices},
      {"MaxDim", zero_indices},
      {"MinDim", zero_indices},
      {"Topk", zero_indices},
      {"Sort", zero_indices},
      {"Argsort", zero_indices},
      {"Multinomial", zero_indices},
      {"MultinomialTensor", zero_indices},
      {"Kthvalue", zero_indices},
      {"TopKTopPSample", zero_indices},
      {"TopKTopPSampleV2", zero_indices},
      {"MoeGatingTopK", zero_indices},
      {"MoeGatingTopKSoftmax", zero_indices},
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
      {"Clamp", clamp},
      {"ClampMin", clamp},
      {"SWhere", where},
      {"ReduceSum", reduce_sum},
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
  auto found = kernels->find(operator_name);
  return found == kernels->end() ? nullptr : found->second;
}

}  // namespace memprof_sim
