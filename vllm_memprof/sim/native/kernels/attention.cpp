// Host kernels of attention: keys and values into the paged cache, and attention over it, causal,
// with fewer key heads than query heads. The tensors that a step brings and makes count against
// host_compute_bytes; the cache is only looked into.
#include "kernels/attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/arguments.h"
#include "kernels/dense_floats.h"
#include "kernels/table.h"
#include "kernels/tensor_view.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3")
#endif

namespace memprof_sim {
namespace {

// One step of attention: sequences in one row of tokens each, their keys in a row likewise or in
// blocks of a cache.
struct Attention {
  aclTensor query, key, value, out;   // [tokens, heads, width]
  const aclTensor *blocks = nullptr;  // [sequences, blocks], or null: keys and values lie in a row
  int64_t block_size = 0;
  int64_t heads = 0, key_heads = 0;
  float scale = 1;
  bool causal = false;
  std::vector<int64_t> query_ends, key_lengths;  // per sequence
};

// `tensor` as [rows, heads, width], when its last axes are [heads, width] or [heads x width]; false
// otherwise.
bool split_heads(aclTensor *tensor, int64_t heads) {
  size_t rank = tensor->shape.size();
  if (rank < 2 || heads <= 0) return false;
  if (tensor->shape[rank - 2] == heads && rank >= 3) return true;
  int64_t width = tensor->shape[rank - 1];
  if (width % heads || tensor->strides[rank - 1] != 1) return false;
  tensor->shape[rank - 1] = heads;
  tensor->strides[rank - 1] = width / heads;
  tensor->shape.push_back(width / heads);
  tensor->strides.push_back(1);
  return true;
}

// The rows of one head: element index of (row, 0) for a row of a paged or plain tensor.
int64_t row_start(const aclTensor &tensor, int64_t row, int64_t head, int64_t block_size,
                  const std::vector<int64_t> &table) {
  size_t rank = tensor.shape.size();
  int64_t start = tensor.offset + head * tensor.strides[rank - 2];
  if (block_size == 0) return start + row * tensor.strides[0];
  return start + table[static_cast<size_t>(row / block_size)] * tensor.strides[0] +
         row % block_size * tensor.strides[1];
}

void read_row(const aclTensor &tensor, int64_t start, int64_t width, std::vector<float> *row) {
  aclTensor line = tensor;
  line.offset = start;
  line.shape = {width};
  line.strides = {tensor.strides.back()};
  std::vector<float> values;
  read_floats(line, &values);
  row->insert(row->end(), values.begin(), values.end());
}

void attend(const Attention &step) {
  int64_t width = step.query.shape[2], value_width = step.value.shape.back(),
          group = step.heads / step.key_heads;
  std::vector<float> keys, values, query, scores, result;
  int64_t begin = 0, key_begin = 0;
  for (size_t which = 0; which < step.query_ends.size(); ++which) {
    int64_t queries = step.query_ends[which] - begin, length = step.key_lengths[which];
    std::vector<int64_t> table;
    if (step.blocks)
      for (int64_t block = 0; block * step.block_size < length; ++block) {
        if (block >= step.blocks->shape[1]) return;
        int64_t at = step.blocks->offset + static_cast<int64_t>(which) * step.blocks->strides[0] +
                     block * step.blocks->strides[1];
        table.push_back(static_cast<int64_t>(value_at(*step.blocks, at)));
        if (table.back() < 0 || table.back() >= step.key.shape[0]) return;
      }
    int64_t offset = step.blocks ? 0 : key_begin, block_size = step.blocks ? step.block_size : 0;
    for (int64_t key_head = 0; key_head < step.key_heads; ++key_head) {
      keys.clear();
      values.clear();
      for (int64_t row = 0; row < length; ++row) {
        read_row(step.key, row_start(step.key, offset + row, key_head, block_size, table), width,
                 &keys);
        read_row(step.value, row_start(step.value, offset + row, key_head, block_size, table),
                 value_width, &values);
      }
      for (int64_t head = key_head * group; head < (key_head + 1) * group; ++head)
        for (int64_t row = 0; row < queries; ++row) {
          query.clear();
          read_row(step.query, row_start(step.query, begin + row, head, 0, {}), width, &query);
          int64_t seen = step.causal ? std::min(length, length - queries + row + 1) : length;
          result.assign(static_cast<size_t>(value_width), 0);
          scores.assign(static_cast<size_t>(std::max<int64_t>(seen, 0)), 0);
          float largest = -INFINITY, sum = 0;
          for (int64_t at = 0; at < seen; ++at) {
            float product = 0;
            for (int64_t axis = 0; axis < width; ++axis)
              product +=
                  query[static_cast<size_t>(axis)] * keys[static_cast<size_t>(at * width + axis)];
            largest = std::max(largest, scores[static_cast<size_t>(at)] = product * step.scale);
          }
          for (float &score : scores) sum += score = std::exp(score - largest);
          for (int64_t at = 0; at < seen; ++at) {
            float weight = scores[static_cast<size_t>(at)] / sum;
            for (int64_t axis = 0; axis < value_width; ++axis)
              result[static_cast<size_t>(axis)] +=
                  weight * values[static_cast<size_t>(at * value_width + axis)];
          }
          aclTensor line = step.out;
          line.offset = row_start(step.out, begin + row, head, 0, {});
          line.shape = {value_width};
          line.strides = {step.out.strides.back()};
          write_floats(line, result);
        }
    }
    begin = step.query_ends[which];
    key_begin += length;
  }
}

// Whether the step is one that is computed: its tensors small and where they should be, its lengths
// within them.
bool prepare(Attention *step) {
  if (step->heads <= 0 || step->key_heads <= 0 || step->heads % step->key_heads ||
      step->query_ends.empty())
    return false;
  if (step->query_ends.size() != step->key_lengths.size()) return false;
  for (aclTensor *tensor : {&step->query, &step->out})
    if (!usable(*tensor) || !split_heads(tensor, step->heads) || tensor->shape.size() != 3)
      return false;
  size_t rank = step->blocks ? 4 : 3;
  uint64_t bytes = 0;
  int64_t tokens = 0, key_tokens = 0;
  for (size_t which = 0; which < step->query_ends.size(); ++which) {
    if (step->query_ends[which] < tokens || step->key_lengths[which] < 0) return false;
    tokens = step->query_ends[which];
    key_tokens += step->key_lengths[which];
  }
  for (aclTensor *tensor : {&step->key, &step->value}) {
    if (!is_plain(tensor->type) || !addressable(*tensor) || !split_heads(tensor, step->key_heads) ||
        tensor->shape.size() != rank)
      return false;
    if (!step->blocks && tensor->shape[0] < key_tokens) return false;
    if (step->blocks && tensor->shape[1] != step->block_size) return false;
    bytes += static_cast<uint64_t>(key_tokens * step->key_heads * tensor->shape.back()) *
             element_bytes(tensor->type);
  }
  if (step->key.shape.back() != step->query.shape[2] ||
      step->out.shape[2] != step->value.shape.back())
    return false;
  if (tokens > step->query.shape[0] || tokens > step->out.shape[0] ||
      bytes > 2 * profile().host_compute_bytes)
    return false;
  return !step->blocks || (usable(*step->blocks) && step->blocks->shape.size() == 2 &&
                           step->blocks->shape[0] >= static_cast<int64_t>(step->query_ends.size()));
}

// [sequences, 1, heads, width] as [sequences, heads, width]; false for another shape.
bool one_query_each(aclTensor *tensor) {
  if (tensor->shape.size() != 4 || tensor->shape[1] != 1 || tensor->strides.size() != 4)
    return false;
  tensor->shape.erase(tensor->shape.begin() + 1);
  tensor->strides.erase(tensor->strides.begin() + 1);
  return true;
}

// fused_infer_attention_score(query, [key], [value], shift, mask, query lengths, key lengths, 7 of
// quantization, block table, more tensors or null..., heads, scale, tokens before, tokens after,
// layout, key heads, sparse mode, precision, block size, ..., out, lse). Computed: layout TND, and
// BSND with one query per sequence over a cache (a decode step, which may name no query lengths),
// with the causal mask (sparse mode 3) or none (mode 0 without a mask). Releases add tensors before
// `heads`.
void fused_infer_attention(Call &call) {
  constexpr size_t kMask = 4, kQueryLengths = 5, kKeyLengths = 6, kBlockTable = 14;
  const auto *keys = list_at(call, 1), *values = list_at(call, 2);
  size_t at = kBlockTable + 1;
  while (at < call.arguments.size() &&
         (call.arguments[at].kind != Kind::kNone || call.arguments[at].word == 0))
    ++at;
  if (!keys || !values || keys->size() != 1 || values->size() != 1 ||
      at + 8 >= call.arguments.size() || !tensor_at(call, 0))
    return;
  for (size_t shift :
       {size_t{3}, size_t{7}, size_t{8}, size_t{9}, size_t{10}, size_t{11}, size_t{12}, size_t{13}})
    if (call.arguments[shift].kind != Kind::kNone || call.arguments[shift].word)
      return;  // position shifts and quantization
  int64_t mode = word_at(call, at + 5);
  bool in_rows = call.text == "TND";
  if ((!in_rows && (call.text != "BSND" || !tensor_at(call, kBlockTable))) ||
      (mode != 3 && mode != 0) || (mode == 0 && tensor_at(call, kMask)))
    return;
  if ((in_rows && call.arguments[kQueryLengths].kind != Kind::kIntArray) ||
      call.arguments[kKeyLengths].kind != Kind::kIntArray)
    return;
  Attention step;
  step.query = *tensor_at(call, 0);
  step.key = (*keys)[0];
  step.value = (*values)[0];
  step.heads = word_at(call, at);
  step.key_heads = word_at(call, at + 4) ? word_at(call, at + 4) : step.heads;
  step.block_size = word_at(call, at + 7);
  step.scale = static_cast<float>(call.real(0));
  step.causal = mode == 3;
  step.blocks = tensor_at(call, kBlockTable);
  for (size_t index = at + 8; index < call.arguments.size(); ++index)
    if (aclTensor *out = tensor_at(call, index)) {
      step.out = *out;
      break;
    }
  if (in_rows) {
    step.query_ends = call.arguments[kQueryLengths].integers;
  } else {
    if (!one_query_each(&step.query) || !one_query_each(&step.out)) return;
    for (int64_t end = 1; end <= step.query.shape[0]; ++end) step.query_ends.push_back(end);
  }
  step.key_lengths = call.arguments[kKeyLengths].integers;
  if (step.key_lengths.size() > step.query_ends.size())
    step.key_lengths.resize(step.query_ends.size());
  if (!step.blocks)  // then they add up
    for (size_t which = step.key_lengths.size(); which-- > 1;)
      step.key_lengths[which] -= step.key_lengths[which - 1];
  if (prepare(&step)) attend(step);
}

// scatter_pa_kv_cache(key, key cache, slots, value, value cache, ...)
void scatter_cache(Call &call) {
  aclTensor *key = tensor_at(call, 0), *keys = tensor_at(call, 1), *slots = tensor_at(call, 2),
            *value = tensor_at(call, 3), *values = tensor_at(call, 4);
  if (!key || !keys || !slots || !value || !values) return;
  write_cache(*key, *slots, *keys);
  write_cache(*value, *slots, *values);
}

constexpr KernelRow kRows[] = {
    {"FusedInferAttentionScoreV2", fused_infer_attention},
    {"FusedInferAttentionScoreV3", fused_infer_attention},
    {"FusedInferAttentionScoreV4", fused_infer_attention},
    {"FusedInferAttentionScoreV5", fused_infer_attention},
    {"ScatterPaKvCache", scatter_cache},
};

}  // namespace

void write_cache(const aclTensor &rows, const aclTensor &slots, const aclTensor &cache) {
  if (float_result(cache) || !usable(rows) || !usable(slots) || !is_plain(cache.type) ||
      !addressable(cache))
    return;
  if (slots.shape.size() != 1 || rows.shape.size() < 2 || cache.shape.size() < 3 ||
      slots.shape[0] > rows.shape[0])
    return;
  int64_t width = element_count(rows) / std::max<int64_t>(rows.shape[0], 1),
          blocks = cache.shape[0], block_size = cache.shape[1];
  if (width * blocks * block_size != element_count(cache)) return;
  aclTensor source = rows, target = cache;
  source.shape.erase(source.shape.begin());
  source.strides.erase(source.strides.begin());
  target.shape.erase(target.shape.begin(), target.shape.begin() + 2);
  target.strides.erase(target.strides.begin(), target.strides.begin() + 2);
  if (source.shape != target.shape) return;
  for (int64_t row = 0; row < slots.shape[0]; ++row) {
    int64_t slot = static_cast<int64_t>(value_at(slots, slots.offset + row * slots.strides[0]));
    if (slot < 0 || slot >= blocks * block_size) continue;  // padding
    source.offset = rows.offset + row * rows.strides[0];
    target.offset =
        cache.offset + slot / block_size * cache.strides[0] + slot % block_size * cache.strides[1];
    copy(target, source);
  }
}

KernelRows attention_kernels() { return KernelRows(kRows); }

}  // namespace memprof_sim
