// Host kernels of products of matrices, in float32.
#include "kernels/matmul.h"

#include <algorithm>
#include <vector>

#include "kernels/arguments.h"
#include "kernels/dense_floats.h"
#include "kernels/table.h"
#include "kernels/tensor_view.h"

// Sums are rounded after each product, with the vectors of any machine: the same floats everywhere.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "fp-contract=off")
#endif
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
#define FOR_EACH_VECTOR_WIDTH __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_VECTOR_WIDTH
#endif

namespace memprof_sim {
namespace {

constexpr int64_t kTileRows = 4, kTileColumns = 32;

// c = a x b for a tile of c, whose sums stay in registers; the products of a sum are added in the
// order of k.
template <int64_t rows>
__attribute__((always_inline)) inline void multiply_tile(const float *a, const float *b, float *c,
                                                         int64_t n, int64_t k) {
  float sums[rows][kTileColumns] = {};
  for (int64_t step = 0; step < k; ++step)
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < kTileColumns; ++j) sums[i][j] += a[i * k + step] * b[step * n + j];
  for (int64_t i = 0; i < rows; ++i) std::copy(sums[i], sums[i] + kTileColumns, c + i * n);
}

// c (m x n, zeros) = a (m x k) x b (k x n)
FOR_EACH_VECTOR_WIDTH void multiply(const float *a, const float *b, float *c, int64_t m, int64_t n,
                                    int64_t k) {
  int64_t whole = n - n % kTileColumns;
  for (int64_t column = 0; column < whole; column += kTileColumns) {
    int64_t i = 0;
    for (; i + kTileRows <= m; i += kTileRows)
      multiply_tile<kTileRows>(a + i * k, b + column, c + i * n + column, n, k);
    for (; i < m; ++i) multiply_tile<1>(a + i * k, b + column, c + i * n + column, n, k);
  }
  for (int64_t i = 0; i < m; ++i)
    for (int64_t step = 0; step < k; ++step)
      for (int64_t j = whole; j < n; ++j) c[i * n + j] += a[i * k + step] * b[step * n + j];
}

// mm, matmul, bmm(self, other, out, cube type)
void product(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() == 3) multiply_matrices(*tensors[0], *tensors[1], *tensors[2], nullptr, 1, 0);
}

// addmm, baddbmm(self, left, right, beta, alpha, out, cube type), in place without out
void product_and_sum(Call &call) {
  auto tensors = tensors_of(call);
  Value beta = 1, alpha = 1;
  if (tensors.size() < 3 || !scalar_at(call, 3, &beta) || !scalar_at(call, 4, &alpha)) return;
  const aclTensor &out = tensors.size() == 3 ? *tensors[0] : *tensors[3];
  multiply_matrices(*tensors[1], *tensors[2], out, tensors[0], static_cast<float>(alpha),
                    static_cast<float>(beta));
}

constexpr KernelRow kRows[] = {
    {"Mm", product},
    {"Matmul", product},
    {"BatchMatMul", product},
    {"Addmm", product_and_sum},
    {"Baddbmm", product_and_sum},
    {"InplaceAddmm", product_and_sum},
    {"InplaceBaddbmm", product_and_sum},
};

}  // namespace

void multiply_matrices(aclTensor left, aclTensor right, aclTensor out, const aclTensor *addend,
                       float alpha, float beta) {
  if (right.shape.size() == 2 && !small(right)) floats_given_up = true;
  if (!usable(left) || !usable(right) || !usable(out) || left.shape.empty() || right.shape.empty())
    return;
  bool row = left.shape.size() == 1, column = right.shape.size() == 1;
  auto insert_axis = [](aclTensor &tensor, size_t from_end) {
    tensor.shape.insert(tensor.shape.end() - static_cast<int64_t>(from_end), 1);
    tensor.strides.insert(tensor.strides.end() - static_cast<int64_t>(from_end), 0);
  };
  if (row) insert_axis(left, 1);
  if (column) insert_axis(right, 0);
  if (column) insert_axis(out, 0);
  if (row) insert_axis(out, 1);
  size_t rank = out.shape.size();
  if (rank < 2 || left.shape.size() > rank || right.shape.size() > rank) return;
  int64_t m = out.shape[rank - 2], n = out.shape[rank - 1], k = left.shape.back();
  if (left.shape[left.shape.size() - 2] != m || right.shape.back() != n ||
      right.shape[right.shape.size() - 2] != k)
    return;
  if (addend && (!usable(*addend) || !broadcasts_to(*addend, out.shape))) return;
  std::vector<float> given;  // read first: out may be the addend
  if (addend && beta != 0) {
    given.reserve(static_cast<size_t>(element_count(out)));
    walk(out.shape, {addend}, [&](auto &, int64_t *index) {
      given.push_back(static_cast<float>(value_at(*addend, index[0])));
    });
  }
  auto batch_of =
      [](const aclTensor &tensor) {  // the leading axes: one element stands for a matrix
        aclTensor batch = tensor;
        batch.shape.resize(batch.shape.size() - 2);
        batch.strides.resize(batch.strides.size() - 2);
        return batch;
      };
  aclTensor lefts = batch_of(left), rights = batch_of(right), outs = batch_of(out);
  if (!broadcasts_to(lefts, outs.shape) || !broadcasts_to(rights, outs.shape)) return;
  auto matrix_at = [](const aclTensor &tensor, int64_t offset) {
    aclTensor matrix = tensor;
    matrix.offset = offset;
    matrix.shape.assign(tensor.shape.end() - 2, tensor.shape.end());
    matrix.strides.assign(tensor.strides.end() - 2, tensor.strides.end());
    return matrix;
  };
  std::vector<float> a, b, c;
  int64_t read = -1;  // the right matrix that `b` holds
  size_t next = 0;
  walk(outs.shape, {&outs, &lefts, &rights}, [&](auto &, int64_t *index) {
    read_floats(matrix_at(left, index[1]), &a);
    if (index[2] != read) read_floats(matrix_at(right, read = index[2]), &b);
    c.assign(static_cast<size_t>(m * n), 0);
    multiply(a.data(), b.data(), c.data(), m, n, k);
    if (addend)
      for (float &value : c) value = alpha * value + (given.empty() ? 0 : beta * given[next++]);
    write_floats(matrix_at(out, index[0]), c);
  });
}

KernelRows matmul_kernels() { return KernelRows(kRows); }

}  // namespace memprof_sim
