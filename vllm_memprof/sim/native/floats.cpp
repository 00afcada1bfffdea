// Host kernels of a network's layers, on tensors up to host_compute_bytes: functions element by element, products of matrices,
// norms, softmax, gated activations. They compute in float32, whatever the type of the tensors, and round once, at the end.
#include "experts.h"
#include "float_rows.h"

// Sums are rounded after each product, with the vectors of any machine: the same floats everywhere.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "fp-contract=off")
#define FOR_EACH_VECTOR_WIDTH __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_VECTOR_WIDTH
#endif

namespace memprof_sim {
namespace {

// ---- element by element ----

using Function = double (*)(double);

double reciprocal(double x) { return 1 / x; }
double reciprocal_root(double x) { return 1 / std::sqrt(x); }
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double silu(double x) { return x / (1 + std::exp(-x)); }
double relu(double x) { return x > 0 || std::isnan(x) ? x : 0; }
double gelu(double x) { return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0))); }
double gelu_tanh(double x) { return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }
double fast_gelu(double x) { return x / (1 + std::exp(-1.702 * x)); }
double exponential(double x) { return std::exp(x); }
double logarithm(double x) { return std::log(x); }
double root(double x) { return std::sqrt(x); }
double sine(double x) { return std::sin(x); }
double cosine(double x) { return std::cos(x); }
double hyperbolic_tangent(double x) { return std::tanh(x); }
double square(double x) { return x * x; }
double round_down(double x) { return std::floor(x); }
double round_up_whole(double x) { return std::ceil(x); }

// op(self, ..., out); in place when there is one tensor.
template <Function function>
void apply(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.empty() || tensors.size() > 2) return;
  const aclTensor &in = *tensors[0], &out = *tensors.back();
  if (!usable(out) || !usable(in) || in.shape != out.shape) return;
  walk(out.shape, {&out, &in}, [&](auto &, int64_t *index) {
    store(element(out, index[0]), out.type, function(static_cast<double>(load(element(in, index[1]), in.type))));
  });
}

// gelu_v2(self, approximate, out)
void gelu_either(Call &call) {
  if (call.arguments.size() < 2 || call.arguments[1].kind != Kind::kNone) return;
  (call.arguments[1].word & 0xff ? apply<gelu_tanh> : apply<gelu>)(call);
}

// ---- products of matrices ----

constexpr int64_t kTileRows = 4, kTileColumns = 32;

// c = a x b for a tile of c, whose sums stay in registers; the products of a sum are added in the order of k.
template <int64_t rows>
__attribute__((always_inline)) inline void multiply_tile(const float *a, const float *b, float *c, int64_t n, int64_t k) {
  float sums[rows][kTileColumns] = {};
  for (int64_t step = 0; step < k; ++step)
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < kTileColumns; ++j) sums[i][j] += a[i * k + step] * b[step * n + j];
  for (int64_t i = 0; i < rows; ++i) std::copy(sums[i], sums[i] + kTileColumns, c + i * n);
}

// c (m x n, zeros) = a (m x k) x b (k x n)
FOR_EACH_VECTOR_WIDTH void multiply(const float *a, const float *b, float *c, int64_t m, int64_t n, int64_t k) {
  int64_t whole = n - n % kTileColumns;
  for (int64_t column = 0; column < whole; column += kTileColumns) {
    int64_t i = 0;
    for (; i + kTileRows <= m; i += kTileRows) multiply_tile<kTileRows>(a + i * k, b + column, c + i * n + column, n, k);
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
  multiply_matrices(*tensors[1], *tensors[2], out, tensors[0], static_cast<float>(alpha), static_cast<float>(beta));
}

// ---- norms ----

// Rows of the last axes that `gamma` spans: y = x / sqrt(mean(x^2) + epsilon) x gamma [+ beta]. `reciprocals` may be null.
void normalize_rows(std::vector<float> &values, const std::vector<float> &gamma, const std::vector<float> &beta, double epsilon,
                    std::vector<float> *reciprocals) {
  size_t width = gamma.size();
  for (size_t start = 0; start + width <= values.size(); start += width) {
    float *row = values.data() + start;
    float squares = 0;
    for (size_t at = 0; at < width; ++at) squares += row[at] * row[at];
    float factor = 1 / std::sqrt(squares / static_cast<float>(width) + static_cast<float>(epsilon));
    if (reciprocals) reciprocals->push_back(factor);
    for (size_t at = 0; at < width; ++at) row[at] = row[at] * factor * gamma[at] + (beta.empty() ? 0 : beta[at]);
  }
}

bool rows_of(const aclTensor &in, const aclTensor &gamma) {
  int64_t width = element_count(gamma);
  return width > 0 && !in.shape.empty() && element_count(in) % width == 0;
}

// rms_norm(x, gamma, epsilon, y, rstd), gemma_rms_norm with 1 + gamma
void rms_norm(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() != 4) return;
  const aclTensor &x = *tensors[0], &weight = *tensors[1], &y = *tensors[2], &rstd = *tensors[3];
  if (!usable(x) || !usable(weight) || !usable(y) || x.shape != y.shape || !rows_of(x, weight)) return;
  std::vector<float> values, gamma, reciprocals;
  read_floats(x, &values);
  read_floats(weight, &gamma);
  if (call.name == "GemmaRmsNorm")
    for (float &each : gamma) each += 1;
  normalize_rows(values, gamma, {}, call.real(0), &reciprocals);
  write_floats(y, values);
  if (usable(rstd) && element_count(rstd) == static_cast<int64_t>(reciprocals.size())) write_floats(rstd, reciprocals);
}

