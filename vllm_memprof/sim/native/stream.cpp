// Streams. Work runs when it is submitted, so a stream is an identity, its attributes and its
// pending host functions.
#include "stream.h"

#include <atomic>
#include <memory>

#include "accounting.h"
#include "device.h"
#include "error.h"
#include "host_tasks.h"
#include "ownership.h"

namespace memprof_sim {
namespace {

struct Stream {
  int32_t id;
  int device;
  uint32_t priority;
  uint32_t flags;
  uint32_t overflow_switch = 0;
  aclrtStreamAttrValue attributes[8] = {};
};

std::atomic<int32_t> next_stream_id{1};  // 0 is the default stream

Registry<Stream> &streams() { return process_state<Registry<Stream>>(); }

aclError create(const char *function, aclrtStream *stream, uint32_t priority, uint32_t flags) {
  if (!stream) return fail(ACL_ERROR_INVALID_PARAM, "%s: null argument", function);
  int device = current_device();
  if (device < 0) return fail(ACL_ERROR_RT_CONTEXT_NULL, "%s: no context", function);
  if (!account_take(physical_device(device), kStreams))
    return fail(ACL_ERROR_RT_NO_STREAM_RESOURCE, "%s",
                no_streams("rtStreamCreate", "create stream").c_str());
  *stream =
      streams().add(std::make_unique<Stream>(Stream{next_stream_id++, device, priority, flags}));
  return ACL_SUCCESS;
}

aclError destroy(const char *function, aclrtStream stream) {
  if (!streams().find(stream))
    return fail(ACL_ERROR_RT_INVALID_HANDLE, "%s: unknown stream %p", function, stream);
  wait_for_stream(stream);
  forget_stream(stream);
  account_give_back(physical_device(streams().take(stream)->device), kStreams, 1);
  return ACL_SUCCESS;
}

aclError synchronize(const char *function, aclrtStream stream) {
  if (!stream_known(stream))
    return fail(ACL_ERROR_RT_INVALID_HANDLE, "%s: unknown stream %p", function, stream);
  wait_for_stream(stream);
  return ACL_SUCCESS;
}

}  // namespace

std::string no_streams(const char *call, const char *action) {
  return "Insufficient_Stream_Resources(EL0009): The stream resources are insufficient.\n"
         "        Solution: Close applications not in use.\n"
         "        TraceBack (most recent call last):\n        " +
         std::string(call) + " execution failed, reason=driver error:no stream resource\n        " +
         action + " failed, runtime result = 207008";
}

bool stream_known(aclrtStream stream) {
  return stream == nullptr || streams().find(stream) != nullptr;
}

}  // namespace memprof_sim

using namespace memprof_sim;

SHIM_API aclError aclrtCreateStream(aclrtStream *stream) {
  return create("aclrtCreateStream", stream, 0, 0);
}

SHIM_API aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t priority,
                                              uint32_t flags) {
  return create("aclrtCreateStreamWithConfig", stream, priority, flags);
}

SHIM_API aclError aclrtDestroyStream(aclrtStream stream) {
  return destroy("aclrtDestroyStream", stream);
}
SHIM_API aclError aclrtDestroyStreamForce(aclrtStream stream) {
  return destroy("aclrtDestroyStreamForce", stream);
}

SHIM_API aclError aclrtSynchronizeStream(aclrtStream stream) {
  return synchronize("aclrtSynchronizeStream", stream);
}

SHIM_API aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) {
  return synchronize("aclrtSynchronizeStreamWithTimeout", stream);
}

SHIM_API aclError aclrtSynchronizeDevice() {
  if (current_device() < 0)
    return fail(ACL_ERROR_RT_CONTEXT_NULL, "aclrtSynchronizeDevice: no context");
  wait_for_all_streams();
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }

SHIM_API aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status) {
  if (!status || !stream_known(stream))
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtStreamQuery: bad argument");
  *status = ACL_STREAM_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtStreamGetId(aclrtStream stream, int32_t *id) {
  if (!id) return fail(ACL_ERROR_INVALID_PARAM, "aclrtStreamGetId: null argument");
  if (!stream) {
    *id = 0;
    return ACL_SUCCESS;
  }
  std::shared_ptr<Stream> found = streams().find(stream);
  if (!found)
    return fail(ACL_ERROR_RT_INVALID_HANDLE, "aclrtStreamGetId: unknown stream %p", stream);
  *id = found->id;
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtStreamGetPriority(aclrtStream stream, uint32_t *priority) {
  std::shared_ptr<Stream> found = streams().find(stream);
  if (!found || !priority)
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtStreamGetPriority: bad argument");
  *priority = found->priority;
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtStreamGetFlags(aclrtStream stream, uint32_t *flags) {
  std::shared_ptr<Stream> found = streams().find(stream);
  if (!found || !flags) return fail(ACL_ERROR_INVALID_PARAM, "aclrtStreamGetFlags: bad argument");
  *flags = found->flags;
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtSetStreamOverflowSwitch(aclrtStream stream, uint32_t flag) {
  std::shared_ptr<Stream> found = streams().find(stream);
  if (found) found->overflow_switch = flag;
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtGetStreamOverflowSwitch(aclrtStream stream, uint32_t *flag) {
  if (!flag) return fail(ACL_ERROR_INVALID_PARAM, "aclrtGetStreamOverflowSwitch: null argument");
  std::shared_ptr<Stream> found = streams().find(stream);
  *flag = found ? found->overflow_switch : 0;
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtSetStreamAttribute(aclrtStream stream, aclrtStreamAttr attribute,
                                          aclrtStreamAttrValue *value) {
  std::shared_ptr<Stream> found = streams().find(stream);
  if (!found || !value || attribute < 0 || attribute >= 8)
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtSetStreamAttribute: bad argument");
  found->attributes[attribute] = *value;
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtGetStreamAttribute(aclrtStream stream, aclrtStreamAttr attribute,
                                          aclrtStreamAttrValue *value) {
  std::shared_ptr<Stream> found = streams().find(stream);
  if (!found || !value || attribute < 0 || attribute >= 8)
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtGetStreamAttribute: bad argument");
  *value = found->attributes[attribute];
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtCtxGetCurrentDefaultStream(aclrtStream *stream) {
  if (!stream)
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtCtxGetCurrentDefaultStream: null argument");
  *stream = nullptr;
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtDeviceGetStreamPriorityRange(int32_t *least, int32_t *greatest) {
  if (!least || !greatest)
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtDeviceGetStreamPriorityRange: null argument");
  *least = 7;
  *greatest = 0;
  return ACL_SUCCESS;
}
