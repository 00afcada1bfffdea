// What the files of the shim share. Every exported name is one of CANN's; everything else lives in namespace memprof_sim.
// Exported functions return ACL or HCCL codes and never throw.
#pragma once

#pragma GCC visibility push(default)
#include <acl/acl.h>
#include <acl/acl_op_compiler.h>
#include <acl/acl_prof.h>
#include <hccl/hccl.h>
#pragma GCC visibility pop

#include "compat.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#define SHIM_API extern "C" __attribute__((visibility("default")))

namespace memprof_sim {

// ---- profile.cpp: the device that is simulated, read once from the file MEMPROF_SIM_PROFILE names ----

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
  uint64_t context_bytes = 0;
  uint64_t context_runtime_bytes = 0;
  uint64_t kernels_bytes = 0;
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
  int64_t ai_core_count = 0;
  int64_t vector_core_count = 0;
  int64_t ai_cpu_count = 0;
  int64_t l2_cache_bytes = 0;
  std::vector<WorkspaceRule> workspace;
};

const Profile &profile();
const WorkspaceRule *workspace_rule_for(const std::string &operator_name);  // null: it asks for none
uint64_t workspace_bytes_for(const std::string &operator_name, uint64_t largest_tensor_bytes);
bool glob_match(const char *pattern, const char *text);
inline uint64_t round_up(uint64_t value, uint64_t unit) { return unit ? (value + unit - 1) / unit * unit : value; }

// ---- accounting.cpp: who holds how much of which device, shared by all processes through one mapped file ----

// As the driver tells them apart: by the module that asked. What its counters do not show is kDevice.
enum Component : int {
  kDevice = 0,  // the part of a context that lives in processes on the device
  kApp,         // everything got through aclrtMalloc and aclrtMallocPhysical: torch's segments and workspaces, ATB's pool, the application's own
  kHccl,        // buffers of communicators
  kRuntime,     // the runtime's share of a context, loaded kernels, captured graphs
  kComponentCount,
};
const char *component_name(int component);

struct Usage {
  uint64_t current[kComponentCount];
  uint64_t peak[kComponentCount];
};

// Charges this process; false when the device has not that many bytes left.
bool account_charge(int device, Component component, uint64_t bytes);
void account_release(int device, Component component, uint64_t bytes);
// Gives back everything this process holds on the device.
void account_release_device(int device);
uint64_t account_device_used(int device);       // all live processes
Usage account_own_usage(int device);            // this process, by component
struct ProcessUsage {
  int32_t pid;
  uint64_t bytes;
};
std::vector<ProcessUsage> account_processes(int device);  // the live processes that hold memory of the device
bool account_available();                       // the state file could be opened

// Memory that the runtime takes in shares smaller than a page (graphs): the sum is charged in huge pages.
bool account_runtime_share(int device, int64_t delta);
// With the first operator that needs a workspace (products of matrices, attention) a process loads its kernels to the device;
// false when they do not fit.
bool account_kernels(int device, const std::string &operator_name);

// A physical allocation that another process may import.
struct SharedHandle {
  uint64_t key;
  int32_t pid;
  int32_t fd;
  int32_t device;
  uint64_t offset;
  uint64_t bytes;
};
bool share_publish(const SharedHandle &handle);
bool share_find(uint64_t key, SharedHandle *handle);
void share_forget(uint64_t key);

// ---- error.cpp ----

aclError fail(aclError code, const char *format, ...) __attribute__((format(printf, 2, 3)));
aclError fail_unimplemented(const char *function);  // names the function in aclGetRecentErrMsg and, once, on stderr
bool tracing();
void trace(const char *format, ...) __attribute__((format(printf, 1, 2)));

// ---- device.cpp ----

int current_device();  // makes a context on the default device where one is configured; -1 without a context
bool device_valid(int device);
int visible_device_count();
int physical_device(int device);  // position in the accounting file, after ASCEND_RT_VISIBLE_DEVICES

// ---- memory.cpp, physical.cpp, copy.cpp ----

aclError device_allocate(void **pointer, uint64_t bytes, Component component);
aclError device_free(void *pointer);
void memory_forget_device(int device);    // after a device reset
void physical_forget_device(int device);
bool device_range(const void *pointer, uint64_t *bytes_left, int *device);  // false: not device memory
bool physical_range(const void *pointer, uint64_t *bytes_left, int *device);
void keep_copy(void *destination, const void *source, uint64_t bytes);
void keep_set(void *destination, int value, uint64_t bytes);

// ---- stream.cpp, callback.cpp, graph.cpp ----

bool stream_known(aclrtStream stream);  // null is the default stream
void stream_wait(aclrtStream stream);   // until its host functions and callbacks have run
void stream_forget(aclrtStream stream);
void wait_all_streams();
bool capture_record(aclrtStream stream, std::function<void()> node);  // true: recorded into the graph under capture
bool capture_active(aclrtStream stream);
void capture_join(aclrtStream stream, aclrtStream captured);          // stream joins the capture of `captured`
void graph_count_task(aclrtStream stream);

// ---- communicator.cpp ----

// Charges a communicator that an operator uses by name; true when the name is known.
bool communicator_touch_by_name(const char *name, aclError *status);

// ---- small helpers ----

// The live objects behind opaque handles, so that a stale or foreign handle is an error and not a crash.
template <typename T>
class Registry {
 public:
  T *add(T *object) {
    std::lock_guard<std::mutex> guard(mutex_);
    live_.insert(object);
    return object;
  }
  T *find(const void *handle) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto it = live_.find(const_cast<void *>(handle));
    return it == live_.end() ? nullptr : static_cast<T *>(*it);
  }
  bool remove(const void *handle) {
    std::lock_guard<std::mutex> guard(mutex_);
    return live_.erase(const_cast<void *>(handle)) == 1;
  }
  std::vector<T *> all() {
    std::lock_guard<std::mutex> guard(mutex_);
    std::vector<T *> result;
    for (void *object : live_) result.push_back(static_cast<T *>(object));
    return result;
  }

 private:
  std::mutex mutex_;
  std::set<void *> live_;
};

uint64_t monotonic_ns();

}  // namespace memprof_sim
