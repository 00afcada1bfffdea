// The argument objects of aclnn operators, and an operator's call as the host kernels see it.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "acl.h"

struct aclTensor {
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // in elements
  int64_t offset;                // in elements
  aclDataType type;
  aclFormat format;
  std::vector<int64_t> storage_shape;
  void *data;
};
struct aclScalar {
  aclDataType type;
  unsigned char bytes[16];
};
struct aclIntArray {
  std::vector<int64_t> values;
};
struct aclFloatArray {
  std::vector<float> values;
};
struct aclBoolArray {
  std::vector<unsigned char> values;
};
struct aclTensorList {
  std::vector<aclTensor *> tensors;
};
struct aclScalarList {
  std::vector<aclScalar *> scalars;
};

namespace memprof_sim {

enum class Kind {
  kNone,
  kTensor,
  kScalar,
  kIntArray,
  kFloatArray,
  kBoolArray,
  kTensorList,
  kScalarList
};
Kind kind_of(uint64_t word);  // of a live argument object; kNone for anything else

uint64_t element_bytes(aclDataType type);
int64_t element_count(const aclTensor &tensor);
uint64_t tensor_bytes(const aclTensor &tensor);
std::vector<int64_t> dense_strides(
    const std::vector<int64_t> &shape);  // in elements, the last axis contiguous

// One call of an operator: its arguments in order, objects copied, so that they outlive the
// caller's.
struct Argument {
  Kind kind = Kind::kNone;
  uint64_t word = 0;  // the raw value when it is no object
  aclTensor tensor{};
  aclScalar scalar{};
  std::vector<int64_t> integers;
  std::vector<aclTensor> tensors;
};
struct Call {
  std::string name;  // without "aclnn"
  std::vector<Argument> arguments;
  uint64_t reals[8] = {};  // the floating-point arguments, in their own order: a double each
  std::string text;        // the string argument of an attention operator
  double real(int index) const {
    double value;
    memcpy(&value, &reals[index], sizeof value);
    return value;
  }
};

}  // namespace memprof_sim
