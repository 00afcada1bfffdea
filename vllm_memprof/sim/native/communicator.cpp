// HCCL. A communicator is cheap to create; its send and receive buffers are taken from the device
// at its first collective. No data crosses processes: a rank sees what it would if all ranks held
// the same bytes, within the profile's copy limit.
#include "communicator.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "accounting.h"
#include "copy.h"
#include "device.h"
#include "error.h"
#include "graph.h"
#include "memory.h"
#include "ownership.h"
#include "poison.h"
#include "profile.h"

namespace memprof_sim {
namespace {

struct Communicator {
  uint32_t ranks;
  uint32_t rank;
  uint64_t buffer_bytes;  // one buffer
  std::string name;
  std::mutex mutex;
  std::vector<void *> buffers;
  void *base = nullptr;
  void *vector[2] = {};  // for the vector cores: of plain calls, of captured ones
  bool touched = false;
};

std::atomic<uint32_t> next_communicator{0};

Registry<Communicator> &communicators() { return process_state<Registry<Communicator>>(); }

uint64_t default_buffer_mib() {
  const char *configured = getenv("HCCL_BUFFSIZE");
  uint64_t mib = configured ? strtoull(configured, nullptr, 10) : 0;
  return mib ? mib : profile().hccl_buffer_mib;
}

HcclResult hccl_fail(HcclResult code, const char *what) {
  fail(ACL_ERROR_FAILURE, "%s", what);
  return code;
}

HcclResult no_memory(uint64_t bytes) {
  fail(ACL_ERROR_RT_MEMORY_ALLOCATION,
       "Allocation_Failure(EI0007): Failed to allocate resource[DeviceMemory] with info "
       "[size:%llu]. "
       "Reason: Memory resources are exhausted.",
       static_cast<unsigned long long>(bytes));
  return HCCL_E_MEMORY;
}

HcclResult create(const char *function, uint32_t ranks, uint32_t rank, const HcclCommConfig *config,
                  HcclComm *communicator) {
  if (!communicator || rank >= ranks) return hccl_fail(HCCL_E_PARA, function);
  auto fresh = std::make_unique<Communicator>();
  fresh->ranks = ranks;
  fresh->rank = rank;
  uint64_t mib = default_buffer_mib();
  if (config && config->hcclBufferSize &&
      config->hcclBufferSize != HCCL_COMM_BUFFSIZE_CONFIG_NOT_SET)
    mib = config->hcclBufferSize;
  fresh->buffer_bytes = mib << 20;
  uint32_t id = next_communicator++;
  if (config && config->hcclCommName[0])
    fresh->name =
        std::string(config->hcclCommName, strnlen(config->hcclCommName, COMM_NAME_MAX_LENGTH - 1));
  else
    fresh->name = "memprof_sim_" + std::to_string(getpid()) + "_" + std::to_string(id);
  *communicator = communicators().add(std::move(fresh));
  return HCCL_SUCCESS;
}

// Data and flags of collectives on the vector cores (hcomm, ccl_buffer_manager.h: AIV_DATA_SIZE,
// AIV_FLAG_SIZE). They run there by HCCL_OP_EXPANSION_MODE alone (externalinput.cc).
constexpr uint64_t kVectorBytes = 40ull << 20;

bool on_vector_cores() {
  const char *mode = getenv("HCCL_OP_EXPANSION_MODE");
  return mode && strcmp(mode, "AIV") == 0 && profile().soc_name.rfind("Ascend910", 0) == 0;
}

HcclResult take(void **block, uint64_t bytes) {
  if (*block || bytes == 0) return HCCL_SUCCESS;
  return device_allocate(block, bytes, kHccl) == ACL_SUCCESS ? HCCL_SUCCESS : no_memory(bytes);
}

// What HCCL takes for a communicator beside its buffers, with its first collective. Transfers
// between two ranks take none of it. (hcomm, CollSendExecutor: no buffers of the vector cores)
HcclResult take_base(Communicator &communicator, bool captured) {
  std::lock_guard<std::mutex> guard(communicator.mutex);
  if (HcclResult status = take(&communicator.base, profile().hccl_base_bytes)) return status;
  return take(&communicator.vector[captured], on_vector_cores() ? kVectorBytes : 0);
}

HcclResult touch(const std::shared_ptr<Communicator> &communicator) {
  std::lock_guard<std::mutex> guard(communicator->mutex);
  if (communicator->touched) return HCCL_SUCCESS;
  for (uint64_t index = 0; index < profile().hccl_buffers && communicator->buffer_bytes; ++index) {
    void *buffer = nullptr;
    if (device_allocate(&buffer, communicator->buffer_bytes, kHccl) != ACL_SUCCESS) {
      for (void *held : communicator->buffers) device_free(held);
      communicator->buffers.clear();
      return no_memory(communicator->buffer_bytes);
    }
    communicator->buffers.push_back(buffer);
  }
  communicator->touched = true;
  return HCCL_SUCCESS;
}

uint64_t type_bytes(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_UINT8: return 1;
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_UINT16:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_BFP16: return 2;
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_UINT32:
    case HCCL_DATA_TYPE_FP32: return 4;
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_UINT64:
    case HCCL_DATA_TYPE_FP64: return 8;
    case HCCL_DATA_TYPE_INT128: return 16;
    default: return 1;
  }
}

// What every transfer does first: the communicator must exist, and its buffers are there from now
// on.
HcclResult begin_transfer(const char *function, HcclComm handle, aclrtStream stream,
                          std::shared_ptr<Communicator> *communicator) {
  *communicator = communicators().find(handle);
  if (!*communicator) return hccl_fail(HCCL_E_PARA, function);
  graph_count_task(stream);
  return touch(*communicator);
}

HcclResult begin(const char *function, HcclComm handle, aclrtStream stream,
                 std::shared_ptr<Communicator> *communicator) {
  if (HcclResult status = begin_transfer(function, handle, stream, communicator)) return status;
  return take_base(**communicator, capture_active(stream));
}

void deliver(void *destination, const void *source, uint64_t bytes) {
  uint64_t left_destination = 0, left_source = 0;
  if (!destination || !source || destination == source || bytes == 0) return;
  if (!device_range(destination, &left_destination, nullptr) ||
      !device_range(source, &left_source, nullptr))
    return;
  if (bytes <= left_destination && bytes <= left_source)
    keep_copy(destination, source, bytes, true);
}

// Other ranks' data does not arrive: what a collective of several ranks delivers is not its result.
void lack_others(const std::shared_ptr<Communicator> &communicator, const char *function,
                 const void *receive, uint64_t bytes) {
  if (poison_mode && communicator->ranks > 1 && receive && device_range(receive, nullptr, nullptr))
    poison_left(receive, bytes, function);
}

}  // namespace

