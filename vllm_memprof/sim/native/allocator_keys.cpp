// Keys of torch's allocator configuration that its CUDA build registers, taken back before
// torch_npu registers its own: torch 2.14 ends the process where two allocators bring one key, and
// the index has no build of it without CUDA for x86-64. (c10/core/AllocatorConfig.h and
// c10/cuda/CUDAAllocatorConfig.h::getKeys, 2.14; an older torch exports no set)
#include <dlfcn.h>

#include <string>
#include <unordered_set>

namespace {

constexpr const char *KEYS_OF_TORCH =
    "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig14getMutableKeysB5cxx11Ev";

// Runs when the loader has mapped the shim: before the initializers of torch_npu, which links it.
__attribute__((constructor)) void forget_keys_of_cuda() {
  void *torch = dlopen("libc10.so", RTLD_NOLOAD | RTLD_LAZY);
  void *found = torch ? dlsym(torch, KEYS_OF_TORCH) : nullptr;
  if (!found) return;
  auto &keys = reinterpret_cast<std::unordered_set<std::string> &(*)()>(found)();
  for (const char *key :
       {"backend", "graph_capture_record_stream_reuse", "per_process_memory_fraction",
        "pinned_free_catch_all", "pinned_num_register_threads", "pinned_reserve_segment_size_mb",
        "pinned_use_cuda_host_register", "pinned_use_hip_host_register",
        "release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "throw_on_cudamalloc_oom"})
    keys.erase(key);
}

}  // namespace
