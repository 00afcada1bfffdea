// ATB. The mangled names are generated from what libop_plugin_atb.so links; their bodies call in
// here. An operation is an object whose virtual table follows atb::Operation: destructors, GetName,
// InferShape, GetInputNum, GetOutputNum, Setup, Execute.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "accounting.h"
#include "atb.h"
#include "device.h"
#include "error.h"
#include "kernels/attention.h"
#include "memory.h"
#include "ownership.h"
#include "poison.h"
#include "profile.h"

namespace memprof_sim {
namespace {

// The profile's pool is that of 32 blocks, ATB's default and least; another number of blocks takes
// as much more.
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
  static bool charged[kMaxDevices];
  int device = current_device();
  if (device < 0)
    return fail(ACL_ERROR_RT_CONTEXT_NULL, "an ATB operation was set up without a context");
  std::lock_guard<std::mutex> guard(mutex);
  if (charged[device] || profile().atb_pool_bytes == 0) return ACL_SUCCESS;
  void *pool = nullptr;
  if (aclError status = device_allocate(&pool, pool_bytes(), kApp)) return status;
  charged[device] = true;
  return ACL_SUCCESS;
}

// ATB's own types, as its public headers lay them out (atb/types.h, atb/svector.h).
struct AtbTensor {
  int32_t type;
  int32_t format;
  int64_t dims[8];
  uint64_t dim_count;
  void *device_data;
  void *host_data;
  uint64_t data_bytes;
};
struct AtbTensors {
  static constexpr size_t kRoom = 65;
  uint64_t capacity;
  uint64_t size;
  AtbTensor storage[kRoom];
  AtbTensor *heap;
};
struct AtbPack {
  AtbTensors in;
  AtbTensors out;
};

// The inputs or the results of a call; empty when the object does not look like one of the layout
// known here.
std::vector<aclTensor> tensors_of(const AtbPack *pack, AtbTensors AtbPack::*which) {
  std::vector<aclTensor> result;
  if (!pack || pack->in.heap || pack->in.size >= AtbTensors::kRoom || pack->out.heap ||
      pack->out.size >= AtbTensors::kRoom)
    return {};
  for (uint64_t index = 0; index < (pack->*which).size; ++index) {
    const AtbTensor &given = (pack->*which).storage[index];
    if (given.dim_count > 8) return {};
    aclTensor tensor{};
    tensor.type = static_cast<aclDataType>(given.type);
    tensor.format = static_cast<aclFormat>(given.format);
    tensor.shape.assign(given.dims, given.dims + given.dim_count);
    tensor.strides = dense_strides(tensor.shape);  // as all of ATB's tensors
    tensor.data = given.device_data;
    result.push_back(tensor);
  }
  return result;
}

// The one operation that computes: (key, value, key cache, value cache, slots), or (key, key cache,
// slots) with one cache.
void reshape_and_cache(const std::vector<aclTensor> &inputs) {
  if (inputs.size() == 5) {
    write_cache(inputs[0], inputs[4], inputs[2]);
    write_cache(inputs[1], inputs[4], inputs[3]);
  } else if (inputs.size() == 3) {
    write_cache(inputs[0], inputs[2], inputs[1]);
  }
}

class Operation {
 public:
  explicit Operation(const char *family) : family_(std::string("Atb") + family) {}
  virtual ~Operation() = default;
  virtual std::string GetName() const { return family_; }
  virtual int InferShape(const void *, void *) const {
    return fail_unimplemented("atb::Operation::InferShape");
  }
  virtual uint32_t GetInputNum() const { return 0; }
  virtual uint32_t GetOutputNum() const { return 0; }
  virtual int Setup(const void *pack, uint64_t &workspace_bytes, void *) {
    uint64_t largest = 0;
    for (auto which : {&AtbPack::in, &AtbPack::out})
      for (const aclTensor &tensor : tensors_of(static_cast<const AtbPack *>(pack), which))
        largest = std::max(largest, tensor_bytes(tensor));
    workspace_bytes = workspace_bytes_for(family_, largest);
    return charge_pool();
  }
  virtual int Execute(const void *pack, uint8_t *, uint64_t, void *) {
    trace("%s", family_.c_str());
    if (!account_kernels(physical_device(current_device()), family_))
      return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "no device memory left for the kernels of %s",
                  family_.c_str());
    auto *tensors = static_cast<const AtbPack *>(pack);
    Call call;
    call.name = family_;
    for (auto which : {&AtbPack::in, &AtbPack::out}) {
      call.arguments.emplace_back();  // no attribute is looked at; it parts inputs and results
      for (const aclTensor &tensor : tensors_of(tensors, which)) {
        call.arguments.emplace_back();
        call.arguments.back().kind = Kind::kTensor;
        call.arguments.back().tensor = tensor;
      }
    }
    PoisonCall poisoned(call, "");
    if (family_ == "AtbReshapeAndCache") reshape_and_cache(tensors_of(tensors, &AtbPack::in));
    return ACL_SUCCESS;
  }
  virtual int Reserved0() {
    return fail_unimplemented("an unknown virtual method of atb::Operation");
  }
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

// Operations of two stages by their address; a caller that keeps one hands it in again.
struct Kept {
  std::mutex mutex;
  std::set<const void *> operations;
};
Kept &kept() { return forked_state<Kept>(); }

}  // namespace

