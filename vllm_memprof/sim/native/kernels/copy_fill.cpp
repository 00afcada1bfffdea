// Host kernels that copy, fill and lay out tensors.
#include <algorithm>
#include <iterator>
#include <vector>

#include "kernels/arguments.h"
#include "kernels/dense_floats.h"
#include "kernels/selection.h"
#include "kernels/table.h"
#include "kernels/tensor_view.h"

namespace memprof_sim {
namespace {

void copy_in_place(Call &call) {
  aclTensor *target = tensor_at(call, 0), *source = tensor_at(call, 1);
  if (target && source) copy(*target, *source);
}

// cast(self, type, out) and other copies whose result comes last.
void copy_to_last(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() == 2) copy(*tensors[1], *tensors[0]);
}

// foreach_copy(sources, targets)
void copy_each(Call &call) {
  const std::vector<aclTensor> *sources = list_at(call, 0), *targets = list_at(call, 1);
  if (!sources || !targets || sources->size() != targets->size()) return;
  for (size_t index = 0; index < sources->size(); ++index)
    copy((*targets)[index], (*sources)[index]);
}

void fill_scalar(Call &call) {
  Value value = 0;
  aclTensor *target = tensor_at(call, 0);
  if (target && scalar_at(call, 1, &value)) fill(*target, value);
}

void fill_zero(Call &call) {
  if (aclTensor *target = tensor_at(call, 0)) fill(*target, 0);
}

void fill_one(Call &call) {
  if (aclTensor *target = tensor_at(call, 0)) fill(*target, 1);
}

void masked_fill(Call &call) {
  Value value = 0;
  aclTensor *target = tensor_at(call, 0), *mask = tensor_at(call, 1);
  if (!target || !mask || !scalar_at(call, 2, &value) || !usable(*target) || !addressable(*mask))
    return;
  if (!broadcasts_to(*mask, target->shape)) return;
  walk(target->shape, {target, mask}, [&](auto &, int64_t *index) {
    if (value_at(*mask, index[1]) != 0) set_value(*target, index[0], value);
  });
}

// uniform(self, from, to, seed, offset) in place. Numbers from 0 to 1 that random orders are made
// of, tokens by experts, lie evenly in each row, and each column has all of them in turn. Those
// with fewer rows than columns are zeros: torch_npu makes the noise of sampling, requests by
// vocabulary, from them, and where that is the same everywhere the likeliest token is taken. Other
// ranges, those of weights that are not read from files, are zeros too.
void uniform(Call &call) {
  aclTensor *target = tensor_at(call, 0);
  if (!target || is_integer(target->type) || element_count(*target) == 0) return;
  bool of_weights = call.real(0) != 0 || call.real(1) != 1;
  int64_t width = target->shape.empty() ? 1 : target->shape.back(), step = even_step(width);
  if (!of_weights && taken_out("random")) return;
  if (of_weights || element_count(*target) / width < width) {
    Answering answering;
    return fill(*target, 0);
  }
  if (!usable(*target)) return;
  Answering answering;
  std::vector<float> row, values;
  for (int64_t at = 0; at < width; ++at)
    row.push_back(static_cast<float>((static_cast<Value>(at * step % width) + 0.5L) /
                                     static_cast<Value>(width)));
  for (int64_t start = 0; start < element_count(*target) / width; ++start)  // each by one further
    std::rotate_copy(row.begin(), row.begin() + start % width, row.end(),
                     std::back_inserter(values));
  write_floats(*target, values);
}

// arange(start, end, step, out)
void arange(Call &call) {
  Value start = 0, step = 1;
  aclTensor *out = tensor_at(call, 3);
  if (!out || !scalar_at(call, 0, &start) || !scalar_at(call, 2, &step) || !usable(*out)) return;
  int64_t done = 0;
  walk(out->shape, {out}, [&](auto &, int64_t *index) {
    set_value(*out, index[0], start + step * static_cast<Value>(done++));
  });
}

// triu, tril(self, diagonal, out), in place without out
template <bool upper>
void triangle(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.empty() || tensors.size() > 2 || call.arguments.size() < 2) return;
  const aclTensor &in = *tensors[0], &out = *tensors.back();
  int64_t diagonal = static_cast<int64_t>(call.arguments[1].word);
  if (!usable(in) || !usable(out) || in.shape != out.shape || in.shape.size() < 2) return;
  walk(out.shape, {&out, &in}, [&](auto &position, int64_t *index) {
    int64_t above = position.back() - position[position.size() - 2] - diagonal;
    bool kept = upper ? above >= 0 : above <= 0;
    set_value(out, index[0], kept ? value_at(in, index[1]) : 0);
  });
}

