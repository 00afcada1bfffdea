// Host kernels that read and write elements by index.
#include <algorithm>
#include <string>
#include <vector>

#include "kernels/arguments.h"
#include "kernels/table.h"
#include "kernels/tensor_view.h"

namespace memprof_sim {
namespace {

// The element index that self[i0, i1, ...] means at `position` of the broadcast index shape; -1
// when out of range.
struct Indexing {
  const aclTensor *self = nullptr;
  std::vector<const aclTensor *> indices;  // one per leading axis
  std::vector<int64_t> shape;              // of the indices, broadcast

  bool prepare(const aclTensor &target, const std::vector<aclTensor> &list) {
    self = &target;
    for (const aclTensor &index : list) {
      if (!index.data || (index.type != ACL_INT64 && index.type != ACL_INT32) || !usable(index))
        return false;  // masks and gaps are not computed
      indices.push_back(&index);
      if (index.shape.size() > shape.size())
        shape.insert(shape.begin(), index.shape.size() - shape.size(), 1);
      size_t missing = shape.size() - index.shape.size();
      for (size_t axis = 0; axis < index.shape.size(); ++axis)
        shape[missing + axis] = std::max(shape[missing + axis], index.shape[axis]);
    }
    if (indices.empty() || indices.size() > target.shape.size()) return false;
    for (const aclTensor *index : indices)
      if (!broadcasts_to(*index, shape)) return false;
    return true;
  }

  int64_t resolve(const std::vector<int64_t> &position) const {
    int64_t at = self->offset;
    for (size_t axis = 0; axis < indices.size(); ++axis) {
      const aclTensor &index = *indices[axis];
      int64_t offset = index.offset;
      size_t missing = shape.size() - index.shape.size();
      for (size_t dim = 0; dim < index.shape.size(); ++dim)
        if (index.shape[dim] != 1) offset += position[missing + dim] * index.strides[dim];
      int64_t value = static_cast<int64_t>(value_at(index, offset));
      if (value < 0) value += self->shape[axis];
      if (value < 0 || value >= self->shape[axis]) return -1;
      at += value * self->strides[axis];
    }
    for (size_t axis = indices.size(); axis < self->shape.size(); ++axis)
      at += position[shape.size() + axis - indices.size()] * self->strides[axis];
    return at;
  }

