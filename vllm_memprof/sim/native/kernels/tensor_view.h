// Tensors as the host kernels read, write and walk them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "copy.h"
#include "kernels/number_formats.h"
#include "memory.h"
#include "poison.h"
#include "profile.h"
#include "tensor.h"

namespace memprof_sim {

// Every element lies in one allocation that kernels may reach: of the device, or pinned.
inline bool addressable(const aclTensor &tensor) {
  uint64_t width = element_bytes(tensor.type);
  int64_t count = element_count(tensor);
  if (count == 0) return true;
  if (!tensor.data || !width || count < 0 || tensor.strides.size() != tensor.shape.size())
    return false;
  int64_t low = tensor.offset, high = tensor.offset;
  for (size_t axis = 0; axis < tensor.shape.size(); ++axis) {
    int64_t reach = (tensor.shape[axis] - 1) * tensor.strides[axis];
    (reach < 0 ? low : high) += reach;
  }
  uint64_t left = 0;
  bool reached = device_range(tensor.data, &left, nullptr) || host_range(tensor.data, &left);
  return low >= 0 && reached && static_cast<uint64_t>(high + 1) * width <= left;
}

// Whether `count` elements are few enough to compute. Integers steer the engine (positions,
// experts, counts) and are limited by their number, so that a cast between their widths is computed
// too.
inline bool within_limit(uint64_t count, aclDataType type) {
  return count * (is_integer(type) ? 1 : element_bytes(type)) <= profile().host_compute_bytes;
}

inline bool small(const aclTensor &tensor) {
  return within_limit(static_cast<uint64_t>(element_count(tensor)), tensor.type);
}

// Once a product of matrices came by whose weights are above the limit, the model's floats mean
// nothing: then none are computed, so that a large model starts as fast as if there were no kernels
// for them.
inline std::atomic<bool> floats_given_up{false};

// Some operator of this process computed nothing: floats may be those of nobody.
inline std::atomic<bool> values_missing{false};

// A result that is not computed for that reason.
inline bool float_result(const aclTensor &out) {
  return !is_integer(out.type) && floats_given_up.load(std::memory_order_relaxed);
}

// A small tensor of plain numbers that lies where it should.
inline bool usable(const aclTensor &tensor) {
  return is_plain(tensor.type) && small(tensor) && addressable(tensor);
}

inline bool contiguous(const aclTensor &tensor) {
  int64_t expected = 1;
  for (size_t axis = tensor.shape.size(); axis-- > 0;) {
    if (tensor.shape[axis] != 1 && tensor.strides[axis] != expected) return false;
    expected *= tensor.shape[axis];
  }
  return true;
}

inline char *element(const aclTensor &tensor, int64_t index) {
  return static_cast<char *>(tensor.data) +
         index * static_cast<int64_t>(element_bytes(tensor.type));
}

// Calls visit(position, indices...) with the element index of every tensor at each position of
// `shape`; tensors broadcast.
template <typename Visit, size_t N>
inline void walk(const std::vector<int64_t> &shape, const aclTensor *const (&tensors)[N],
                 Visit visit) {
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
      for (size_t which = 0; which < N; ++which)
        index[which] += strides[which][axis] * (carry ? 1 - shape[axis] : 1);
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

inline Value value_at(const aclTensor &tensor, int64_t index) {
  note_read(element(tensor, index), element_bytes(tensor.type));
  return load(element(tensor, index), tensor.type);
}

inline void set_value(const aclTensor &tensor, int64_t index, Value value) {
  note_write(element(tensor, index), element_bytes(tensor.type));
  store(element(tensor, index), tensor.type, value);
}

// The values of a tensor in the order of its shape.
template <typename T>
inline std::vector<T> read_values(const aclTensor &tensor) {
  std::vector<T> values;
  walk(tensor.shape, {&tensor}, [&](auto &, int64_t *index) {
    values.push_back(static_cast<T>(value_at(tensor, index[0])));
  });
  return values;
}

template <typename T>
inline void write_values(const aclTensor &tensor, const std::vector<T> &values) {
  size_t next = 0;
  walk(tensor.shape, {&tensor}, [&](auto &, int64_t *index) {
    set_value(tensor, index[0], static_cast<Value>(values[next++]));
  });
}

// Zeros cost no host memory, whatever the size.
inline void fill(const aclTensor &tensor, Value value) {
  if (value == 0 && contiguous(tensor) && addressable(tensor)) {
    uint64_t bytes = static_cast<uint64_t>(element_count(tensor)) * element_bytes(tensor.type);
    if (bytes == 0) return;
    note_write(element(tensor, tensor.offset), bytes);
    return keep_set(element(tensor, tensor.offset), 0, bytes);
  }
  if (!usable(tensor)) return;
  walk(tensor.shape, {&tensor},
       [&](auto &, int64_t *index) { set_value(tensor, index[0], value); });
}

// How many elements of the last axis lie one behind the other in both tensors: all of it, or 1.
inline int64_t line_length(const aclTensor &target, const aclTensor &source) {
  if (target.shape.empty() || source.shape.empty()) return 1;
  bool dense = target.strides.back() == 1 && source.strides.back() == 1;
  return dense && target.shape.back() == source.shape.back() ? target.shape.back() : 1;
}

// Copies elements of one type that lie one behind the other in both tensors.
inline void copy_line(const aclTensor &target, int64_t to, const aclTensor &source, int64_t from,
                      int64_t count) {
  uint64_t bytes = static_cast<uint64_t>(count) * element_bytes(target.type);
  note_read(element(source, from), bytes);
  note_write(element(target, to), bytes);
  memmove(element(target, to), element(source, from), bytes);
}

inline bool is_short_float(aclDataType type) {
  return type == ACL_FLOAT || type == ACL_FLOAT16 || type == ACL_BF16;
}

// Converts floats of 16 and 32 bits that lie one behind the other in both tensors.
inline void convert_line(const aclTensor &target, int64_t to, const aclTensor &source, int64_t from,
                         int64_t count) {
  uint64_t width = element_bytes(source.type), narrow = element_bytes(target.type);
  char *line = element(target, to);
  const char *origin = element(source, from);
  note_read(origin, static_cast<uint64_t>(count) * width);
  note_write(line, static_cast<uint64_t>(count) * narrow);
  auto convert = [&](auto widen) {
    auto each = [&](auto narrowed) {
      for (int64_t at = 0; at < count; ++at) {
        auto value = narrowed(widen(origin + at * static_cast<int64_t>(width)));
        memcpy(line + at * static_cast<int64_t>(sizeof value), &value, sizeof value);
      }
    };
    if (target.type == ACL_FLOAT)
      each([](float value) { return value; });
    else if (target.type == ACL_BF16)
      each(to_bfloat);
    else
      each(to_half);
  };
  if (source.type == ACL_FLOAT)
    convert(load_raw<float>);
  else if (source.type == ACL_BF16)
    convert([](const char *at) { return from_bfloat(load_raw<uint16_t>(at)); });
  else
    convert([](const char *at) { return from_half(load_raw<uint16_t>(at)); });
}

inline void copy(const aclTensor &target, const aclTensor &source) {
  if (!small(target) || !addressable(target) || !addressable(source) ||
      !broadcasts_to(source, target.shape))
    return;
  if (target.type == source.type && contiguous(target) && contiguous(source) &&
      target.shape == source.shape) {
    uint64_t bytes = static_cast<uint64_t>(element_count(target)) * element_bytes(target.type);
    note_read(element(source, source.offset), bytes);
    note_write(element(target, target.offset), bytes);
    memmove(element(target, target.offset), element(source, source.offset), bytes);
    return;
  }
  if (!is_plain(target.type) || !is_plain(source.type)) return;
  int64_t line = line_length(target, source);
  bool same = target.type == source.type;
  if (line > 1 && (same || (is_short_float(target.type) && is_short_float(source.type)))) {
    aclTensor to = target, from = source;
    to.shape.back() = from.shape.back() = 1;
    walk(to.shape, {&to, &from}, [&](auto &, int64_t *index) {
      (same ? copy_line : convert_line)(target, index[0], source, index[1], line);
    });
    return;
  }
  bool from_float = !is_integer(source.type);
  walk(target.shape, {&target, &source}, [&](auto &, int64_t *index) {
    Value value = value_at(source, index[1]);
    set_value(target, index[0], from_float ? cast_float(value, target.type) : value);
  });
}

}  // namespace memprof_sim
