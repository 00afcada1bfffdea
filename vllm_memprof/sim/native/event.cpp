// Events: recorded means complete, with the time of the host's monotonic clock.
#include <atomic>
#include <memory>

#include "clock.h"
#include "error.h"
#include "graph.h"
#include "ownership.h"
#include "stream.h"

namespace memprof_sim {
namespace {

struct Event {
  uint32_t flags;
  uint32_t id;
  std::atomic<uint64_t> recorded_ns{0};        // 0: never recorded
  std::atomic<aclrtStream> captured{nullptr};  // the capturing stream it was recorded on
};

std::atomic<uint32_t> next_event_id{1};

Registry<Event> &events() { return process_state<Registry<Event>>(); }

aclError create(const char *function, aclrtEvent *event, uint32_t flags) {
  if (!event) return fail(ACL_ERROR_INVALID_PARAM, "%s: null argument", function);
  auto fresh = std::make_unique<Event>();
  fresh->flags = flags;
  fresh->id = next_event_id++;
  *event = events().add(std::move(fresh));
  return ACL_SUCCESS;
}

}  // namespace
}  // namespace memprof_sim

using namespace memprof_sim;

SHIM_API aclError aclrtCreateEvent(aclrtEvent *event) {
  return create("aclrtCreateEvent", event, 0);
}
SHIM_API aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flags) {
  return create("aclrtCreateEventWithFlag", event, flags);
}
SHIM_API aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flags) {
  return create("aclrtCreateEventExWithFlag", event, flags);
}

SHIM_API aclError aclrtDestroyEvent(aclrtEvent event) {
  if (!events().take(event))
    return fail(ACL_ERROR_RT_INVALID_HANDLE, "aclrtDestroyEvent: unknown event %p", event);
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
  std::shared_ptr<Event> found = events().find(event);
  if (!found || !stream_known(stream))
    return fail(ACL_ERROR_RT_INVALID_HANDLE, "aclrtRecordEvent: unknown event or stream");
  if (aclError status = capture_event(stream)) return status;
  found->recorded_ns = monotonic_ns();
  found->captured = capture_active(stream) ? stream : nullptr;
  graph_count_task(stream);
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtResetEvent(aclrtEvent event, aclrtStream) {
  std::shared_ptr<Event> found = events().find(event);
  if (!found) return fail(ACL_ERROR_RT_INVALID_HANDLE, "aclrtResetEvent: unknown event %p", event);
  found->recorded_ns = 0;
  return ACL_SUCCESS;
}

// Waiting for an event recorded on a capturing stream pulls the waiting stream into that capture.
SHIM_API aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
  std::shared_ptr<Event> found = events().find(event);
  if (!found || !stream_known(stream))
    return fail(ACL_ERROR_RT_INVALID_HANDLE, "aclrtStreamWaitEvent: unknown event or stream");
  aclrtStream captured = found->captured;
  if (captured && capture_active(captured))
    if (aclError status = capture_join(stream, captured)) return status;
  graph_count_task(stream);
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtStreamWaitEventWithTimeout(aclrtStream stream, aclrtEvent event, int32_t) {
  return aclrtStreamWaitEvent(stream, event);
}

SHIM_API aclError aclrtSynchronizeEvent(aclrtEvent event) {
  if (!events().find(event))
    return fail(ACL_ERROR_RT_INVALID_HANDLE, "aclrtSynchronizeEvent: unknown event %p", event);
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t) {
  return aclrtSynchronizeEvent(event);
}

SHIM_API aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status) {
  if (!status || !events().find(event))
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtQueryEventStatus: bad argument");
  *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus *status) {
  if (!status || !events().find(event))
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtQueryEventWaitStatus: bad argument");
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent start, aclrtEvent end) {
  std::shared_ptr<Event> first = events().find(start), second = events().find(end);
  if (!milliseconds || !first || !second)
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtEventElapsedTime: bad argument");
  uint64_t from = first->recorded_ns, to = second->recorded_ns;
  if (!from || !to)
    return fail(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID,
                "aclrtEventElapsedTime: an event was not recorded");
  *milliseconds = static_cast<float>((static_cast<double>(to) - static_cast<double>(from)) / 1e6);
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t *microseconds) {
  std::shared_ptr<Event> found = events().find(event);
  if (!found || !microseconds)
    return fail(ACL_ERROR_INVALID_PARAM, "aclrtEventGetTimestamp: bad argument");
  *microseconds = found->recorded_ns / 1000;
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtGetEventId(aclrtEvent event, uint32_t *id) {
  std::shared_ptr<Event> found = events().find(event);
  if (!found || !id) return fail(ACL_ERROR_INVALID_PARAM, "aclrtGetEventId: bad argument");
  *id = found->id;
  return ACL_SUCCESS;
}

// Notifies and their hardware addresses: a wait is always satisfied.
SHIM_API aclError aclrtCreateNotify(aclrtNotify *notify, uint64_t) {
  return create("aclrtCreateNotify", notify, 0);
}
SHIM_API aclError aclrtDestroyNotify(aclrtNotify notify) { return aclrtDestroyEvent(notify); }