bool communicator_touch_by_name(const char *name, aclError *status) {
  for (const std::shared_ptr<Communicator> &communicator : communicators().all())
    if (communicator->name == name) {
      bool taken =
          touch(communicator) == HCCL_SUCCESS && take_base(*communicator, false) == HCCL_SUCCESS;
      *status = taken ? ACL_SUCCESS : ACL_ERROR_RT_MEMORY_ALLOCATION;
      return true;
    }
  return false;
}

}  // namespace memprof_sim

using namespace memprof_sim;

SHIM_API HcclResult HcclGetRootInfo(HcclRootInfo *root) {
  if (!root) return hccl_fail(HCCL_E_PTR, "HcclGetRootInfo: null argument");
  memset(root, 0, sizeof *root);
  snprintf(root->internal, sizeof root->internal, "memprof-sim-%d-%u", getpid(),
           next_communicator++);
  return HCCL_SUCCESS;
}

SHIM_API HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo *, uint32_t rank,
                                         HcclComm *communicator) {
  return create("HcclCommInitRootInfo", ranks, rank, nullptr, communicator);
}

SHIM_API HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo *, uint32_t rank,
                                               const HcclCommConfig *config,
                                               HcclComm *communicator) {
  return create("HcclCommInitRootInfoConfig", ranks, rank, config, communicator);
}

SHIM_API HcclResult HcclCreateSubCommConfig(HcclComm *, uint32_t ranks, uint32_t *, uint64_t,
                                            uint32_t rank, HcclCommConfig *config,
                                            HcclComm *communicator) {
  return create("HcclCreateSubCommConfig", ranks, rank, config, communicator);
}

SHIM_API HcclResult HcclCommInitAll(uint32_t count, int32_t *, HcclComm *result) {
  if (!result) return hccl_fail(HCCL_E_PTR, "HcclCommInitAll: null argument");
  for (uint32_t rank = 0; rank < count; ++rank)
    if (HcclResult status = create("HcclCommInitAll", count, rank, nullptr, &result[rank]))
      return status;
  return HCCL_SUCCESS;
}

