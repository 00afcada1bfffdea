// Graph capture (aclmdlRI*). A captured graph remembers its host functions and how many tasks each
// of its streams has. What CANN's runtime takes for it: a buffer for the arguments of each task,
// where it is captured (UmaArgLoader), and a queue for each stream, where the graph runs for the
// first time (CaptureModel::BuildSqCq, Stream::AllocSoftwareSqAddr).
#include "graph.h"

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "accounting.h"
#include "device.h"
#include "error.h"
#include "host_tasks.h"
#include "ownership.h"
#include "profile.h"
#include "stream.h"

namespace memprof_sim {
namespace {

struct Graph {
  uint32_t id;
  int device;
  std::string name;
  std::map<aclrtStream, uint64_t> tasks;  // by stream
  std::atomic<uint64_t> bytes{0};         // taken from the device
  std::atomic<bool> queued{false};        // its queues are taken
  std::atomic<uint64_t> events{0};        // recorded while it was captured
  std::vector<std::function<void()>> host_functions;
  std::vector<std::pair<aclrtCallback, void *>> on_destroy;
};

struct TaskGroup {};

struct Captures {
  std::mutex mutex;
  std::map<aclrtStream, std::shared_ptr<Graph>> active;  // streams under capture
  std::map<aclrtStream, aclrtStream> origin;             // where their capture began
  std::map<aclrtStream, std::unique_ptr<TaskGroup>> open_group;
  std::map<aclrtStream, std::shared_ptr<TaskGroup>> updating;
  std::atomic<int> count{0};  // of active captures: keeps the common path cheap
};

Captures &captures() { return process_state<Captures>(); }

std::atomic<uint32_t> next_graph_id{1};

Registry<Graph> &graphs() { return process_state<Registry<Graph>>(); }
Registry<TaskGroup> &task_groups() { return process_state<Registry<TaskGroup>>(); }

std::shared_ptr<Graph> active_graph(aclrtStream stream) {
  Captures &state = captures();
  if (state.count == 0) return nullptr;
  std::lock_guard<std::mutex> guard(state.mutex);
  auto found = state.active.find(stream);
  return found == state.active.end() ? nullptr : found->second;
}

constexpr uint64_t kQueueEntryBytes = 64;  // rtStarsSqe_t

uint64_t task_count(const Graph &graph) {
  uint64_t count = 0;
  for (const auto &[stream, tasks] : graph.tasks) count += tasks;
  return count;
}

// The smallest queue, doubled until it holds an entry for each task and one more.
uint64_t queue_bytes(uint64_t tasks) {
  uint64_t bytes = profile().graph_queue_bytes;
  while (bytes && bytes < (tasks + 1) * kQueueEntryBytes) bytes *= 2;
  return bytes;
}

bool take_runtime_share(Graph &graph, uint64_t bytes) {
  if (!account_runtime_share(physical_device(graph.device), static_cast<int64_t>(bytes)))
    return false;
  graph.bytes += bytes;
  return true;
}

bool take_queues(Graph &graph) {
  if (graph.queued.exchange(true)) return true;
  uint64_t bytes = 0;
  for (const auto &[stream, tasks] : graph.tasks) bytes += queue_bytes(tasks);
  if (take_runtime_share(graph, bytes)) return true;
  graph.queued = false;
  return false;
}

thread_local aclmdlRICaptureMode thread_mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;

}  // namespace

bool capture_active(aclrtStream stream) { return active_graph(stream) != nullptr; }

bool capture_record(aclrtStream stream, std::function<void()> host_function) {
  std::shared_ptr<Graph> graph = active_graph(stream);
  if (!graph) return false;
  std::lock_guard<std::mutex> guard(captures().mutex);
  graph->host_functions.push_back(std::move(host_function));
  ++graph->tasks[stream];
  return true;
}

void graph_count_task(aclrtStream stream) {
  std::shared_ptr<Graph> graph = active_graph(stream);
  if (!graph) return;
  std::lock_guard<std::mutex> guard(captures().mutex);
  ++graph->tasks[stream];
}

aclError capture_join(aclrtStream stream, aclrtStream captured) {
  Captures &state = captures();
  std::lock_guard<std::mutex> guard(state.mutex);
  auto found = state.active.find(captured);
  if (found == state.active.end() || state.active.count(stream)) return ACL_SUCCESS;
  if (!account_take(physical_device(found->second->device), kStreams))
    return fail(ACL_ERROR_RT_NO_STREAM_RESOURCE, "New capture stream failed.\n        %s",
                no_streams("rtStreamWaitEvent", "stream wait event").c_str());
  state.active[stream] = found->second;
  state.origin[stream] = state.origin[captured];
  found->second->tasks[stream];
  return ACL_SUCCESS;
}

aclError capture_event(aclrtStream stream) {
  std::shared_ptr<Graph> graph = active_graph(stream);
  if (!graph) return ACL_SUCCESS;
  if (!account_take(physical_device(graph->device), kEvents))
    return fail(ACL_ERROR_RT_NO_EVENT_RESOURCE,
                "Insufficient_Event_Resources(EL0008): The event resources are insufficient.\n"
                "        TraceBack (most recent call last):\n"
                "        Create capture event failed, error=117571609.\n"
                "        rtEventRecord execution failed, reason=driver error:no event resource\n"
                "        record event failed, runtime result = 207007");
  ++graph->events;
  return ACL_SUCCESS;
}

}  // namespace memprof_sim

