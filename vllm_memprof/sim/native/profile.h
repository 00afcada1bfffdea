// The device that is simulated, read once per process from the file that MEMPROF_SIM_PROFILE names.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace memprof_sim {

// base + per_byte x bytes of the operator's largest tensor, at most cap where there is one.
struct WorkspaceRule {
  std::string pattern;  // glob over operator names without "aclnn"
  uint64_t base = 0;
  double per_byte = 0;
  uint64_t cap = 0;  // 0: none
};

struct Profile {
  bool valid = false;
  std::string problem;  // why it is not valid
  std::string name;
  std::string soc_name;
  std::string cann_version;  // empty: the version query is answered with "not supported"
  std::string driver_version;
  uint32_t device_count = 0;
  uint64_t total_bytes = 0;
  uint64_t other_chip_total_bytes = 0;  // of every second device; 0: the same
  uint64_t context_bytes = 0;
  uint64_t further_context_bytes = 0;
  uint64_t context_runtime_bytes = 0;
  uint64_t kernels_bytes = 0;
  uint64_t operator_binary_bytes = 0;
  uint64_t hccl_base_bytes = 0;
  uint64_t huge_page_bytes = 0;
  uint64_t normal_page_bytes = 0;
  uint64_t huge_first_min_bytes = 0;
  uint64_t malloc_padding_bytes = 0;
  uint64_t kept_copy_bytes = 0;
  uint64_t host_compute_bytes = 0;
  uint64_t hccl_buffer_mib = 0;
  uint64_t hccl_buffers = 0;
  uint64_t atb_pool_bytes = 0;
  uint64_t graph_capture_bytes = 0;
  uint64_t graph_argument_bytes = 0;
  uint64_t graph_queue_bytes = 0;
  int64_t ai_core_count = 0;
  int64_t vector_core_count = 0;
  int64_t ai_cpu_count = 0;
  int64_t l2_cache_bytes = 0;
  uint64_t stream_count = 0;
  uint64_t event_count = 0;
  std::vector<WorkspaceRule> workspace;
};

const Profile &profile();
uint64_t total_bytes_of(int physical_device);
const WorkspaceRule *workspace_rule_for(
    const std::string &operator_name);  // null: it asks for none
uint64_t workspace_bytes_for(const std::string &operator_name, uint64_t largest_tensor_bytes);
bool glob_match(const char *pattern, const char *text);
// Whether MEMPROF_SIM_LIMITS names this limit: streams, events, memlock.
bool limit_asked(const char *name);
// Whether MEMPROF_SIM_WITHOUT_KERNELS, globs with commas between, names the operator.
bool kernels_missing(const std::string &operator_name);

}  // namespace memprof_sim
