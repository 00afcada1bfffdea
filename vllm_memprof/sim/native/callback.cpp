// Host functions and callbacks, as ACL names them.
#include <utility>

#include "error.h"
#include "graph.h"
#include "host_tasks.h"
#include "stream.h"

using namespace memprof_sim;

SHIM_API aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void *arguments) {
  if (!function || !stream_known(stream))
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtLaunchHostFunc: bad argument");
  auto work = [function, arguments] { function(arguments); };
  if (!capture_record(stream, work)) enqueue_host_function(stream, work);
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtSubscribeReport(uint64_t thread, aclrtStream stream) {
  if (!stream_known(stream))
    return fail(ACL_ERROR_RT_INVALID_HANDLE, "aclrtSubscribeReport: unknown stream %p", stream);
  if (!subscribe(thread, stream))
    return fail(ACL_ERROR_REPEAT_SUBSCRIBE, "aclrtSubscribeReport: the stream has a subscriber");
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtUnSubscribeReport(uint64_t thread, aclrtStream stream) {
  if (!unsubscribe(thread, stream))
    return fail(ACL_ERROR_STREAM_NOT_SUBSCRIBE,
                "aclrtUnSubscribeReport: this thread did not subscribe to the stream");
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtLaunchCallback(aclrtCallback function, void *data, aclrtCallbackBlockType,
                                      aclrtStream stream) {
  if (!function || !stream_known(stream))
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtLaunchCallback: bad argument");
  if (!enqueue_callback(stream, [function, data] { function(data); }))
    return fail(ACL_ERROR_RT_STREAM_NO_CB_REG,
                "aclrtLaunchCallback: no thread subscribed to the stream");
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtProcessReport(int32_t timeout_ms) {
  switch (process_callback(timeout_ms)) {
    case Processed::kOne: return ACL_SUCCESS;
    case Processed::kTimeout: return ACL_ERROR_RT_REPORT_TIMEOUT;
    default: return ACL_ERROR_RT_THREAD_SUBSCRIBE;
  }
}
