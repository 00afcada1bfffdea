// The device profile: flat `key=value` lines written by profiles.py. Read once per process.
#include "profile.h"

#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>

#include "acl.h"
#include "ownership.h"

namespace memprof_sim {
namespace {

uint64_t number(const std::map<std::string, std::string> &values, const char *key,
                Profile *result) {
  auto it = values.find(key);
  if (it == values.end()) {
    if (result->problem.empty()) result->problem = std::string("the device profile has no ") + key;
    return 0;
  }
  return strtoull(it->second.c_str(), nullptr, 10);
}

std::string text(const std::map<std::string, std::string> &values, const char *key) {
  auto it = values.find(key);
  return it == values.end() ? std::string() : it->second;
}

Profile load() {
  Profile result;
  const char *path = getenv("MEMPROF_SIM_PROFILE");
  if (!path || !*path) {
    result.problem =
        "MEMPROF_SIM_PROFILE is not set: it names the device profile of the simulated device";
    return result;
  }
  std::ifstream input(path);
  if (!input) {
    result.problem = std::string("cannot read the device profile ") + path;
    return result;
  }
  std::map<std::string, std::string> values;
  for (std::string line; std::getline(input, line);) {
    size_t equals = line.find('=');
    if (line.empty() || line[0] == '#' || equals == std::string::npos) continue;
    std::string key = line.substr(0, equals), value = line.substr(equals + 1);
    if (key != "workspace") {
      values[key] = value;
      continue;
    }
    WorkspaceRule rule;
    std::istringstream fields(value);
    if (fields >> rule.pattern >> rule.base >> rule.per_byte >> rule.cap)
      result.workspace.push_back(rule);
    else
      result.problem =
          "a workspace line of the device profile is not \"glob base per_byte cap\": " + value;
  }
  result.name = text(values, "name");
  result.soc_name = text(values, "soc_name");
  result.cann_version = text(values, "cann_version");
  result.driver_version = text(values, "driver_version");
  result.device_count = static_cast<uint32_t>(number(values, "device_count", &result));
  result.total_bytes = number(values, "total_bytes", &result);
  result.other_chip_total_bytes = number(values, "other_chip_total_bytes", &result);
  result.context_bytes = number(values, "context_bytes", &result);
  result.further_context_bytes = number(values, "further_context_bytes", &result);
  result.context_runtime_bytes = number(values, "context_runtime_bytes", &result);
  result.kernels_bytes = number(values, "kernels_bytes", &result);
  result.operator_binary_bytes = number(values, "operator_binary_bytes", &result);
  result.hccl_base_bytes = number(values, "hccl_base_bytes", &result);
  result.huge_page_bytes = number(values, "huge_page_bytes", &result);
  result.normal_page_bytes = number(values, "normal_page_bytes", &result);
  result.huge_first_min_bytes = number(values, "huge_first_min_bytes", &result);
  result.malloc_padding_bytes = number(values, "malloc_padding_bytes", &result);
  result.kept_copy_bytes = number(values, "kept_copy_bytes", &result);
  result.host_compute_bytes = number(values, "host_compute_bytes", &result);
  result.hccl_buffer_mib = number(values, "hccl_buffer_mib", &result);
  result.hccl_buffers = number(values, "hccl_buffers", &result);
  result.atb_pool_bytes = number(values, "atb_pool_bytes", &result);
  result.graph_capture_bytes = number(values, "graph_capture_bytes", &result);
  result.graph_argument_bytes = number(values, "graph_argument_bytes", &result);
  result.graph_queue_bytes = number(values, "graph_queue_bytes", &result);
  result.ai_core_count = static_cast<int64_t>(number(values, "ai_core_count", &result));
  result.vector_core_count = static_cast<int64_t>(number(values, "vector_core_count", &result));
  result.ai_cpu_count = static_cast<int64_t>(number(values, "ai_cpu_count", &result));
  result.l2_cache_bytes = static_cast<int64_t>(number(values, "l2_cache_bytes", &result));
  result.stream_count = number(values, "stream_count", &result);
  result.event_count = number(values, "event_count", &result);
  if (result.soc_name.empty() && result.problem.empty())
    result.problem = "the device profile has no soc_name";
  if (!result.problem.empty()) result.problem += std::string(" (") + path + ")";
  result.valid = result.problem.empty();
  return result;
}

struct Loaded {
  std::once_flag once;
  Profile profile;
};

// Whether a variable, globs with commas between, names it.
bool named_in(const char *variable, const std::string &name) {
  const char *given = getenv(variable);
  std::istringstream globs(given ? given : "");
  for (std::string glob; std::getline(globs, glob, ',');)
    if (glob_match(glob.c_str(), name.c_str())) return true;
  return false;
}

}  // namespace

// torch_npu asks while it is imported: a fork of a process that imported it has its own variables.
const Profile &profile() {
  Loaded &state = forked_state<Loaded>();
  std::call_once(state.once, [&state] { state.profile = load(); });
  return state.profile;
}

uint64_t total_bytes_of(int physical_device) {
  const Profile &known = profile();
  bool other = physical_device % 2 && known.other_chip_total_bytes;
  return other ? known.other_chip_total_bytes : known.total_bytes;
}

bool glob_match(const char *pattern, const char *text) {
  for (; *pattern; ++pattern, ++text) {
    if (*pattern == '*') {
      for (++pattern;; ++text) {
        if (glob_match(pattern, text)) return true;
        if (!*text) return false;
      }
    }
    if (*pattern != *text) return false;
  }
  return !*text;
}

bool limit_asked(const char *name) { return named_in("MEMPROF_SIM_LIMITS", name); }

bool kernels_missing(const std::string &operator_name) {
  static const bool any = getenv("MEMPROF_SIM_WITHOUT_KERNELS") != nullptr;
  return any && named_in("MEMPROF_SIM_WITHOUT_KERNELS", operator_name);
}

const WorkspaceRule *workspace_rule_for(const std::string &operator_name) {
  for (const WorkspaceRule &rule : profile().workspace)
    if (glob_match(rule.pattern.c_str(), operator_name.c_str()))
      return rule.base || rule.per_byte > 0 ? &rule : nullptr;
  return nullptr;
}

uint64_t workspace_bytes_for(const std::string &operator_name, uint64_t largest_tensor_bytes) {
  const WorkspaceRule *rule = workspace_rule_for(operator_name);
  if (!rule) return 0;
  uint64_t bytes = rule->base + static_cast<uint64_t>(rule->per_byte *
                                                      static_cast<double>(largest_tensor_bytes));
  return rule->cap && bytes > rule->cap ? rule->cap : bytes;
}

}  // namespace memprof_sim

// For platform.cpp, whose std::string is the older one: it must not see Profile.
SHIM_INTERNAL uint64_t memprof_sim_profile_ai_cores() {
  return static_cast<uint64_t>(memprof_sim::profile().ai_core_count);
}
SHIM_INTERNAL uint64_t memprof_sim_profile_l2_bytes() {
  return static_cast<uint64_t>(memprof_sim::profile().l2_cache_bytes);
}
SHIM_INTERNAL uint64_t memprof_sim_profile_total_bytes() {
  return memprof_sim::profile().total_bytes;
}