  std::vector<int64_t> result_shape() const {
    std::vector<int64_t> result = shape;
    result.insert(result.end(), self->shape.begin() + static_cast<int64_t>(indices.size()),
                  self->shape.end());
    return result;
  }
};

// index(self, indices, out)
void index_get(Call &call) {
  auto tensors = tensors_of(call);
  const std::vector<aclTensor> *list = list_at(call, 1);
  Indexing indexing;
  if (!list || tensors.size() != 2 || !usable(*tensors[1]) || !addressable(*tensors[0]) ||
      !indexing.prepare(*tensors[0], *list))
    return;
  const aclTensor &self = *tensors[0], &out = *tensors[1];
  if (out.shape != indexing.result_shape()) return;
  bool lines = self.type == out.type && indexing.indices.size() < self.shape.size();
  int64_t line = lines ? line_length(out, self) : 1;
  std::vector<int64_t> starts = out.shape;
  if (line > 1) starts.back() = 1;
  walk(starts, {&out}, [&](auto &position, int64_t *index) {
    int64_t at = indexing.resolve(position);
    if (at < 0) return;
    if (line > 1) return copy_line(out, index[0], self, at, line);
    set_value(out, index[0], value_at(self, at));
  });
}

// index_put(self, indices, values, accumulate, unsafe)
void index_put(Call &call) {
  auto tensors = tensors_of(call);
  const std::vector<aclTensor> *list = list_at(call, 1);
  Indexing indexing;
  if (!list || tensors.size() != 2 || call.arguments.size() < 4 || !is_plain(tensors[0]->type) ||
      !addressable(*tensors[0]))
    return;
  if (!usable(*tensors[1]) || !indexing.prepare(*tensors[0], *list)) return;
  const aclTensor &self = *tensors[0], &values = *tensors[1];
  std::vector<int64_t> shape = indexing.result_shape();
  bool accumulate = call.arguments[3].word & 1;
  uint64_t count = 1;
  for (int64_t extent : shape) count *= static_cast<uint64_t>(extent);
  if (!broadcasts_to(values, shape) || !within_limit(count, self.type)) return;
  walk(shape, {&values}, [&](auto &position, int64_t *index) {
    int64_t at = indexing.resolve(position);
    if (at < 0) return;
    Value value = value_at(values, index[0]);
    if (accumulate) value += value_at(self, at);
    set_value(self, at, value);
  });
}

// index_select(self, dim, index, out) and gather(self, dim, index, out)
void select(Call &call) {
  aclTensor *self = tensor_at(call, 0), *which = tensor_at(call, 2), *out = tensor_at(call, 3);
  if (!self || !which || !out || !usable(*out) || !usable(*which) || !is_plain(self->type) ||
      !addressable(*self))
    return;
  if (self->shape.empty() || self->shape.size() != out->shape.size()) return;
  int64_t dim = static_cast<int32_t>(call.arguments[1].word),
          rank = static_cast<int64_t>(self->shape.size());
  if (dim < 0) dim += rank;
  bool gather = call.name == "Gather";
  if (dim < 0 || dim >= rank || (gather && which->shape != out->shape) ||
      (!gather && which->shape.size() > 1))
    return;
  size_t axis = static_cast<size_t>(dim);
  bool lines = !gather && dim < rank - 1 && self->type == out->type;
  int64_t line = lines ? line_length(*out, *self) : 1;
  std::vector<int64_t> starts = out->shape;
  if (line > 1) starts.back() = 1;
  walk(starts, {out}, [&](auto &position, int64_t *index) {
    int64_t offset = which->offset, at = self->offset;
    if (gather)
      for (size_t step = 0; step < position.size(); ++step)
        offset += position[step] * which->strides[step];
    else if (!which->shape.empty())
      offset += position[axis] * which->strides[0];
    int64_t chosen = static_cast<int64_t>(value_at(*which, offset));
    if (chosen < 0 || chosen >= self->shape[axis]) return;
    for (size_t step = 0; step < position.size(); ++step)
      at += (step == axis ? chosen : position[step]) * self->strides[step];
    if (line > 1) return copy_line(*out, index[0], *self, at, line);
    set_value(*out, index[0], value_at(*self, at));
  });
}

// embedding(weight, indices, out)
void embedding(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() != 3 || !usable(*tensors[1]) || !usable(*tensors[2]) ||
      !addressable(*tensors[0]))
    return;
  Call as_index;
  as_index.name = "Index";
  Argument list;
  list.kind = Kind::kTensorList;
  list.tensors = {*tensors[1]};
  as_index.arguments = {call.arguments[0], list, call.arguments[2]};
  index_get(as_index);
}

// scatter(self, dim, index, src, reduce, out) and inplace scatter(self, dim, index, src, reduce);
// only plain replacement is computed.
void scatter(Call &call) {
  auto tensors = tensors_of(call);
  bool in_place = call.name.rfind("Inplace", 0) == 0,
       by_value = call.name.find("Value") != std::string::npos;
  aclTensor *self = tensor_at(call, 0), *which = tensor_at(call, 2),
            *source = by_value ? nullptr : tensor_at(call, 3);
  Value value = 0;
  if (!self || !which || (!source && !scalar_at(call, 3, &value)) || call.arguments.size() < 5 ||
      call.arguments[4].word != 0)
    return;
  const aclTensor &out = in_place ? *self : *tensors.back();
  if (!in_place) copy(out, *self);
  if (!usable(out) || !usable(*which) || (source && !addressable(*source)) ||
      which->shape.size() != out.shape.size())
    return;
  int64_t dim = static_cast<int64_t>(call.arguments[1].word),
          rank = static_cast<int64_t>(out.shape.size());
  if (dim < 0) dim += rank;
  if (dim < 0 || dim >= rank || (source && source->shape.size() != which->shape.size())) return;
  for (size_t axis = 0; source && axis < which->shape.size(); ++axis)
    if (source->shape[axis] < which->shape[axis]) return;
  walk(which->shape, {which}, [&](auto &position, int64_t *index) {
    int64_t chosen = static_cast<int64_t>(value_at(*which, index[0]));
    if (chosen < 0 || chosen >= out.shape[static_cast<size_t>(dim)]) return;
    int64_t at = out.offset, from = source ? source->offset : 0;
    for (size_t axis = 0; axis < position.size(); ++axis) {
      if (static_cast<int64_t>(axis) != dim && position[axis] >= out.shape[axis]) return;
      at += (static_cast<int64_t>(axis) == dim ? chosen : position[axis]) * out.strides[axis];
      if (source) from += position[axis] * source->strides[axis];
    }
    set_value(out, at, source ? value_at(*source, from) : value);
  });
}

// scatter_nd_update(self, indices, updates) in place: the last axis of `indices` holds one number
// per leading axis of `self`. `self`, a cache, may be above the limit; what is brought may not.
void scatter_slices(Call &call) {
  aclTensor *self = tensor_at(call, 0), *which = tensor_at(call, 1), *updates = tensor_at(call, 2);
  if (!self || !which || !updates || float_result(*self) || !is_plain(self->type) ||
      !addressable(*self) || !usable(*which) || !usable(*updates) || which->shape.empty())
    return;
  size_t rank = static_cast<size_t>(which->shape.back());
  std::vector<int64_t> rows(which->shape.begin(), which->shape.end() - 1), shape = rows;
  if (rank == 0 || rank > self->shape.size()) return;
  int64_t step = which->strides.back();
  aclTensor slice = *self, source = *updates, starts = *which;
  starts.shape = rows;
  starts.strides.pop_back();
  slice.shape.erase(slice.shape.begin(), slice.shape.begin() + static_cast<int64_t>(rank));
  slice.strides.erase(slice.strides.begin(), slice.strides.begin() + static_cast<int64_t>(rank));
  shape.insert(shape.end(), slice.shape.begin(), slice.shape.end());
  if (updates->shape != shape) return;
  source.shape = slice.shape;
  source.strides.assign(updates->strides.begin() + static_cast<int64_t>(rows.size()),
                        updates->strides.end());
  walk(rows, {&starts}, [&](auto &position, int64_t *index) {
    slice.offset = self->offset;
    for (size_t axis = 0; axis < rank; ++axis) {
      int64_t chosen =
          static_cast<int64_t>(value_at(*which, index[0] + static_cast<int64_t>(axis) * step));
      if (chosen < 0 || chosen >= self->shape[axis]) return;  // padding
      slice.offset += chosen * self->strides[axis];
    }
    source.offset = updates->offset;
    for (size_t axis = 0; axis < rows.size(); ++axis)
      source.offset += position[axis] * updates->strides[axis];
    copy(slice, source);
  });
}

// nonzero(self, out): out has room for every element; its view shape tells how many there are.
void nonzero(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() != 2 || !usable(*tensors[0]) || !addressable(*tensors[1])) return;
  const aclTensor &in = *tensors[0], &out = *tensors[1];
  bool transposed = call.name == "NonzeroV2";  // one row per axis instead of one per element
  std::vector<std::vector<int64_t>> found;
  walk(in.shape, {&in}, [&](auto &position, int64_t *index) {
    if (value_at(in, index[0]) != 0) found.push_back(position);
  });
  int64_t rank = static_cast<int64_t>(in.shape.size()), count = static_cast<int64_t>(found.size());
  if (count * rank > element_count(out)) return;
  for (int64_t row = 0; row < count; ++row)
    for (int64_t axis = 0; axis < rank; ++axis)
      set_value(out, out.offset + (transposed ? axis * count + row : row * rank + axis),
                static_cast<Value>(found[static_cast<size_t>(row)][static_cast<size_t>(axis)]));
  uint64_t original = call.arguments.back().word;
  if (kind_of(original) == Kind::kTensor)
    reinterpret_cast<aclTensor *>(original)->shape =
        transposed ? std::vector<int64_t>{rank, count} : std::vector<int64_t>{count, rank};
}