bool is_atb_operation(const void *operation) {
  std::lock_guard<std::mutex> guard(kept().mutex);
  return kept().operations.count(operation) != 0;
}

aclError plan_atb_operation(const char *name, uint64_t largest_tensor_bytes, uint64_t *bytes,
                            void **operation) {
  if (!*operation) {
    *operation = hand_out<Operation>(name + strlen("Atb"));
    std::lock_guard<std::mutex> guard(kept().mutex);
    kept().operations.insert(*operation);
  }
  *bytes = workspace_bytes_for(name, largest_tensor_bytes);
  return charge_pool();
}

}  // namespace memprof_sim

using namespace memprof_sim;

extern "C" int memprof_sim_atb_run(void *workspace, uint64_t bytes, void *operation, void *context)
    __attribute__((visibility("hidden")));

int memprof_sim_atb_run(void *workspace, uint64_t bytes, void *operation, void *context) {
  if (!is_atb_operation(operation))
    return fail(ACL_ERROR_INVALID_PARAM, "an operator of ATB was run without its operation");
  return static_cast<Operation *>(operation)->Execute(nullptr, static_cast<uint8_t *>(workspace),
                                                      bytes, context);
}

SHIM_INTERNAL int memprof_sim_atb_create_operation(const void *, void **operation,
                                                   const char *family) {
  if (!operation) return fail(ACL_ERROR_INVALID_PARAM, "atb::CreateOperation: null argument");
  *operation = hand_out<Operation>(family);
  return ACL_SUCCESS;
}

SHIM_INTERNAL int memprof_sim_atb_destroy_operation(void *operation) {
  {
    std::lock_guard<std::mutex> guard(kept().mutex);
    kept().operations.erase(operation);
  }
  take_back(static_cast<Operation *>(operation));
  return ACL_SUCCESS;
}

SHIM_INTERNAL int memprof_sim_atb_create_context(void **context) {
  if (!context) return fail(ACL_ERROR_INVALID_PARAM, "atb::CreateContext: null argument");
  *context = hand_out<Context>();
  return ACL_SUCCESS;
}

SHIM_INTERNAL int memprof_sim_atb_destroy_context(void *context) {
  take_back(static_cast<Context *>(context));
  return ACL_SUCCESS;
}

// The size of a tensor is what its owner wrote.
SHIM_INTERNAL uint64_t memprof_sim_atb_tensor_size(const void *tensor) {
  return static_cast<const AtbTensor *>(tensor)->data_bytes;
}
