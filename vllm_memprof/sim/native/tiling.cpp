// Workspace by shapes. Read in CANN's open operator library (ops-nn, August 2026); each function
// names its source.
#include "tiling.h"

#include <algorithm>
#include <iterator>

#include "acl.h"
#include "profile.h"
#include "tensor.h"

namespace memprof_sim {
namespace {

constexpr uint64_t kHalfBytes = 2;  // float16 and bfloat16: only they are converted below 65,535
constexpr uint64_t kRows = 16, kColumns = 32 / kHalfBytes;  // a block of the fractal format

uint64_t align(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

struct Matrix {
  uint64_t rows = 1, columns = 0;
  bool transposed = false;  // its rows are the inner axis in memory
  bool fractal = false;     // it is stored in the format NZ already

  uint64_t inner() const { return transposed ? rows : columns; }

  // Of its copy in the format NZ. (MatmulV3BaseTiling::CalcNd2nzWorkspace)
  uint64_t fractal_bytes() const {
    uint64_t outer = transposed ? columns : rows;
    return align(outer, kRows) * align(inner(), kColumns) * kHalfBytes;
  }

  // The cube unit reads these rows as they are. (MatmulV3BaseTiling::GetMoreArgs)
  bool read_as_it_is() const {
    static constexpr uint64_t kReadable[] = {32, 64, 96, 128, 160, 192, 224, 256, 384};
    uint64_t bytes = inner() * kHalfBytes;
    bool listed =
        std::find(std::begin(kReadable), std::end(kReadable), bytes) != std::end(kReadable);
    return fractal || listed || (bytes % 256 == 0 && inner() <= 65535);
  }
};

// Every axis but the last is one of the rows; false for a batch of transposed matrices.
bool as_matrix(const aclTensor &tensor, Matrix *matrix) {
  size_t axes = tensor.shape.size();
  if (axes < 2 || tensor.strides.size() != axes || element_bytes(tensor.type) != kHalfBytes)
    return false;
  for (size_t axis = 0; axis + 1 < axes; ++axis)
    matrix->rows *= static_cast<uint64_t>(std::max<int64_t>(tensor.shape[axis], 0));
  matrix->columns = static_cast<uint64_t>(std::max<int64_t>(tensor.shape[axes - 1], 0));
  matrix->transposed = tensor.strides[axes - 1] != 1 && tensor.strides[axes - 2] == 1;
  matrix->fractal = tensor.format == ACL_FORMAT_FRACTAL_NZ;
  return axes == 2 || !matrix->transposed;
}

// A right matrix whose addresses meet in the same memory channels is converted too.
// (matmul_v3_base_tiling.cpp, GetNd2nzA and GetNd2nzB: both decide about the right one)
bool channels_conflict(const Matrix &left, const Matrix &right) {
  uint64_t m = left.rows, k = left.columns, n = right.columns;
  bool many_cores = profile().ai_core_count >= 24;
  if (right.fractal) return false;
  if (!right.transposed)
    return n % 16384 == 0 && (m > 4096 || (m == 4096 && many_cores)) && k >= 6656;
  return !left.transposed && k == 16384 && m >= 4096 && m <= 4480 && n >= 7168 && many_cores;
}

// mat_mul_v3: copies in the format NZ of matrices whose rows are not whole units of 256 bytes.
// Up to 256 columns of the left one other ways of the same operator do without; splitting over the
// columns, which needs 4 bytes for each result, is not modelled: it begins at 27,392 of them.
uint64_t matmul_copies(const std::string &name, const std::vector<const aclTensor *> &tensors) {
  size_t first = glob_match("*ddmm*", name.c_str()) ? 1 : 0;  // its first tensor is the one to add
  Matrix left, right;
  if (tensors.size() < first + 2 || tensors[first + 1]->shape.size() != 2 ||
      !as_matrix(*tensors[first], &left) || !as_matrix(*tensors[first + 1], &right))
    return 0;
  if (left.columns <= 256 || left.columns != right.rows) return 0;
  uint64_t bytes = left.read_as_it_is() ? 0 : left.fractal_bytes();
  if (!right.read_as_it_is() || channels_conflict(left, right)) bytes += right.fractal_bytes();
  return bytes;
}

}  // namespace

uint64_t tiling_workspace_bytes(const std::string &tiling, const std::string &operator_name,
                                const std::vector<const aclTensor *> &tensors) {
  return tiling == "matmul_v3" ? matmul_copies(operator_name, tensors) : 0;
}

}  // namespace memprof_sim
