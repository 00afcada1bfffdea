// Host kernels of arithmetic, comparisons and choices element by element.
#include <algorithm>
#include <cmath>

#include "kernels/arguments.h"
#include "kernels/table.h"
#include "kernels/tensor_view.h"

namespace memprof_sim {
namespace {

using Binary = Value (*)(Value, Value, Value);  // left, right, alpha

Value add(Value a, Value b, Value alpha) { return a + alpha * b; }
Value subtract(Value a, Value b, Value alpha) { return a - alpha * b; }
Value reverse_subtract(Value a, Value b, Value alpha) { return b - alpha * a; }
Value multiply(Value a, Value b, Value) { return a * b; }
Value divide(Value a, Value b, Value) { return a / b; }
Value power(Value a, Value b, Value) { return std::pow(a, b); }
Value floor_divide(Value a, Value b, Value) { return b == 0 ? 0 : std::floor(a / b); }
Value remainder(Value a, Value b, Value) { return b == 0 ? 0 : a - b * std::floor(a / b); }
Value equal(Value a, Value b, Value) { return a == b; }
Value not_equal(Value a, Value b, Value) { return a != b; }
Value greater(Value a, Value b, Value) { return a > b; }
Value greater_equal(Value a, Value b, Value) { return a >= b; }
Value less(Value a, Value b, Value) { return a < b; }
Value less_equal(Value a, Value b, Value) { return a <= b; }
Value minimum(Value a, Value b, Value) { return std::min(a, b); }
Value maximum(Value a, Value b, Value) { return std::max(a, b); }
Value logical_and(Value a, Value b, Value) { return a != 0 && b != 0; }
Value logical_or(Value a, Value b, Value) { return a != 0 || b != 0; }
Value bit_and(Value a, Value b, Value) {
  return static_cast<Value>(static_cast<int64_t>(a) & static_cast<int64_t>(b));
}
Value bit_or(Value a, Value b, Value) {
  return static_cast<Value>(static_cast<int64_t>(a) | static_cast<int64_t>(b));
}

// op(self, other, [alpha], out), other a tensor or a scalar; in place when the name says so.
template <Binary operation>
void binary(Call &call) {
  bool in_place = call.name.rfind("Inplace", 0) == 0;
  auto tensors = tensors_of(call);
  if (call.arguments.size() < 2 || tensors.size() < (in_place ? 1u : 2u)) return;
  const aclTensor &left = *tensors[0], &out = in_place ? *tensors[0] : *tensors.back();
  aclTensor *right = tensor_at(call, 1);
  Value other = 0, alpha = 1;
  if (!right && !scalar_at(call, 1, &other)) return;
  scalar_at(call, 2, &alpha);
  if (float_result(out) || !usable(out) || !usable(left) || !broadcasts_to(left, out.shape)) return;
  if (right && (!usable(*right) || !broadcasts_to(*right, out.shape))) return;
  walk(out.shape, {&out, &left, right ? right : &left}, [&](auto &, int64_t *index) {
    Value second = right ? value_at(*right, index[2]) : other;
    set_value(out, index[0], operation(value_at(left, index[1]), second, alpha));
  });
}

// pow(base, self, out) with a base that is one number
void power_of_scalar(Call &call) {
  auto tensors = tensors_of(call);
  Value base = 0;
  if (tensors.size() != 2 || !scalar_at(call, 0, &base)) return;
  const aclTensor &in = *tensors[0], &out = *tensors[1];
  if (float_result(out) || !usable(in) || !usable(out) || in.shape != out.shape) return;
  walk(out.shape, {&out, &in}, [&](auto &, int64_t *index) {
    set_value(out, index[0], power(base, value_at(in, index[1]), 0));
  });
}

using Unary = Value (*)(Value, aclDataType);
Value negate(Value value, aclDataType) { return -value; }
Value absolute(Value value, aclDataType) { return std::fabs(value); }
Value logical_not(Value value, aclDataType) { return value == 0; }
Value is_finite(Value value, aclDataType) { return std::isfinite(value); }
Value bit_not(Value value, aclDataType type) {
  return type == ACL_BOOL ? Value(value == 0) : static_cast<Value>(~static_cast<int64_t>(value));
}

template <Unary operation>
void unary(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.empty() || tensors.size() > 2) return;
  const aclTensor &in = *tensors[0], &out = *tensors.back();
  if (float_result(out) || !usable(out) || !usable(in) || in.shape != out.shape) return;
  walk(out.shape, {&out, &in}, [&](auto &, int64_t *index) {
    set_value(out, index[0], operation(value_at(in, index[1]), out.type));
  });
}

// isclose(self, other, rtol, atol, equal_nan, out). What differs by its values alone is close where
// an operator of this process computed nothing: the engine checks consistency with it, and values
// that nobody computed are no sign of the opposite.
void is_close(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() != 3) return;
  const aclTensor &left = *tensors[0], &right = *tensors[1], &out = *tensors[2];
  if (!usable(left) || !usable(right) || !broadcasts_to(left, out.shape) ||
      !broadcasts_to(right, out.shape)) {
    Answering answering;
    return fill(out, 1);
  }
  bool nan_equal = flag_at(call, 2);
  bool unknown = values_missing.load(std::memory_order_relaxed) &&
                 !(is_integer(left.type) && is_integer(right.type));
  Value relative = call.real(0), absolute = call.real(1);
  if (unknown) {
    Answering answering;
    return fill(out, 1);
  }
  walk(out.shape, {&out, &left, &right}, [&](auto &, int64_t *index) {
    Value a = value_at(left, index[1]), b = value_at(right, index[2]);
    bool close = a == b ||
                 (std::isfinite(b) && std::fabs(a - b) <= absolute + relative * std::fabs(b)) ||
                 (nan_equal && std::isnan(a) && std::isnan(b));
    set_value(out, index[0], close);
  });
}