using namespace memprof_sim;

SHIM_API aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode mode) {
  if (!stream || !stream_known(stream))
    return fail(ACL_ERROR_RT_INVALID_HANDLE,
                "aclmdlRICaptureBegin: the default stream, or unknown");
  Captures &state = captures();
  std::lock_guard<std::mutex> guard(state.mutex);
  if (state.active.count(stream))
    return fail(ACL_ERROR_RT_STREAM_CAPTURED,
                "aclmdlRICaptureBegin: the stream is already under capture");
  if (!account_take(physical_device(current_device()), kStreams))
    return fail(ACL_ERROR_RT_NO_STREAM_RESOURCE, "%s",
                no_streams("rtStreamBeginCapture", "begin capture stream").c_str());
  auto graph = std::make_unique<Graph>();
  graph->id = next_graph_id++;
  graph->device = current_device();
  graph->tasks[stream] = 0;
  state.active[stream] = graphs().find(graphs().add(std::move(graph)));
  state.origin[stream] = stream;
  ++state.count;
  thread_mode = mode;
  return ACL_SUCCESS;
}

SHIM_API aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus *status,
                                         aclmdlRI *model) {
  if (!status) return fail(ACL_ERROR_INVALID_PARAM, "aclmdlRICaptureGetInfo: null argument");
  std::shared_ptr<Graph> graph = active_graph(stream);
  *status = graph ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
  if (model) *model = graph.get();
  return ACL_SUCCESS;
}

SHIM_API aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI *model) {
  if (!model) return fail(ACL_ERROR_INVALID_PARAM, "aclmdlRICaptureEnd: null argument");
  std::shared_ptr<Graph> graph;
  {
    Captures &state = captures();
    std::lock_guard<std::mutex> guard(state.mutex);
    auto found = state.active.find(stream);
    if (found == state.active.end())
      return fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED,
                  "aclmdlRICaptureEnd: the stream is not under capture");
    if (state.origin[stream] != stream)
      return fail(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED,
                  "aclmdlRICaptureEnd: the capture began on another stream");
    graph = found->second;
    for (auto it = state.active.begin(); it != state.active.end();) {
      bool joined = it->second == graph;
      if (joined) state.origin.erase(it->first);
      it = joined ? state.active.erase(it) : std::next(it);
    }
    --state.count;
  }
  uint64_t tasks = task_count(*graph);
  if (!take_runtime_share(*graph,
                          profile().graph_capture_bytes + tasks * profile().graph_argument_bytes)) {
    graphs().take(graph.get());
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "no device memory left for a captured graph");
  }
  trace("captured graph %u with %llu tasks", graph->id, static_cast<unsigned long long>(tasks));
  *model = graph.get();
  return ACL_SUCCESS;
}

SHIM_API aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *mode) {
  if (!mode)
    return fail(ACL_ERROR_INVALID_PARAM, "aclmdlRICaptureThreadExchangeMode: null argument");
  std::swap(thread_mode, *mode);
  return ACL_SUCCESS;
}

// The whole graph is work of the stream that it runs on, whatever streams it was captured from.
SHIM_API aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream stream) {
  std::shared_ptr<Graph> graph = graphs().find(model);
  if (!graph)
    return fail(ACL_ERROR_RT_INVALID_HANDLE, "aclmdlRIExecuteAsync: unknown graph %p", model);
  if (!take_queues(*graph))
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "no device memory left for the queues of a graph");
  for (const auto &function : graph->host_functions) enqueue_host_function(stream, function);
  return ACL_SUCCESS;
}