SHIM_API HcclResult HcclCommDestroy(HcclComm handle) {
  std::shared_ptr<Communicator> communicator = communicators().take(handle);
  if (!communicator) return hccl_fail(HCCL_E_PARA, "HcclCommDestroy: unknown communicator");
  for (void *buffer : communicator->buffers) device_free(buffer);
  if (communicator->base) device_free(communicator->base);
  for (void *block : communicator->vector)
    if (block) device_free(block);
  return HCCL_SUCCESS;
}

SHIM_API HcclResult HcclGetCommName(HcclComm handle, char *name) {
  std::shared_ptr<Communicator> communicator = communicators().find(handle);
  if (!communicator || !name) return hccl_fail(HCCL_E_PARA, "HcclGetCommName: bad argument");
  snprintf(name, COMM_NAME_MAX_LENGTH, "%s", communicator->name.c_str());
  return HCCL_SUCCESS;
}

SHIM_API HcclResult HcclGetRankSize(HcclComm handle, uint32_t *ranks) {
  std::shared_ptr<Communicator> communicator = communicators().find(handle);
  if (!communicator || !ranks) return hccl_fail(HCCL_E_PARA, "HcclGetRankSize: bad argument");
  *ranks = communicator->ranks;
  return HCCL_SUCCESS;
}

SHIM_API HcclResult HcclGetRankId(HcclComm handle, uint32_t *rank) {
  std::shared_ptr<Communicator> communicator = communicators().find(handle);
  if (!communicator || !rank) return hccl_fail(HCCL_E_PARA, "HcclGetRankId: bad argument");
  *rank = communicator->rank;
  return HCCL_SUCCESS;
}

SHIM_API HcclResult HcclGetCommAsyncError(HcclComm handle, HcclResult *error) {
  if (!communicators().find(handle) || !error)
    return hccl_fail(HCCL_E_PARA, "HcclGetCommAsyncError: bad argument");
  *error = HCCL_SUCCESS;
  return HCCL_SUCCESS;
}

SHIM_API const char *HcclGetErrorString(HcclResult code) {
  return code == HCCL_SUCCESS ? "success" : "error of the simulated HCCL";
}

// How many of the HcclCommConfig fields are honoured: all up to the last one known.
SHIM_API uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_COMM_NAME + 1; }

SHIM_API HcclResult HcclAllReduce(void *send, void *receive, uint64_t count, HcclDataType type,
                                  HcclReduceOp, HcclComm handle, aclrtStream stream) {
  std::shared_ptr<Communicator> communicator;
  if (HcclResult status = begin("HcclAllReduce", handle, stream, &communicator)) return status;
  deliver(receive, send, count * type_bytes(type));
  lack_others(communicator, "HcclAllReduce", receive, count * type_bytes(type));
  return HCCL_SUCCESS;
}

SHIM_API HcclResult HcclReduce(void *send, void *receive, uint64_t count, HcclDataType type,
                               HcclReduceOp, uint32_t root, HcclComm handle, aclrtStream stream) {
  std::shared_ptr<Communicator> communicator;
  if (HcclResult status = begin("HcclReduce", handle, stream, &communicator)) return status;
  if (communicator->rank == root) deliver(receive, send, count * type_bytes(type));
  lack_others(communicator, "HcclReduce", receive, count * type_bytes(type));
  return HCCL_SUCCESS;
}

SHIM_API HcclResult HcclBroadcast(void *buffer, uint64_t count, HcclDataType type, uint32_t root,
                                  HcclComm handle, aclrtStream stream) {
  std::shared_ptr<Communicator> communicator;
  if (HcclResult status = begin("HcclBroadcast", handle, stream, &communicator)) return status;
  if (communicator->rank != root)
    lack_others(communicator, "HcclBroadcast", buffer, count * type_bytes(type));
  return HCCL_SUCCESS;
}

SHIM_API HcclResult HcclAllGather(void *send, void *receive, uint64_t count, HcclDataType type,
                                  HcclComm handle, aclrtStream stream) {
  std::shared_ptr<Communicator> communicator;
  if (HcclResult status = begin("HcclAllGather", handle, stream, &communicator)) return status;
  uint64_t bytes = count * type_bytes(type);
  for (uint32_t rank = 0; rank < communicator->ranks; ++rank)
    deliver(static_cast<char *>(receive) + rank * bytes, send, bytes);
  lack_others(communicator, "HcclAllGather", receive, communicator->ranks * bytes);
  return HCCL_SUCCESS;
}