// where(condition, self, other, out)
void where(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() != 4 || !usable(*tensors[3])) return;
  for (int index = 0; index < 3; ++index)
    if (!usable(*tensors[index]) || !broadcasts_to(*tensors[index], tensors[3]->shape)) return;
  const aclTensor &condition = *tensors[0], &yes = *tensors[1], &no = *tensors[2],
                  &out = *tensors[3];
  walk(out.shape, {&out, &condition, &yes, &no}, [&](auto &, int64_t *index) {
    bool chosen = value_at(condition, index[1]) != 0;
    set_value(out, index[0], chosen ? value_at(yes, index[2]) : value_at(no, index[3]));
  });
}

// clamp(self, min, max, out); a null bound is absent.
void clamp(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() != 2 || !usable(*tensors[0]) || !usable(*tensors[1])) return;
  Value low = 0, high = 0;
  bool has_low = scalar_at(call, 1, &low), has_high = scalar_at(call, 2, &high);
  const aclTensor &in = *tensors[0], &out = *tensors[1];
  if (in.shape != out.shape) return;
  walk(out.shape, {&out, &in}, [&](auto &, int64_t *index) {
    Value value = value_at(in, index[1]);
    if (has_low) value = std::max(value, low);
    if (has_high) value = std::min(value, high);
    set_value(out, index[0], value);
  });
}

constexpr KernelRow kRows[] = {
    {"Add", binary<add>},
    {"Adds", binary<add>},
    {"InplaceAdd", binary<add>},
    {"InplaceAdds", binary<add>},
    {"Sub", binary<subtract>},
    {"Subs", binary<subtract>},
    {"InplaceSub", binary<subtract>},
    {"InplaceSubs", binary<subtract>},
    {"Rsubs", binary<reverse_subtract>},
    {"Mul", binary<multiply>},
    {"Muls", binary<multiply>},
    {"InplaceMul", binary<multiply>},
    {"InplaceMuls", binary<multiply>},
    {"Div", binary<divide>},
    {"Divs", binary<divide>},
    {"InplaceDiv", binary<divide>},
    {"InplaceDivs", binary<divide>},
    {"PowTensorScalar", binary<power>},
    {"PowTensorTensor", binary<power>},
    {"PowScalarTensor", power_of_scalar},
    {"InplacePowTensorScalar", binary<power>},
    {"FloorDivide", binary<floor_divide>},
    {"FloorDivides", binary<floor_divide>},
    {"InplaceFloorDivide", binary<floor_divide>},
    {"InplaceFloorDivides", binary<floor_divide>},
    {"RemainderTensorTensor", binary<remainder>},
    {"RemainderTensorScalar", binary<remainder>},
    {"InplaceRemainderTensorTensor", binary<remainder>},
    {"InplaceRemainderTensorScalar", binary<remainder>},
    {"EqTensor", binary<equal>},
    {"EqScalar", binary<equal>},
    {"NeTensor", binary<not_equal>},
    {"NeScalar", binary<not_equal>},
    {"GtTensor", binary<greater>},
    {"GtScalar", binary<greater>},
    {"GeTensor", binary<greater_equal>},
    {"GeScalar", binary<greater_equal>},
    {"LtTensor", binary<less>},
    {"LtScalar", binary<less>},
    {"LeTensor", binary<less_equal>},
    {"LeScalar", binary<less_equal>},
    {"Minimum", binary<minimum>},
    {"Maximum", binary<maximum>},
    {"LogicalAnd", binary<logical_and>},
    {"LogicalOr", binary<logical_or>},
    {"BitwiseAndTensor", binary<bit_and>},
    {"BitwiseAndScalar", binary<bit_and>},
    {"BitwiseOrTensor", binary<bit_or>},
    {"BitwiseOrScalar", binary<bit_or>},
    {"InplaceBitwiseAndTensor", binary<bit_and>},
    {"InplaceBitwiseOrTensor", binary<bit_or>},
    {"LogicalNot", unary<logical_not>},
    {"InplaceLogicalNot", unary<logical_not>},
    {"BitwiseNot", unary<bit_not>},
    {"Neg", unary<negate>},
    {"Abs", unary<absolute>},
    {"IsFinite", unary<is_finite>},
    {"IsClose", is_close},
    {"Clamp", clamp},
    {"ClampMin", clamp},
    {"SWhere", where},
};

}  // namespace

KernelRows elementwise_kernels() { return KernelRows(kRows); }

}  // namespace memprof_sim
