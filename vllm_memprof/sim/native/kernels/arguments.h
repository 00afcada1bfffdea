// The arguments of an operator's call, by position.
#pragma once

#include <vector>

#include "kernels/number_formats.h"
#include "tensor.h"

namespace memprof_sim {

inline aclTensor *tensor_at(Call &call, size_t index) {
  return index < call.arguments.size() && call.arguments[index].kind == Kind::kTensor
             ? &call.arguments[index].tensor
             : nullptr;
}

inline std::vector<aclTensor *> tensors_of(Call &call) {
  std::vector<aclTensor *> result;
  for (Argument &argument : call.arguments)
    if (argument.kind == Kind::kTensor) result.push_back(&argument.tensor);
  return result;
}

inline bool scalar_at(Call &call, size_t index, Value *value) {
  if (index >= call.arguments.size() || call.arguments[index].kind != Kind::kScalar) return false;
  *value = load(call.arguments[index].scalar.bytes, call.arguments[index].scalar.type);
  return true;
}

inline const std::vector<aclTensor> *list_at(Call &call, size_t index) {
  return index < call.arguments.size() && call.arguments[index].kind == Kind::kTensorList
             ? &call.arguments[index].tensors
             : nullptr;
}

inline int64_t word_at(const Call &call, size_t index) {
  return static_cast<int64_t>(call.arguments[index].word);
}

inline bool flag_at(const Call &call, size_t index) {
  return index < call.arguments.size() && (call.arguments[index].word & 0xff) != 0;
}

// The axis that argument `index` of a call names, from either end; false when the tensor has no
// such axis.
inline bool axis_of(const Call &call, size_t index, const aclTensor &tensor, size_t *axis) {
  if (index >= call.arguments.size() || call.arguments[index].kind != Kind::kNone) return false;
  int64_t rank = static_cast<int64_t>(tensor.shape.size());
  int64_t dim = static_cast<int32_t>(
      call.arguments[index].word);  // a word of 32 bits leaves the upper half undefined
  if (dim < 0) dim += rank;
  if (dim < 0 || dim >= rank || tensor.shape[static_cast<size_t>(dim)] == 0) return false;
  *axis = static_cast<size_t>(dim);
  return true;
}

}  // namespace memprof_sim