// one_hot(self, classes, on, off, axis, out): the new axis is the last
void one_hot(Call &call) {
  auto tensors = tensors_of(call);
  if (tensors.size() != 4 || call.arguments.size() < 6) return;
  const aclTensor &in = *tensors[0], &on = *tensors[1], &off = *tensors[2], &out = *tensors[3];
  int64_t axis = static_cast<int32_t>(call.arguments[4].word),
          rank = static_cast<int64_t>(in.shape.size());
  for (const aclTensor *tensor : {&in, &on, &off, &out})
    if (!usable(*tensor) || ((tensor == &on || tensor == &off) && element_count(*tensor) != 1))
      return;
  if ((axis != -1 && axis != rank) || out.shape.size() != in.shape.size() + 1) return;
  for (size_t step = 0; step < in.shape.size(); ++step)
    if (in.shape[step] != out.shape[step]) return;
  Value yes = value_at(on, on.offset), no = value_at(off, off.offset);
  walk(out.shape, {&out}, [&](auto &position, int64_t *index) {
    int64_t at = in.offset;
    for (size_t step = 0; step < in.shape.size(); ++step) at += position[step] * in.strides[step];
    bool hit = value_at(in, at) == static_cast<Value>(position.back());
    set_value(out, index[0], hit ? yes : no);
  });
}

constexpr KernelRow kRows[] = {
    {"Nonzero", nonzero},
    {"NonzeroV2", nonzero},
    {"Index", index_get},
    {"IndexPutImpl", index_put},
    {"IndexSelect", select},
    {"Gather", select},
    {"Embedding", embedding},
    {"Scatter", scatter},
    {"InplaceScatter", scatter},
    {"ScatterValue", scatter},
    {"InplaceScatterValue", scatter},
    {"ScatterNdUpdate", scatter_slices},
    {"ScatterNdUpdateV2", scatter_slices},
    {"OneHot", one_hot},
};

}  // namespace

KernelRows indexing_kernels() { return KernelRows(kRows); }

}  // namespace memprof_sim
