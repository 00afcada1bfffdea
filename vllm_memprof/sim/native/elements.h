// What the host kernels share: elements of every plain type, tensors as the kernels walk them, and the arguments of a call.
// Values pass through long double, which holds every 64-bit integer exactly.
#pragma once

#include "tensor.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

namespace memprof_sim {

using Value = long double;

// ---- elements ----

inline float from_half(uint16_t half) {
  uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, exponent = half >> 10 & 0x1f, fraction = half & 0x3ff;
  float magnitude = exponent == 0    ? std::ldexp(static_cast<float>(fraction), -24)
                    : exponent == 31 ? (fraction ? NAN : INFINITY)
                                     : std::ldexp(static_cast<float>(fraction | 0x400), static_cast<int>(exponent) - 25);
  return sign ? -magnitude : magnitude;
}

inline uint16_t to_half(float value) {
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

inline float from_bfloat(uint16_t bits) {
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

inline uint16_t to_bfloat(float value) {
  uint32_t wide;
  memcpy(&wide, &value, sizeof wide);
  if (std::isnan(value)) return 0x7fc0;
  return static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
}

template <typename T>
inline T load_raw(const void *address) {
  T value;
  memcpy(&value, address, sizeof value);
  return value;
}

template <typename T>
inline Value load_as(const void *address) {
  T value;
  memcpy(&value, address, sizeof value);
  return static_cast<Value>(value);
}

template <typename T>
inline void store_as(void *address, Value value) {
  T narrow = std::isfinite(value) ? static_cast<T>(value) : T{};
  memcpy(address, &narrow, sizeof narrow);
}

inline bool is_integer(aclDataType type) {
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

inline bool is_plain(aclDataType type) {
  return is_integer(type) || type == ACL_FLOAT || type == ACL_DOUBLE || type == ACL_FLOAT16 || type == ACL_BF16;
}

inline Value load(const void *address, aclDataType type) {
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

inline void store(void *address, aclDataType type, Value value) {
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

inline Value scalar_value(const aclScalar &scalar) { return load(scalar.bytes, scalar.type); }

// ---- tensors ----

// Every element lies in one device allocation.
inline bool addressable(const aclTensor &tensor) {
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

inline bool small(const aclTensor &tensor) {
  return static_cast<uint64_t>(element_count(tensor)) * element_bytes(tensor.type) <= profile().host_compute_bytes;
}

// Once a product of matrices came by whose weights are above the limit, the model's floats mean nothing: then none are computed, so
// that a large model starts as fast as if there were no kernels for them.
inline std::atomic<bool> floats_given_up{false};

inline bool float_result(const aclTensor &out) { return !is_integer(out.type) && floats_given_up.load(std::memory_order_relaxed); }

// A small tensor of plain numbers that lies where it should.
inline bool usable(const aclTensor &tensor) { return is_plain(tensor.type) && small(tensor) && addressable(tensor); }

inline bool contiguous(const aclTensor &tensor) {
  int64_t expected = 1;
  for (size_t axis = tensor.shape.size(); axis-- > 0;) {
    if (tensor.shape[axis] != 1 && tensor.strides[axis] != expected) return false;
    expected *= tensor.shape[axis];
  }
  return true;
}

inline char *element(const aclTensor &tensor, int64_t index) {
  return static_cast<char *>(tensor.data) + index * static_cast<int64_t>(element_bytes(tensor.type));
}

// Calls visit(position, indices...) with the element index of every tensor at each position of `shape`; tensors broadcast.
template <typename Visit, size_t N>
inline void walk(const std::vector<int64_t> &shape, const aclTensor *const (&tensors)[N], Visit visit) {
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

inline bool broadcasts_to(const aclTensor &tensor, const std::vector<int64_t> &shape) {
  if (tensor.shape.size() > shape.size()) return false;
  size_t missing = shape.size() - tensor.shape.size();
  for (size_t axis = 0; axis < tensor.shape.size(); ++axis)
    if (tensor.shape[axis] != 1 && tensor.shape[axis] != shape[missing + axis]) return false;
  return true;
}

inline void fill(const aclTensor &tensor, Value value) {
  if (!usable(tensor)) return;
  walk(tensor.shape, {&tensor}, [&](auto &, int64_t *index) { store(element(tensor, index[0]), tensor.type, value); });
}

inline void copy(const aclTensor &target, const aclTensor &source) {
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

inline aclTensor *tensor_at(Call &call, size_t index) {
  return index < call.arguments.size() && call.arguments[index].kind == Kind::kTensor ? &call.arguments[index].tensor : nullptr;
}

inline std::vector<aclTensor *> tensors_of(Call &call) {
  std::vector<aclTensor *> result;
  for (Argument &argument : call.arguments)
    if (argument.kind == Kind::kTensor) result.push_back(&argument.tensor);
  return result;
}

inline bool scalar_at(Call &call, size_t index, Value *value) {
  if (index >= call.arguments.size() || call.arguments[index].kind != Kind::kScalar) return false;
  *value = scalar_value(call.arguments[index].scalar);
  return true;
}

inline const std::vector<aclTensor> *list_at(Call &call, size_t index) {
  return index < call.arguments.size() && call.arguments[index].kind == Kind::kTensorList ? &call.arguments[index].tensors : nullptr;
}

}  // namespace memprof_sim