// add_rms_norm(x1, x2, gamma, epsilon, y, rstd, x), add_rms_norm_bias(x1, x2, gamma, beta or null, epsilon, y, rstd, x): x = x1 + x2, y its norm
void add_rms_norm(Call &call) {
  auto tensors = tensors_of(call);
  bool biased = tensors.size() == 7;
  if (tensors.size() != 6 && !biased) return;
  size_t results = biased ? 4 : 3;
  const aclTensor &first = *tensors[0], &second = *tensors[1], &weight = *tensors[2];
  const aclTensor &y = *tensors[results], &rstd = *tensors[results + 1], &sum = *tensors[results + 2];
  for (const aclTensor *tensor : {&first, &second, &weight, &y, &sum})
    if (!usable(*tensor)) return;
  if (first.shape != second.shape || first.shape != y.shape || first.shape != sum.shape || !rows_of(first, weight)) return;
  std::vector<float> values, others, gamma, beta, reciprocals;
  read_floats(first, &values);
  read_floats(second, &others);
  read_floats(weight, &gamma);
  if (biased) {
    if (!usable(*tensors[3]) || element_count(*tensors[3]) != element_count(weight)) return;
    read_floats(*tensors[3], &beta);
  }
  for (size_t at = 0; at < values.size(); ++at) values[at] += others[at];
  write_floats(sum, values);
  normalize_rows(values, gamma, beta, call.real(0), &reciprocals);
  write_floats(y, values);
  if (usable(rstd) && element_count(rstd) == static_cast<int64_t>(reciprocals.size())) write_floats(rstd, reciprocals);
}

// layer_norm(x, normalized shape, weight or null, bias or null, epsilon, y, mean, rstd)
void layer_norm(Call &call) {
  aclTensor *x = tensor_at(call, 0), *weight = tensor_at(call, 2), *bias = tensor_at(call, 3), *y = tensor_at(call, 4);
  if (!x || !y || call.arguments[1].kind != Kind::kIntArray || !usable(*x) || !usable(*y) || x->shape != y->shape) return;
  int64_t width = 1;
  for (int64_t extent : call.arguments[1].integers) width *= extent;
  if (width <= 0 || element_count(*x) % width) return;
  std::vector<float> values, gamma, beta;
  for (auto [tensor, into] : {std::pair(weight, &gamma), std::pair(bias, &beta)}) {
    if (!tensor) continue;
    if (!usable(*tensor) || element_count(*tensor) != width) return;
    read_floats(*tensor, into);
  }
  read_floats(*x, &values);
  size_t count = static_cast<size_t>(width);
  for (size_t start = 0; start < values.size(); start += count) {
    float *row = values.data() + start;
    double sum = 0, squares = 0;
    for (size_t at = 0; at < count; ++at) sum += row[at];
    double mean = sum / static_cast<double>(count);
    for (size_t at = 0; at < count; ++at) squares += (row[at] - mean) * (row[at] - mean);
    double factor = 1 / std::sqrt(squares / static_cast<double>(count) + call.real(0));
    for (size_t at = 0; at < count; ++at)
      row[at] = static_cast<float>((row[at] - mean) * factor * (gamma.empty() ? 1 : gamma[at]) + (beta.empty() ? 0 : beta[at]));
  }
  write_floats(*y, values);
}

// ---- along one axis ----

