// The argument objects of aclnn operators, and how an operator call is seen by the host kernels.
#pragma once

#include "shim.h"

#include <cstring>

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

enum class Kind { kNone, kTensor, kScalar, kIntArray, kFloatArray, kBoolArray, kTensorList, kScalarList };
Kind kind_of(uint64_t word);  // of a live argument object; kNone for anything else

uint64_t element_bytes(aclDataType type);
int64_t element_count(const aclTensor &tensor);

// One call of an operator: its arguments in order, objects copied, so that they outlive the caller's.
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

using Kernel = void (*)(Call &call);
struct KernelRow {
  const char *name;  // without "aclnn"
  Kernel kernel;
};
const std::vector<KernelRow> &kernel_rows();            // kernels.cpp
const std::vector<KernelRow> &float_kernel_rows();      // floats.cpp
const std::vector<KernelRow> &attention_kernel_rows();  // attention.cpp
const std::vector<KernelRow> &expert_kernel_rows();     // experts.cpp
const std::vector<KernelRow> &pick_kernel_rows();       // picks.cpp
Kernel find_kernel(const std::string &operator_name);  // null: the operator computes nothing

}  // namespace memprof_sim

struct aclOpExecutor {
  memprof_sim::Call call;
  memprof_sim::Kernel kernel = nullptr;
  bool repeatable = false;
};
