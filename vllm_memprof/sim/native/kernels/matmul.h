// The product of matrices that expert layers share with dense ones.
#pragma once

#include "tensor.h"

namespace memprof_sim {

// out[..., m, n] = left[..., m, k] x right[..., k, n], leading axes broadcast; a vector is a matrix
// of one row or column. With an addend: beta x addend + alpha x the product. Computed for small
// tensors.
void multiply_matrices(aclTensor left, aclTensor right, aclTensor out, const aclTensor *addend,
                       float alpha, float beta);

}  // namespace memprof_sim