// softmax, log_softmax(self, dim, out)
template <bool logarithmic>
void softmax(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() != 2 || call.arguments.size() < 3) return;
  const aclTensor &in = *tensors[0], &out = *tensors[1];
  size_t axis = 0;
  if (!usable(in) || !usable(out) || in.shape != out.shape || !axis_of(call, 1, in, &axis)) return;
  for_lines(in, out, axis, [&](std::vector<float> &line) {
    float largest = *std::max_element(line.begin(), line.end());
    double sum = 0;
    for (float value : line) sum += std::exp(static_cast<double>(value) - largest);
    for (float &value : line)
      value = static_cast<float>(logarithmic ? value - largest - std::log(sum) : std::exp(static_cast<double>(value) - largest) / sum);
  });
}

// swiglu(x, dim, out): silu of the first half times the second
void swiglu(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() != 2 || call.arguments.size() < 3) return;
  const aclTensor &in = *tensors[0], &out = *tensors[1];
  size_t axis = 0;
  if (!usable(in) || !usable(out) || in.shape.size() != out.shape.size() || !axis_of(call, 1, in, &axis)) return;
  aclTensor gate = in, up = in;
  if (in.shape[axis] != 2 * out.shape[axis]) return;
  gate.shape[axis] = up.shape[axis] = out.shape[axis];
  up.offset += out.shape[axis] * in.strides[axis];
  if (gate.shape != out.shape) return;
  std::vector<float> gates, ups;
  read_floats(gate, &gates);
  read_floats(up, &ups);
  for (size_t at = 0; at < gates.size(); ++at) gates[at] = gates[at] / (1 + std::exp(-gates[at])) * ups[at];
  write_floats(out, gates);
}

// ---- random numbers ----

// exponential(self, ...) in place. Nothing is drawn: with noise of one, sampling picks the likeliest token.
void exponential_noise(Call &call) {
  if (aclTensor *target = tensor_at(call, 0)) fill(*target, 1);
}

}  // namespace

void multiply_matrices(aclTensor left, aclTensor right, aclTensor out, const aclTensor *addend, float alpha, float beta) {
  if (right.shape.size() == 2 && !small(right)) floats_given_up = true;
  if (!usable(left) || !usable(right) || !usable(out) || left.shape.empty() || right.shape.empty()) return;
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
  if (left.shape[left.shape.size() - 2] != m || right.shape.back() != n || right.shape[right.shape.size() - 2] != k) return;
  if (addend && (!usable(*addend) || !broadcasts_to(*addend, out.shape))) return;
  std::vector<float> given;  // read first: out may be the addend
  if (addend && beta != 0) {
    given.reserve(static_cast<size_t>(element_count(out)));
    walk(out.shape, {addend}, [&](auto &, int64_t *index) { given.push_back(static_cast<float>(load(element(*addend, index[0]), addend->type))); });
  }
  auto batch_of = [](const aclTensor &tensor) {  // the leading axes: one element stands for a matrix
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

const std::vector<KernelRow> &float_kernel_rows() {
  static const auto *rows = new std::vector<KernelRow>{
      {"Reciprocal", apply<reciprocal>},
      {"Rsqrt", apply<reciprocal_root>},
      {"Sqrt", apply<root>},
      {"Sigmoid", apply<sigmoid>},
      {"Silu", apply<silu>},
      {"Relu", apply<relu>},
      {"Gelu", apply<gelu>},
      {"GeluV2", gelu_either},
      {"FastGelu", apply<fast_gelu>},
      {"Exp", apply<exponential>},
      {"Log", apply<logarithm>},
      {"Sin", apply<sine>},
      {"Cos", apply<cosine>},
      {"Tanh", apply<hyperbolic_tangent>},
      {"Square", apply<square>},
      {"Floor", apply<round_down>},
      {"Ceil", apply<round_up_whole>},
      {"InplaceReciprocal", apply<reciprocal>},
      {"InplaceRsqrt", apply<reciprocal_root>},
      {"InplaceSqrt", apply<root>},
      {"InplaceSigmoid", apply<sigmoid>},
      {"InplaceExp", apply<exponential>},
      {"InplaceLog", apply<logarithm>},
      {"Mm", product},
      {"Matmul", product},
      {"BatchMatMul", product},
      {"Addmm", product_and_sum},
      {"Baddbmm", product_and_sum},
      {"InplaceAddmm", product_and_sum},
      {"InplaceBaddbmm", product_and_sum},
      {"RmsNorm", rms_norm},
      {"GemmaRmsNorm", rms_norm},
      {"AddRmsNorm", add_rms_norm},
      {"AddRmsNormBias", add_rms_norm},
      {"LayerNorm", layer_norm},
      {"Softmax", softmax<false>},
      {"LogSoftmax", softmax<true>},
      {"SwiGlu", swiglu},
      {"InplaceExponential", exponential_noise},
  };
  return *rows;
}

}  // namespace memprof_sim
