// The kernels of all files by operator name. An operator without a row computes nothing.
#include "kernels/table.h"

#include <unordered_map>

#include "kernels/tensor_view.h"
#include "ownership.h"

namespace memprof_sim {
namespace {

struct Table {
  struct Entry {
    Kernel kernel;
    bool of_layers;
  };
  std::unordered_map<std::string, Entry> by_name;

  Table() {
    for (KernelRows rows : {copy_fill_kernels(), elementwise_kernels(), expert_routing_kernels(),
                            indexing_kernels(), reduction_kernels(), selection_kernels()})
      add(rows, false);
    for (KernelRows rows : {activation_kernels(), attention_kernels(), expert_kernels(),
                            matmul_kernels(), normalization_kernels()})
      add(rows, true);
  }
  void add(KernelRows rows, bool of_layers) {
    for (const KernelRow &row : rows) by_name.emplace(row.name, Entry{row.kernel, of_layers});
  }
};

}  // namespace

Kernel find_kernel(const std::string &operator_name) {
  const Table &table = process_state<Table>();
  auto found = table.by_name.find(operator_name);
  if (found != table.by_name.end() &&
      !(found->second.of_layers && floats_given_up.load(std::memory_order_relaxed)))
    return found->second.kernel;
  values_missing = true;
  return nullptr;
}

}  // namespace memprof_sim