// A pointer to constant bytes for both buffers in older headers.
using VaryingBuffer = decltype(memprof_sim::first_parameter(HcclAllGatherV));

SHIM_API HcclResult HcclAllGatherV(VaryingBuffer send, uint64_t count, VaryingBuffer receive,
                                   const void *, const void *displacements, HcclDataType type,
                                   HcclComm handle, aclrtStream stream) {
  std::shared_ptr<Communicator> communicator;
  if (HcclResult status = begin("HcclAllGatherV", handle, stream, &communicator)) return status;
  if (displacements) {
    uint64_t offset = static_cast<const uint64_t *>(displacements)[communicator->rank];
    deliver(static_cast<char *>(const_cast<void *>(receive)) + offset * type_bytes(type), send,
            count * type_bytes(type));
  }
  return HCCL_SUCCESS;
}

SHIM_API HcclResult HcclReduceScatter(void *send, void *receive, uint64_t count, HcclDataType type,
                                      HcclReduceOp, HcclComm handle, aclrtStream stream) {
  std::shared_ptr<Communicator> communicator;
  if (HcclResult status = begin("HcclReduceScatter", handle, stream, &communicator)) return status;
  uint64_t bytes = count * type_bytes(type);
  deliver(receive, static_cast<char *>(send) + communicator->rank * bytes, bytes);
  lack_others(communicator, "HcclReduceScatter", receive, bytes);
  return HCCL_SUCCESS;
}

SHIM_API HcclResult HcclReduceScatterV(VaryingBuffer, const void *, const void *, VaryingBuffer,
                                       uint64_t, HcclDataType, HcclReduceOp, HcclComm handle,
                                       aclrtStream stream) {
  std::shared_ptr<Communicator> communicator;
  return begin("HcclReduceScatterV", handle, stream, &communicator);
}

SHIM_API HcclResult HcclScatter(void *send, void *receive, uint64_t count, HcclDataType type,
                                uint32_t root, HcclComm handle, aclrtStream stream) {
  std::shared_ptr<Communicator> communicator;
  if (HcclResult status = begin("HcclScatter", handle, stream, &communicator)) return status;
  uint64_t bytes = count * type_bytes(type);
  if (communicator->rank == root) deliver(receive, static_cast<char *>(send) + root * bytes, bytes);
  return HCCL_SUCCESS;
}

SHIM_API HcclResult HcclBarrier(HcclComm handle, aclrtStream stream) {
  std::shared_ptr<Communicator> communicator;
  return begin("HcclBarrier", handle, stream, &communicator);
}

SHIM_API HcclResult HcclSend(void *, uint64_t, HcclDataType, uint32_t, HcclComm handle,
                             aclrtStream stream) {
  std::shared_ptr<Communicator> communicator;
  return begin_transfer("HcclSend", handle, stream, &communicator);
}

SHIM_API HcclResult HcclRecv(void *buffer, uint64_t count, HcclDataType type, uint32_t,
                             HcclComm handle, aclrtStream stream) {
  std::shared_ptr<Communicator> communicator;
  if (HcclResult status = begin_transfer("HcclRecv", handle, stream, &communicator)) return status;
  lack_others(communicator, "HcclRecv", buffer, count * type_bytes(type));
  return HCCL_SUCCESS;
}

SHIM_API HcclResult HcclBatchSendRecv(HcclSendRecvItem *, uint32_t, HcclComm handle,
                                      aclrtStream stream) {
  std::shared_ptr<Communicator> communicator;
  return begin_transfer("HcclBatchSendRecv", handle, stream, &communicator);
}

SHIM_API HcclResult HcclAlltoAll(const void *send, uint64_t count, HcclDataType type,
                                 const void *receive, uint64_t, HcclDataType, HcclComm handle,
                                 aclrtStream stream) {
  std::shared_ptr<Communicator> communicator;
  if (HcclResult status = begin("HcclAlltoAll", handle, stream, &communicator)) return status;
  deliver(const_cast<void *>(receive), send, count * type_bytes(type) * communicator->ranks);
  lack_others(communicator, "HcclAlltoAll", receive,
              count * type_bytes(type) * communicator->ranks);
  return HCCL_SUCCESS;
}

SHIM_API HcclResult HcclAlltoAllV(const void *, const void *, const void *, HcclDataType,
                                  const void *, const void *, const void *, HcclDataType,
                                  HcclComm handle, aclrtStream stream) {
  std::shared_ptr<Communicator> communicator;
  return begin("HcclAlltoAllV", handle, stream, &communicator);
}
