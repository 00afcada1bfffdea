// How many bytes of which device every process holds, shared by all processes through one mapped
// file (MEMPROF_SIM_STATE).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace memprof_sim {

constexpr int kMaxDevices = 64;

// As the driver tells them apart: by the module that asked. What its counters do not show is
// kDevice.
enum Component : int {
  kDevice = 0,  // the part of a context that lives in processes on the device
  kApp,         // everything got through aclrtMalloc and aclrtMallocPhysical: torch's segments and
                // workspaces, ATB's pool, the application's own
  kHccl,        // buffers of communicators
  kRuntime,     // the runtime's share of a context, loaded kernels, captured graphs
  kComponentCount,
};
const char *component_name(int component);

// What a device has a number of, for all processes together; counted where MEMPROF_SIM_LIMITS asks
// for it.
enum Counted : int { kStreams = 0, kEvents, kCountedCount };

struct Usage {
  uint64_t current[kComponentCount];
  uint64_t peak[kComponentCount];
};

// When a thread started, in clock ticks since boot, and its state ('R': it runs); 0: there is none.
// A process is its first thread: qemu makes up /proc/<own pid>/stat of a process that it runs.
uint64_t thread_start_time(pid_t pid, pid_t thread, char *thread_state);

// Charges this process; false when the device has not that many bytes left.
bool account_charge(int device, Component component, uint64_t bytes);
// A context: the first one of a device takes more than that of one more process.
bool account_context(int device);
void account_release(int device, Component component, uint64_t bytes);
// Gives back everything this process holds on the device.
void account_release_device(int device);
uint64_t account_device_used(int device);  // all live processes
Usage account_own_usage(int device);       // this process, by component
struct ProcessUsage {
  int32_t pid;
  uint64_t bytes;
};
std::vector<ProcessUsage> account_processes(
    int device);           // the live processes that hold memory of the device
bool account_available();  // the state file could be opened

// Memory that the runtime takes in shares smaller than a page (graphs): the sum is charged in huge
// pages.
bool account_runtime_share(int device, int64_t delta);
// An operator's binary is loaded to the device with its first workspace, in pools of huge pages;
// kernels_bytes is all of them at once, with the first operator that needs a workspace. False when
// they do not fit.
bool account_kernels(int device, const std::string &operator_name);

// One more of them for this process; false when the device has no more.
bool account_take(int device, Counted what);
void account_give_back(int device, Counted what, uint64_t count);

// A physical allocation that another process may import.
struct SharedHandle {
  uint64_t key;
  int32_t pid;
  int32_t fd;
  int32_t device;
  uint64_t offset;
  uint64_t bytes;
};
uint64_t share_key();                        // a new one, never 0
int share_open(const SharedHandle &handle);  // a descriptor of the file it lies in; negative: errno
bool share_publish(const SharedHandle &handle);
bool share_find(uint64_t key, SharedHandle *handle);
void share_forget(uint64_t key);

}  // namespace memprof_sim
