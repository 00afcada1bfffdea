// Tensors as dense rows of float32, for the kernels that compute with floats.
#pragma once

#include <cstring>
#include <vector>

#include "kernels/tensor_view.h"

namespace memprof_sim {

// The values of a tensor in the order of its shape.
inline void read_floats(const aclTensor &tensor, std::vector<float> *values) {
  values->resize(static_cast<size_t>(element_count(tensor)));
  if (tensor.type == ACL_FLOAT && contiguous(tensor)) {
    if (values->empty()) return;
    note_read(element(tensor, tensor.offset), values->size() * sizeof(float));
    memcpy(values->data(), element(tensor, tensor.offset), values->size() * sizeof(float));
    return;
  }
  size_t next = 0;
  auto read = [&](auto narrow) {
    walk(tensor.shape, {&tensor}, [&](auto &, int64_t *index) {
      note_read(element(tensor, index[0]), element_bytes(tensor.type));
      (*values)[next++] = narrow(element(tensor, index[0]));
    });
  };
  if (tensor.type == ACL_FLOAT)
    read([](const char *at) { return load_raw<float>(at); });
  else if (tensor.type == ACL_BF16)
    read([](const char *at) { return from_bfloat(load_raw<uint16_t>(at)); });
  else if (tensor.type == ACL_FLOAT16)
    read([](const char *at) { return from_half(load_raw<uint16_t>(at)); });
  else
    read([&](const char *at) { return static_cast<float>(load(at, tensor.type)); });
}

inline void write_floats(const aclTensor &tensor, const std::vector<float> &values) {
  if (tensor.type == ACL_FLOAT && contiguous(tensor)) {
    if (values.empty()) return;
    note_write(element(tensor, tensor.offset), values.size() * sizeof(float));
    memcpy(element(tensor, tensor.offset), values.data(), values.size() * sizeof(float));
    return;
  }
  size_t next = 0;
  walk(tensor.shape, {&tensor}, [&](auto &, int64_t *index) {
    float value = values[next++];
    char *at = element(tensor, index[0]);
    note_write(at, element_bytes(tensor.type));
    if (tensor.type == ACL_FLOAT)
      memcpy(at, &value, sizeof value);
    else
      store(at, tensor.type, value);
  });
}

// Hands every line along `axis` of `in` to `change` as floats, and writes what it made of it to the
// same line of `out`.
template <typename Change>
void for_lines(const aclTensor &in, const aclTensor &out, size_t axis, Change change) {
  aclTensor starts = in, targets = out;
  starts.shape[axis] = targets.shape[axis] = 1;
  aclTensor source = in, target = out;
  for (aclTensor *line : {&source, &target}) {
    line->shape = {in.shape[axis]};
    line->strides = {line->strides[axis]};
  }
  std::vector<float> values;
  walk(starts.shape, {&starts, &targets}, [&](auto &, int64_t *index) {
    source.offset = index[0];
    target.offset = index[1];
    read_floats(source, &values);
    change(values);
    write_floats(target, values);
  });
}

}  // namespace memprof_sim
