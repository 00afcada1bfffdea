// Which operators compute on the host, and by which kernel.
#pragma once

#include <cstddef>
#include <string>

#include "tensor.h"

namespace memprof_sim {

using Kernel = void (*)(Call &call);

Kernel find_kernel(const std::string &operator_name);  // null: the operator computes nothing

struct KernelRow {
  const char *name;  // without "aclnn"
  Kernel kernel;
};

// The rows of one file; they live as long as the program.
class KernelRows {
 public:
  template <size_t count>
  explicit constexpr KernelRows(const KernelRow (&rows)[count])
      : begin_(rows), end_(rows + count) {}
  const KernelRow *begin() const { return begin_; }
  const KernelRow *end() const { return end_; }

 private:
  const KernelRow *begin_, *end_;
};

// What steers the engine.
KernelRows copy_fill_kernels();
KernelRows elementwise_kernels();
KernelRows expert_routing_kernels();
KernelRows indexing_kernels();
KernelRows reduction_kernels();
KernelRows selection_kernels();
// The layers of a network. They rest once a product of matrices was too large to compute.
KernelRows activation_kernels();
KernelRows attention_kernels();
KernelRows expert_kernels();
KernelRows matmul_kernels();
KernelRows normalization_kernels();

}  // namespace memprof_sim