SHIM_API aclError aclmdlRIExecute(aclmdlRI model, int32_t) {
  aclError status = aclmdlRIExecuteAsync(model, nullptr);
  return status == ACL_SUCCESS ? aclrtSynchronizeStream(nullptr) : status;
}

SHIM_API aclError aclmdlRIDestroy(aclmdlRI model) {
  std::shared_ptr<Graph> graph = graphs().take(model);
  if (!graph) return fail(ACL_ERROR_RT_INVALID_HANDLE, "aclmdlRIDestroy: unknown graph %p", model);
  int device = physical_device(graph->device);
  account_runtime_share(device, -static_cast<int64_t>(graph->bytes.load()));
  account_give_back(device, kStreams, graph->tasks.size());
  account_give_back(device, kEvents, graph->events);
  for (auto &[callback, data] : graph->on_destroy) callback(data);
  return ACL_SUCCESS;
}

SHIM_API aclError aclmdlRIGetId(aclmdlRI model, uint32_t *id) {
  std::shared_ptr<Graph> graph = graphs().find(model);
  if (!graph || !id) return fail(ACL_ERROR_INVALID_PARAM, "aclmdlRIGetId: bad argument");
  *id = graph->id;
  return ACL_SUCCESS;
}

SHIM_API aclError aclmdlRISetName(aclmdlRI model, const char *name) {
  std::shared_ptr<Graph> graph = graphs().find(model);
  if (!graph || !name) return fail(ACL_ERROR_INVALID_PARAM, "aclmdlRISetName: bad argument");
  graph->name = name;
  return ACL_SUCCESS;
}

SHIM_API aclError aclmdlRIDestroyRegisterCallback(aclmdlRI model, aclrtCallback callback,
                                                  void *data) {
  std::shared_ptr<Graph> graph = graphs().find(model);
  if (!graph || !callback)
    return fail(ACL_ERROR_INVALID_PARAM, "aclmdlRIDestroyRegisterCallback: bad argument");
  graph->on_destroy.emplace_back(callback, data);
  return ACL_SUCCESS;
}

SHIM_API aclError aclmdlRICaptureTaskGrpBegin(aclrtStream stream) {
  if (!capture_active(stream))
    return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS,
                "aclmdlRICaptureTaskGrpBegin: the stream is not under capture");
  std::lock_guard<std::mutex> guard(captures().mutex);
  if (captures().open_group.count(stream))
    return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "aclmdlRICaptureTaskGrpBegin: a group is open");
  captures().open_group[stream] = std::make_unique<TaskGroup>();
  return ACL_SUCCESS;
}

SHIM_API aclError aclmdlRICaptureTaskGrpEnd(aclrtStream stream, aclrtTaskGrp *group) {
  if (!group) return fail(ACL_ERROR_INVALID_PARAM, "aclmdlRICaptureTaskGrpEnd: null argument");
  std::lock_guard<std::mutex> guard(captures().mutex);
  auto found = captures().open_group.find(stream);
  if (found == captures().open_group.end())
    return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "aclmdlRICaptureTaskGrpEnd: no group is open");
  *group = task_groups().add(std::move(found->second));
  captures().open_group.erase(found);
  return ACL_SUCCESS;
}

SHIM_API aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream stream, aclrtTaskGrp group) {
  std::shared_ptr<TaskGroup> found = task_groups().find(group);
  if (!found || !stream_known(stream))
    return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS,
                "aclmdlRICaptureTaskUpdateBegin: unknown task group");
  std::lock_guard<std::mutex> guard(captures().mutex);
  captures().updating[stream] = found;
  return ACL_SUCCESS;
}

SHIM_API aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream stream) {
  std::lock_guard<std::mutex> guard(captures().mutex);
  if (!captures().updating.erase(stream))
    return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS,
                "aclmdlRICaptureTaskUpdateEnd: no update has begun");
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtCreateLabel(aclrtLabel *label) {
  if (!label) return fail(ACL_ERROR_INVALID_PARAM, "aclrtCreateLabel: null argument");
  *label = hand_out<char>();
  return ACL_SUCCESS;
}

SHIM_API aclError aclrtDestroyLabel(aclrtLabel label) {
  take_back(static_cast<char *>(label));
  return ACL_SUCCESS;
}