// flip(self, dims, out)
void flip(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() != 2 || call.arguments.size() < 2 ||
      call.arguments[1].kind != Kind::kIntArray || !addressable(*tensors[0]))
    return;
  aclTensor source = *tensors[0];
  for (int64_t dim : call.arguments[1].integers) {
    size_t axis =
        static_cast<size_t>(dim < 0 ? dim + static_cast<int64_t>(source.shape.size()) : dim);
    if (axis >= source.shape.size()) return;
    source.offset += (source.shape[axis] - 1) * source.strides[axis];
    source.strides[axis] = -source.strides[axis];
  }
  copy(*tensors[1], source);
}

// cat(tensors, dim, out) and stack(tensors, dim, out)
void concatenate(Call &call) {
  const std::vector<aclTensor> *list = list_at(call, 0);
  auto tensors = tensors_of(call);
  if (!list || tensors.size() != 1 || call.arguments.size() < 3 || !usable(*tensors[0])) return;
  const aclTensor &out = *tensors[0];
  int64_t dim = static_cast<int64_t>(call.arguments[1].word),
          rank = static_cast<int64_t>(out.shape.size());
  if (dim < 0) dim += rank;
  if (dim < 0 || dim >= rank) return;
  size_t axis = static_cast<size_t>(dim);
  int64_t start = 0;
  for (const aclTensor &part : *list) {
    if (element_count(part) == 0) continue;
    aclTensor source = part, slice = out;
    if (call.name == "Stack") {
      source.shape.insert(source.shape.begin() + dim, 1);
      source.strides.insert(source.strides.begin() + dim, 0);
    }
    if (source.shape.size() != out.shape.size()) return;
    slice.shape[axis] = source.shape[axis];
    slice.offset += start * out.strides[axis];
    start += source.shape[axis];
    if (start > out.shape[axis]) return;
    copy(slice, source);
  }
}

// repeat(self, repeats, out)
void repeat(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() != 2 || !usable(*tensors[0]) || !usable(*tensors[1]) ||
      tensors[0]->shape.size() > tensors[1]->shape.size())
    return;
  const aclTensor &in = *tensors[0], &out = *tensors[1];
  size_t missing = out.shape.size() - in.shape.size();
  if (element_count(in) == 0) return;
  bool lines = !in.shape.empty() && in.type == out.type && in.strides.back() == 1 &&
               out.strides.back() == 1 && out.shape.back() % in.shape.back() == 0;
  int64_t line = lines ? in.shape.back() : 1;
  aclTensor blocks = out;
  if (lines) {  // the last axis in steps of a whole line of `in`
    blocks.shape.back() /= line;
    blocks.strides.back() = line;
  }
  walk(blocks.shape, {&blocks}, [&](auto &position, int64_t *index) {
    int64_t at = in.offset;
    for (size_t axis = 0; axis + (lines ? 1 : 0) < in.shape.size(); ++axis)
      at += position[missing + axis] % in.shape[axis] * in.strides[axis];
    if (lines) return copy_line(out, index[0], in, at, line);
    set_value(out, index[0], value_at(in, at));
  });
}

// repeat_interleave: (self, repeats, dim, size, out) with `repeats` a number, or without the dim.
void repeat_interleave(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() != 2 || !usable(*tensors[0]) || !usable(*tensors[1]) ||
      call.arguments.size() < 3)
    return;
  const aclTensor &in = *tensors[0], &out = *tensors[1];
  if (in.shape.size() != 1 || out.shape.size() != 1) return;
  int64_t times = static_cast<int64_t>(call.arguments[1].word);
  if (times <= 0 || out.shape[0] != in.shape[0] * times) return;
  walk(out.shape, {&out}, [&](auto &position, int64_t *index) {
    set_value(out, index[0], value_at(in, in.offset + position[0] / times * in.strides[0]));
  });
}

constexpr KernelRow kRows[] = {
    {"InplaceCopy", copy_in_place},
    {"Cast", copy_to_last},
    {"ForeachCopy", copy_each},
    {"InplaceFillScalar", fill_scalar},
    {"InplaceFillTensor", copy_in_place},
    {"InplaceZero", fill_zero},
    {"InplaceOne", fill_one},
    {"InplaceMaskedFillScalar", masked_fill},
    {"InplaceUniform", uniform},
    {"InplaceUniformTensor", uniform},
    {"Arange", arange},
    {"Range", arange},
    {"Triu", triangle<true>},
    {"Tril", triangle<false>},
    {"InplaceTriu", triangle<true>},
    {"InplaceTril", triangle<false>},
    {"Cat", concatenate},
    {"Stack", concatenate},
    {"Repeat", repeat},
    {"RepeatInterleaveInt", repeat_interleave},
    {"RepeatInterleaveIntWithDim", repeat_interleave},
    {"Flip", flip},
};

}  // namespace

KernelRows copy_fill_kernels() { return KernelRows(kRows); }

}  // namespace memprof_sim
