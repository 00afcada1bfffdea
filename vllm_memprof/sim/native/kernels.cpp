// Host kernels: the few operators whose results steer the engine compute for real, on small tensors.
#include "tensor.h"

#include <cstring>
#include <unordered_map>

namespace memprof_sim {
namespace {

// Every element of the tensor lies in device memory, and the tensor is small enough to compute on the host.
bool computable(const aclTensor &tensor) {
  uint64_t width = element_bytes(tensor.type);
  int64_t count = element_count(tensor);
  if (!tensor.data || !width || count < 0 || static_cast<uint64_t>(count) * width > profile().host_compute_bytes) return false;
  if (count == 0) return true;
  int64_t low = tensor.offset, high = tensor.offset;
  for (size_t axis = 0; axis < tensor.shape.size(); ++axis) {
    int64_t reach = (tensor.shape[axis] - 1) * tensor.strides[axis];
    (reach < 0 ? low : high) += reach;
  }
  uint64_t left = 0;
  return low >= 0 && device_range(tensor.data, &left, nullptr) && static_cast<uint64_t>(high + 1) * width <= left;
}

template <typename Visit>
void for_each_element(const aclTensor &tensor, Visit visit) {
  uint64_t width = element_bytes(tensor.type);
  std::vector<int64_t> position(tensor.shape.size(), 0);
  int64_t count = element_count(tensor), at = tensor.offset;
  for (int64_t done = 0; done < count; ++done) {
    visit(static_cast<char *>(tensor.data) + at * static_cast<int64_t>(width), done);
    for (size_t axis = position.size(); axis-- > 0;) {
      at += tensor.strides[axis];
      if (++position[axis] < tensor.shape[axis]) break;
      at -= tensor.strides[axis] * tensor.shape[axis];
      position[axis] = 0;
    }
  }
}

void zero(const aclTensor &tensor) {
  if (!computable(tensor)) return;
  uint64_t width = element_bytes(tensor.type);
  for_each_element(tensor, [&](char *element, int64_t) { memset(element, 0, width); });
}

// The tensor arguments in order.
std::vector<aclTensor *> tensors_of(Call &call) {
  std::vector<aclTensor *> result;
  for (Argument &argument : call.arguments)
    if (argument.kind == Kind::kTensor) result.push_back(&argument.tensor);
  return result;
}

bool is_index_type(aclDataType type) { return type == ACL_INT32 || type == ACL_INT64; }

// Operators that hand out positions or token ids: position 0 always exists. Their last tensors are the results.
void zero_indices(Call &call) {
  auto tensors = tensors_of(call);
  for (size_t index = tensors.size() < 2 ? 0 : 1; index < tensors.size(); ++index)
    if (is_index_type(tensors[index]->type)) zero(*tensors[index]);
}

}  // namespace

Kernel find_kernel(const std::string &operator_name) {
  static const auto *kernels = new std::unordered_map<std::string, Kernel>{
      {"ArgMax", zero_indices},  {"ArgMin", zero_indices}, {"MaxDim", zero_indices},       {"MinDim", zero_indices},
      {"Topk", zero_indices},    {"Sort", zero_indices},   {"Multinomial", zero_indices},  {"Argsort", zero_indices},
      {"MaxV2", zero_indices},   {"Kthvalue", zero_indices}, {"Median", zero_indices},     {"MultinomialTensor", zero_indices},
  };
  auto found = kernels->find(operator_name);
  return found == kernels->end() ? nullptr : found->second;
}

}  // namespace memprof_sim
