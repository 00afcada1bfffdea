// ATB. The mangled names are generated from what libop_plugin_atb.so links; their bodies call in here. An operation is an
// object whose virtual table follows atb::Operation: destructors, GetName, InferShape, GetInputNum, GetOutputNum, Setup, Execute.
#include "shim.h"

#include <atomic>
#include <cstdlib>

namespace memprof_sim {
namespace {

// The profile's pool is that of 32 blocks, ATB's default and least; another number of blocks takes as much more.
uint64_t pool_bytes() {
  constexpr uint64_t kDefaultBlocks = 32, kMostBlocks = 1024;
  const char *configured = getenv("ATB_DEVICE_TILING_BUFFER_BLOCK_NUM");
  uint64_t blocks = configured ? strtoull(configured, nullptr, 10) : 0;
  if (blocks < kDefaultBlocks || blocks > kMostBlocks) blocks = kDefaultBlocks;
  return profile().atb_pool_bytes / kDefaultBlocks * blocks;
}

// ATB's tiling buffer pool appears at the first operation that is set up in a process, per device.
aclError charge_pool() {
  static std::mutex mutex;
  static bool *charged = new bool[64]();
  int device = current_device();
  if (device < 0) return fail(ACL_ERROR_RT_CONTEXT_NULL, "an ATB operation was set up without a context");
  std::lock_guard<std::mutex> guard(mutex);
  if (charged[device] || profile().atb_pool_bytes == 0) return ACL_SUCCESS;
  void *pool = nullptr;
  if (aclError status = device_allocate(&pool, pool_bytes(), kApp)) return status;
  charged[device] = true;
  return ACL_SUCCESS;
}

class Operation {
 public:
  explicit Operation(const char *family) : family_(std::string("Atb") + family) {}
  virtual ~Operation() = default;
  virtual std::string GetName() const { return family_; }
  virtual int InferShape(const void *, void *) const { return fail_unimplemented("atb::Operation::InferShape"); }
  virtual uint32_t GetInputNum() const { return 0; }
  virtual uint32_t GetOutputNum() const { return 0; }
  virtual int Setup(const void *, uint64_t &workspace_bytes, void *) {
    workspace_bytes = workspace_bytes_for(family_, 0);  // what the arguments hold is not looked at
    return charge_pool();
  }
  virtual int Execute(const void *, uint8_t *, uint64_t, void *) {
    trace("%s", family_.c_str());
    if (account_kernels(physical_device(current_device()), family_)) return ACL_SUCCESS;
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "no device memory left for the kernels of %s", family_.c_str());
  }
  virtual int Reserved0() { return fail_unimplemented("an unknown virtual method of atb::Operation"); }
  virtual int Reserved1() { return Reserved0(); }
  virtual int Reserved2() { return Reserved0(); }

 private:
  std::string family_;
};

class Context {
 public:
  virtual ~Context() = default;
  virtual int SetExecuteStream(void *stream) {
    stream_ = stream;
    return 0;
  }
  virtual void *GetExecuteStream() const { return stream_; }
  virtual int SetAsyncTilingCopyStatus(bool on) {
    async_copy_ = on;
    return 0;
  }
  virtual bool GetAsyncTilingCopyStatus() const { return async_copy_; }
  virtual int SetExecuteStreams(const void *) { return 0; }
  virtual int Reserved0() { return 0; }
  virtual int Reserved1() { return 0; }
  virtual int Reserved2() { return 0; }
  virtual int Reserved3() { return 0; }
  virtual int Reserved4() { return 0; }

 private:
  void *stream_ = nullptr;
  bool async_copy_ = false;
};

}  // namespace
}  // namespace memprof_sim

using namespace memprof_sim;

extern "C" {
__attribute__((visibility("hidden"))) int memprof_sim_atb_create_operation(const void *, void **operation, const char *family) {
  if (!operation) return fail(ACL_ERROR_INVALID_PARAM, "atb::CreateOperation: null argument");
  *operation = new Operation(family);
  return ACL_SUCCESS;
}

__attribute__((visibility("hidden"))) int memprof_sim_atb_destroy_operation(void *operation) {
  delete static_cast<Operation *>(operation);
  return ACL_SUCCESS;
}

__attribute__((visibility("hidden"))) int memprof_sim_atb_create_context(void **context) {
  if (!context) return fail(ACL_ERROR_INVALID_PARAM, "atb::CreateContext: null argument");
  *context = new Context;
  return ACL_SUCCESS;
}

__attribute__((visibility("hidden"))) int memprof_sim_atb_destroy_context(void *context) {
  delete static_cast<Context *>(context);
  return ACL_SUCCESS;
}

// atb::Tensor is {TensorDesc desc; void *deviceData; void *hostData; uint64_t dataSize}: the size is what its owner wrote.
__attribute__((visibility("hidden"))) uint64_t memprof_sim_atb_tensor_size(const void *tensor) {
  struct Desc {
    int32_t type;
    int32_t format;
    int64_t dims[8];
    uint64_t dim_count;
  };
  struct Tensor {
    Desc desc;
    void *device_data;
    void *host_data;
    uint64_t data_bytes;
  };
  return static_cast<const Tensor *>(tensor)->data_bytes;
}
}
