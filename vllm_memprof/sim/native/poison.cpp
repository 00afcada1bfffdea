// Poison mode: see poison.h. The state of every byte is kept in intervals of equal state.
#include "poison.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include "error.h"
#include "ownership.h"
#include "profile.h"
#include "tensor.h"

namespace memprof_sim {
namespace {

using State = uint32_t;  // kFresh, kKnown, or a row of `origins`, counted from kOrigins
constexpr State kFresh = 0, kKnown = 1, kOrigins = 2;
constexpr const char *kNobody = "no operator";
constexpr uint64_t kMostRuns = 1 << 16;  // a tensor in more pieces is taken as a whole

struct Origin {
  bool answer;  // answered without computing; else left as it was
  std::string by;
};

using CallSite = void (*)(char *text, uint64_t room);

struct Shadow {
  std::mutex mutex;
  struct Interval {
    uintptr_t end;
    State state;
  };
  std::map<uintptr_t, Interval> intervals;  // bytes in none are fresh
  std::vector<Origin> origins;
  std::set<std::string> reported;
  CallSite call_site = nullptr;
};

Shadow &shadow() { return process_state<Shadow>(); }

State origin(Shadow &state, bool answer, const std::string &by) {
  for (size_t row = 0; row < state.origins.size(); ++row)
    if (state.origins[row].answer == answer && state.origins[row].by == by)
      return static_cast<State>(row) + kOrigins;
  state.origins.push_back({answer, by});
  return static_cast<State>(state.origins.size()) - 1 + kOrigins;
}

void split(Shadow &state, uintptr_t at) {
  auto next = state.intervals.upper_bound(at);
  if (next == state.intervals.begin()) return;
  auto &[start, interval] = *std::prev(next);
  if (start == at || interval.end <= at) return;
  state.intervals[at] = interval;
  interval.end = at;
}

void set(Shadow &state, uintptr_t start, uintptr_t end, State value) {
  if (start >= end) return;
  split(state, start);
  split(state, end);
  auto &intervals = state.intervals;
  auto after = intervals.erase(intervals.lower_bound(start), intervals.lower_bound(end));
  if (value == kFresh) return;
  if (after != intervals.end() && after->first == end && after->second.state == value) {
    end = after->second.end;
    after = intervals.erase(after);
  }
  if (after != intervals.begin()) {
    auto before = std::prev(after);
    if (before->second.end == start && before->second.state == value) {
      before->second.end = end;
      return;
    }
  }
  intervals[start] = {end, value};
}

// Calls visit(start, end, state) for every piece of a range, fresh ones included.
template <typename Visit>
void for_pieces(const Shadow &state, uintptr_t start, uintptr_t end, Visit visit) {
  auto next = state.intervals.upper_bound(start);
  if (next != state.intervals.begin() && std::prev(next)->second.end > start) --next;
  while (start < end) {
    uintptr_t begin = next == state.intervals.end() ? end : std::min(end, next->first);
    if (start < begin) visit(start, begin, kFresh);
    if (begin == end) return;
    uintptr_t stop = std::min(end, next->second.end);
    visit(std::max(start, begin), stop, next->second.state);
    start = stop;
    ++next;
  }
}

// Of two states the one that says more against a value: left or fresh, then answered, then known.
State worse(const Shadow &state, State left, State right) {
  auto rank = [&](State value) {
    if (value == kKnown) return 0;
    return value >= kOrigins && state.origins[value - kOrigins].answer ? 1 : 2;
  };
  return rank(right) > rank(left) ? right : left;
}

State worst(const Shadow &state, uintptr_t start, uintptr_t end, State so_far) {
  for_pieces(state, start, end,
             [&](uintptr_t, uintptr_t, State value) { so_far = worse(state, so_far, value); });
  return so_far;
}

uintptr_t address(const void *pointer) { return reinterpret_cast<uintptr_t>(pointer); }

// Calls visit(start, end) for the dense runs of a tensor's bytes.
template <typename Visit>
void for_runs(const aclTensor &tensor, Visit visit) {
  int64_t count = element_count(tensor), run = 1,
          width = static_cast<int64_t>(element_bytes(tensor.type));
  if (!tensor.data || count <= 0 || width <= 0 || tensor.strides.size() != tensor.shape.size())
    return;
  size_t axis = tensor.shape.size();
  while (axis > 0 && (tensor.shape[axis - 1] == 1 || tensor.strides[axis - 1] == run))
    run *= tensor.shape[--axis];
  uintptr_t base = address(tensor.data) + static_cast<uintptr_t>(tensor.offset * width);
  if (static_cast<uint64_t>(count / run) > kMostRuns) {
    int64_t reach = run;
    for (size_t outer = 0; outer < axis; ++outer)
      reach += (tensor.shape[outer] - 1) * std::max<int64_t>(tensor.strides[outer], 0);
    return visit(base, base + static_cast<uintptr_t>(reach * width));
  }
  std::vector<int64_t> position(axis, 0);
  while (true) {
    int64_t at = 0;
    for (size_t outer = 0; outer < axis; ++outer) at += position[outer] * tensor.strides[outer];
    uintptr_t start = base + static_cast<uintptr_t>(at * width);
    visit(start, start + static_cast<uintptr_t>(run * width));
    size_t outer = axis;
    while (outer > 0 && ++position[outer - 1] == tensor.shape[outer - 1]) position[--outer] = 0;
    if (outer == 0) return;
  }
}

// The tensors that a call writes, by their places: the first of an operator in place; else those
// after its last attribute, or the last one of all where no attribute parts them.
std::vector<const aclTensor *> results_of(const Call &call) {
  static const char *const in_place[] = {"Inplace*", "IndexPutImpl", "Scatter*Cache*"};
  std::vector<const aclTensor *> results;
  for (const char *pattern : in_place)
    if (glob_match(pattern, call.name.c_str()))
      for (const Argument &argument : call.arguments)
        if (argument.kind == Kind::kTensor) return {&argument.tensor};
  size_t end = call.arguments.size();
  while (end > 0 && call.arguments[end - 1].kind != Kind::kTensor) --end;
  size_t begin = end;
  while (begin > 0 && call.arguments[begin - 1].kind == Kind::kTensor) --begin;
  if (begin == 0 && end > 0) begin = end - 1;
  for (; begin < end; ++begin) results.push_back(&call.arguments[begin].tensor);
  return results;
}

bool touched(const std::vector<PoisonCall::Piece> &pieces, const aclTensor &tensor) {
  uintptr_t low = UINTPTR_MAX, high = 0;
  if (pieces.empty()) return false;
  for_runs(tensor, [&](uintptr_t start, uintptr_t end) {
    low = std::min(low, start), high = std::max(high, end);
  });
  return std::any_of(pieces.begin(), pieces.end(), [&](const PoisonCall::Piece &piece) {
    return piece.start < high && low < piece.end;
  });
}

// The engine sizes tensors by how many results these have.
bool counts_results(const std::string &name) {
  for (const char *pattern : {"Nonzero*", "MaskedSelect", "Unique*"})
    if (glob_match(pattern, name.c_str())) return true;
  return false;
}

std::string escaped(const std::string &text) {
  std::string result;
  for (char letter : text)
    if (letter == '"' || letter == '\\')
      result += {'\\', letter};
    else
      result += static_cast<unsigned char>(letter) < 32 ? ' ' : letter;
  return result;
}

// Where Python stands, if this thread runs Python: a thread of torch_npu's own must not wait for
// the interpreter's lock.
std::string call_site(CallSite ask) {
  using ThreadState = void *(*)();
  static const ThreadState thread_state =
      reinterpret_cast<ThreadState>(dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState"));
  if (!ask || !thread_state || !thread_state()) return "";
  char text[2048] = {};
  ask(text, sizeof text - 1);
  return text;
}

void report(State value, const char *reader, uint64_t bytes) {
  if (value == kKnown) return;
  Shadow &state = shadow();
  CallSite ask = nullptr;
  Origin left{false, kNobody};
  {
    std::lock_guard<std::mutex> guard(state.mutex);
    ask = state.call_site;
    if (value >= kOrigins) left = state.origins[value - kOrigins];
  }
  std::string site = call_site(ask);  // without the lock: Python may call the device
  std::string line = std::string("{\"kind\": \"") + (left.answer ? "answered" : "unwritten") +
                     "\", \"left_by\": \"" + escaped(left.by) + "\", \"read_by\": \"" +
                     escaped(reader) + "\", \"call_site\": \"" + escaped(site) +
                     "\", \"pid\": " + std::to_string(getpid());
  {
    std::lock_guard<std::mutex> guard(state.mutex);
    if (!state.reported.insert(line).second) return;
  }
  line += ", \"bytes\": " + std::to_string(bytes) + "}\n";
  int file = open(getenv("MEMPROF_SIM_POISON"), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || write(file, line.data(), line.size()) != static_cast<ssize_t>(line.size()))
    trace("poison: no line could be written: %s", line.c_str());
  if (file >= 0) close(file);
}

}  // namespace

bool taken_out(const char *answer) {
  static const std::string names = [] {
    const char *given = getenv("MEMPROF_SIM_WITHOUT");
    return "," + std::string(given ? given : "") + ",";
  }();
  return names.size() > 2 && names.find("," + std::string(answer) + ",") != std::string::npos;
}

void poison_fresh(const void *pointer, uint64_t bytes) {
  if (!poison_mode) return;
  std::lock_guard<std::mutex> guard(shadow().mutex);
  set(shadow(), address(pointer), address(pointer) + bytes, kFresh);
}

void poison_known(const void *pointer, uint64_t bytes) {
  if (!poison_mode) return;
  std::lock_guard<std::mutex> guard(shadow().mutex);
  set(shadow(), address(pointer), address(pointer) + bytes, kKnown);
}

void poison_left(const void *pointer, uint64_t bytes, const char *by) {
  if (!poison_mode) return;
  std::lock_guard<std::mutex> guard(shadow().mutex);
  set(shadow(), address(pointer), address(pointer) + bytes, origin(shadow(), false, by));
}

void poison_answer(const void *pointer, uint64_t bytes, const char *by) {
  if (!poison_mode) return;
  std::lock_guard<std::mutex> guard(shadow().mutex);
  set(shadow(), address(pointer), address(pointer) + bytes, origin(shadow(), true, by));
}

void poison_copy(const void *destination, const void *source, uint64_t bytes) {
  if (!poison_mode) return;
  std::lock_guard<std::mutex> guard(shadow().mutex);
  struct Piece {
    uintptr_t start, end;
    State state;
  };
  std::vector<Piece> pieces;
  for_pieces(
      shadow(), address(source), address(source) + bytes,
      [&](uintptr_t start, uintptr_t end, State state) { pieces.push_back({start, end, state}); });
  for (const Piece &piece : pieces)
    set(shadow(), address(destination) + (piece.start - address(source)),
        address(destination) + (piece.end - address(source)), piece.state);
}

void poison_host_read(const char *reader, const void *source, uint64_t bytes) {
  if (!poison_mode) return;
  State value = kKnown;
  {
    std::lock_guard<std::mutex> guard(shadow().mutex);
    value = worst(shadow(), address(source), address(source) + bytes, kKnown);
  }
  report(value, reader, bytes);
}

PoisonCall *&poison_call() {
  static thread_local PoisonCall *call = nullptr;
  return call;
}

void poison_note(std::vector<PoisonCall::Piece> &pieces, const void *at, uint64_t bytes) {
  uintptr_t start = address(at), end = start + bytes;
  bool answer = poison_call()->answering;
  if (!pieces.empty() && pieces.back().answer == answer && start <= pieces.back().end &&
      end >= pieces.back().start) {
    pieces.back().start = std::min(pieces.back().start, start);
    pieces.back().end = std::max(pieces.back().end, end);
    return;
  }
  pieces.push_back({start, end, answer});
}

PoisonCall::PoisonCall(const Call &call, const char *family) : call_(call), family_(family) {
  if (poison_mode) poison_call() = this;
}

PoisonCall::~PoisonCall() {
  if (!poison_mode) return;
  poison_call() = nullptr;
  Shadow &state = shadow();
  State read = kKnown;
  bool counts = counts_results(call_.name), computed = !reads.empty() || !writes.empty();
  std::string name = family_ + call_.name;
  {
    std::lock_guard<std::mutex> guard(state.mutex);
    for (const Piece &piece : reads) read = worst(state, piece.start, piece.end, read);
    if (read == kFresh) read = origin(state, false, kNobody);
    for (const Piece &piece : writes)
      set(state, piece.start, piece.end, piece.answer ? origin(state, true, name) : read);
    State left = origin(state, false, name);
    for (const aclTensor *result : results_of(call_))
      if (!touched(writes, *result) && !touched(reads, *result))
        for_runs(*result, [&](uintptr_t start, uintptr_t end) { set(state, start, end, left); });
    // Fresh memory that an operator gets and neither reads nor writes was for its results.
    auto take = [&](const aclTensor &tensor) {
      if (touched(reads, tensor)) return;
      for_runs(tensor, [&](uintptr_t start, uintptr_t end) {
        std::vector<std::pair<uintptr_t, uintptr_t>> fresh;
        for_pieces(state, start, end, [&](uintptr_t from, uintptr_t to, State value) {
          if (value == kFresh) fresh.emplace_back(from, to);
        });
        for (auto [from, to] : fresh) set(state, from, to, left);
      });
    };
    for (const Argument &argument : call_.arguments) {
      if (argument.kind == Kind::kTensor) take(argument.tensor);
      for (const aclTensor &tensor : argument.tensors) take(tensor);
    }
    if (counts && !computed) read = origin(state, true, name);
  }
  if (counts) report(read, ("size of the result of " + name).c_str(), 0);
}

}  // namespace memprof_sim

using namespace memprof_sim;

// For the Python side of the simulated device: who tells where Python stands, and memory that a
// stand-in for a device kernel wrote on the host.
SHIM_API void memprof_sim_on_poisoned_read(void (*call_site)(char *text, uint64_t room)) {
  std::lock_guard<std::mutex> guard(shadow().mutex);
  shadow().call_site = call_site;
}

SHIM_API void memprof_sim_host_kernel(const uint64_t *read_at, const uint64_t *read_bytes,
                                      uint64_t reads, const uint64_t *written_at,
                                      const uint64_t *written_bytes, uint64_t writes) {
  if (!poison_mode) return;
  Shadow &state = shadow();
  std::lock_guard<std::mutex> guard(state.mutex);
  State read = kKnown;
  for (uint64_t row = 0; row < reads; ++row)
    read = worst(state, read_at[row], read_at[row] + read_bytes[row], read);
  if (read == kFresh) read = origin(state, false, kNobody);
  for (uint64_t row = 0; row < writes; ++row)
    set(state, written_at[row], written_at[row] + written_bytes[row], read);
}
