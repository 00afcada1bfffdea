// Host kernels that select by value: argmax, top-k, sorting. Above host_compute_bytes a choice of
// one is position 0, which always exists; orders and choices of several are spread evenly over the
// positions, as random ones are on average (`spread_choices`).
#include "kernels/selection.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/arguments.h"
#include "kernels/dense_floats.h"
#include "kernels/table.h"
#include "kernels/tensor_view.h"

namespace memprof_sim {
namespace {

void set_index(const aclTensor &indices, int64_t index, int64_t position) {
  char *target = element(indices, index);
  note_write(target, element_bytes(indices.type));
  if (indices.type == ACL_INT32)
    *reinterpret_cast<int32_t *>(target) = static_cast<int32_t>(position);
  else
    *reinterpret_cast<int64_t *>(target) = position;
}

// The values of a tensor with one axis.
void read_line(const aclTensor &tensor, std::vector<float> *line) { read_floats(tensor, line); }
void read_line(const aclTensor &tensor, std::vector<Value> *line) {
  *line = read_values<Value>(tensor);
}

// Along `axis` of `in`, the first `count` values in order to `values` and their positions to
// `indices`, either of which may be null. A result has the axis with `count` elements; one that
// lacks the axis (count 1) has one axis less. `T` holds every value of `in`.
template <typename T>
bool pick_as(const aclTensor &in, size_t axis, size_t count, bool descending, bool nan_first,
             const aclTensor *values, const aclTensor *indices) {
  aclTensor starts = in, source = in;
  if (!usable(in) || in.shape.empty() || in.shape[axis] < static_cast<int64_t>(count)) return false;
  starts.shape[axis] = 1;
  source.shape = {in.shape[axis]};
  source.strides = {in.strides[axis]};
  std::vector<int64_t> shape = in.shape;
  shape[axis] = static_cast<int64_t>(count);
  aclTensor views[2];
  const aclTensor *results[2] = {values, indices};
  for (int which = 0; which < 2; ++which) {
    if (!results[which]) continue;
    views[which] = *results[which];
    if (views[which].shape.size() + 1 == shape.size() && count == 1) {
      views[which].shape.insert(views[which].shape.begin() + static_cast<int64_t>(axis), 1);
      views[which].strides.insert(views[which].strides.begin() + static_cast<int64_t>(axis), 0);
    }
    if (!usable(views[which]) || views[which].shape != shape) return false;
  }
  if (indices && indices->type != ACL_INT32 && indices->type != ACL_INT64) return false;
  std::vector<T> line;
  walk(starts.shape, {&starts}, [&](auto &position, int64_t *index) {
    source.offset = index[0];
    read_line(source, &line);
    std::vector<int64_t> chosen = order(line, count, descending, nan_first);
    for (int which = 0; which < 2; ++which) {
      if (!results[which]) continue;
      int64_t at = views[which].offset;
      for (size_t step = 0; step < position.size(); ++step)
        at += position[step] * views[which].strides[step];
      for (int64_t place : chosen) {
        if (which)
          set_index(views[which], at, place);
        else
          set_value(views[which], at, line[static_cast<size_t>(place)]);
        at += views[which].strides[axis];
      }
    }
  });
  return true;
}

template <typename... Arguments>
bool pick(const aclTensor &in, Arguments... arguments) {
  bool floats = !is_integer(in.type) && in.type != ACL_DOUBLE;
  return floats ? pick_as<float>(in, arguments...) : pick_as<Value>(in, arguments...);
}

// argmax(self, dim, keep, out), max_dim(self, dim, keep, values, indices) and their kin
template <bool largest>
void extreme(Call &call) {
  auto tensors = tensors_of(call);
  size_t axis = 0;
  bool done = false;
  if (tensors.size() >= 2 && axis_of(call, 1, *tensors[0], &axis))
    done = pick(*tensors[0], axis, 1, largest, true, tensors.size() > 2 ? tensors[1] : nullptr,
                tensors.back());
  if (!done) zero_indices(call);
}

// topk(self, k, dim, largest, sorted, values, indices). Scores that were given up choose nothing.
void topk(Call &call) {
  auto tensors = tensors_of(call);
  size_t axis = 0;
  if (tensors.size() != 3 || !axis_of(call, 2, *tensors[0], &axis)) return zero_indices(call);
  const aclTensor &in = *tensors[0];
  if (float_result(in) || !pick(in, axis, static_cast<size_t>(call.arguments[1].word),
                                flag_at(call, 3), flag_at(call, 3), tensors[1], tensors[2]))
    spread_choices(*tensors[2], axis, in.shape[axis]);
}

// sort(self, stable, dim, descending, values, indices)
void sort(Call &call) {
  auto tensors = tensors_of(call);
  size_t axis = 0;
  if (tensors.size() != 3 || !axis_of(call, 2, *tensors[0], &axis)) return zero_indices(call);
  const aclTensor &in = *tensors[0];
  if (!pick(in, axis, static_cast<size_t>(in.shape[axis]), flag_at(call, 3), flag_at(call, 3),
            tensors[1], tensors[2]))
    spread_choices(*tensors[2], axis, in.shape[axis]);
}

// argsort(self, dim, descending, out)
void argsort(Call &call) {
  auto tensors = tensors_of(call);
  size_t axis = 0;
  if (tensors.size() != 2 || !axis_of(call, 1, *tensors[0], &axis)) return zero_indices(call);
  const aclTensor &in = *tensors[0];
  if (!pick(in, axis, static_cast<size_t>(in.shape[axis]), flag_at(call, 2), flag_at(call, 2),
            nullptr, tensors[1]))
    spread_choices(*tensors[1], axis, in.shape[axis]);
}

constexpr KernelRow kRows[] = {
    {"ArgMax", extreme<true>},
    {"ArgMin", extreme<false>},
    {"MaxDim", extreme<true>},
    {"MinDim", extreme<false>},
    {"Topk", topk},
    {"Sort", sort},
    {"Argsort", argsort},
    {"Multinomial", zero_indices},
    {"MultinomialTensor", zero_indices},
    {"Kthvalue", zero_indices},
    {"TopKTopPSample", zero_indices},
    {"TopKTopPSampleV2", zero_indices},
};

}  // namespace

int64_t even_step(int64_t positions) {
  int64_t step = std::llround(0.6180339887498949 * static_cast<double>(positions));
  while (std::gcd(step, positions) != 1) ++step;
  return step;
}

void spread_choices(const aclTensor &chosen, size_t axis, int64_t positions) {
  // A longer order is one of a vocabulary, not of experts: tokens are picked from it, no sizes.
  constexpr int64_t kLongestLine = 4096;
  if ((chosen.type != ACL_INT32 && chosen.type != ACL_INT64) || axis >= chosen.shape.size() ||
      positions <= 0 || !addressable(chosen))
    return;
  int64_t count = chosen.shape[axis], stride = chosen.strides[axis], start = 0;
  if (taken_out("choices")) return;
  Answering answering;
  if (count > kLongestLine) return fill(chosen, 0);
  // Choices of `count` go on where the row before ended; an order may be cut anywhere.
  int64_t step = count < positions ? count : even_step(positions);
  aclTensor starts = chosen;
  starts.shape[axis] = std::min<int64_t>(count, 1);
  walk(starts.shape, {&starts}, [&](auto &, int64_t *index) {
    int64_t position = start;
    for (int64_t at = 0; at < count; ++at) {
      set_index(chosen, index[0] + at * stride, position);
      if (++position == positions) position = 0;
    }
    start = (start + step) % positions;
  });
}

void zero_indices(Call &call) {
  Answering answering;
  auto tensors = tensors_of(call);
  for (size_t index = tensors.size() < 2 ? 0 : 1; index < tensors.size(); ++index)
    if (tensors[index]->type == ACL_INT32 || tensors[index]->type == ACL_INT64)
      fill(*tensors[index], 0);
}

KernelRows selection_kernels() { return KernelRows(kRows); }

}  // namespace memprof_sim
