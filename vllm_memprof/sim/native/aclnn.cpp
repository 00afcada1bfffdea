// The aclnn family. Every operator has two entry points: aclnnXxxGetWorkspaceSize(arguments...,
// uint64_t *size, aclOpExecutor **executor) and aclnnXxx(workspace, size, executor, stream). The
// names are generated from what the installed engine can ask for; all first stages arrive here
// through a trampoline that saves the argument registers, because the signatures are not part of
// any header the engine ships. The arguments are recognised by what they point at.
#include <pthread.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "accounting.h"
#include "atb.h"
#include "communicator.h"
#include "device.h"
#include "error.h"
#include "graph.h"
#include "kernels/table.h"
#include "ownership.h"
#include "poison.h"
#include "profile.h"
#include "tensor.h"

struct aclOpExecutor {
  memprof_sim::Call call;
  memprof_sim::Kernel kernel = nullptr;
  bool repeatable = false;
};

extern "C" {
extern const char *const memprof_sim_aclnn_names[]
    __attribute__((visibility("hidden")));  // generated, without "aclnn"
int memprof_sim_aclnn_plan(int index, const uint64_t *registers, const uint64_t *stack,
                           const uint64_t *reals) __attribute__((visibility("hidden")));
int memprof_sim_aclnn_run(void *, uint64_t, aclOpExecutor *executor, aclrtStream stream)
    __attribute__((visibility("hidden")));
}

// eax/w16 holds the operator's index. The first stages jump here with their own arguments
// untouched: integers and pointers in six or eight registers and on the stack, floating-point
// arguments in eight registers of their own.
#if defined(__x86_64__)
asm(R"(
  .text
  .hidden memprof_sim_aclnn_entry
  .globl memprof_sim_aclnn_entry
  .type memprof_sim_aclnn_entry, @function
memprof_sim_aclnn_entry:
  .cfi_startproc
  pushq %rbp
  .cfi_def_cfa_offset 16
  .cfi_offset %rbp, -16
  movq %rsp, %rbp
  .cfi_def_cfa_register %rbp
  subq $112, %rsp
  movq %rdi, -48(%rbp)
  movq %rsi, -40(%rbp)
  movq %rdx, -32(%rbp)
  movq %rcx, -24(%rbp)
  movq %r8, -16(%rbp)
  movq %r9, -8(%rbp)
  movq %xmm0, -112(%rbp)
  movq %xmm1, -104(%rbp)
  movq %xmm2, -96(%rbp)
  movq %xmm3, -88(%rbp)
  movq %xmm4, -80(%rbp)
  movq %xmm5, -72(%rbp)
  movq %xmm6, -64(%rbp)
  movq %xmm7, -56(%rbp)
  movl %eax, %edi
  leaq -48(%rbp), %rsi
  leaq 16(%rbp), %rdx
  leaq -112(%rbp), %rcx
  call memprof_sim_aclnn_plan
  leave
  .cfi_def_cfa %rsp, 8
  ret
  .cfi_endproc
  .size memprof_sim_aclnn_entry, .-memprof_sim_aclnn_entry
)");
static constexpr int kRegisterWords = 6;
#elif defined(__aarch64__)
asm(R"(
  .text
  .hidden memprof_sim_aclnn_entry
  .globl memprof_sim_aclnn_entry
  .type memprof_sim_aclnn_entry, %function
memprof_sim_aclnn_entry:
  .cfi_startproc
  stp x29, x30, [sp, #-144]!
  .cfi_def_cfa_offset 144
  .cfi_offset x29, -144
  .cfi_offset x30, -136
  mov x29, sp
  stp x0, x1, [sp, #16]
  stp x2, x3, [sp, #32]
  stp x4, x5, [sp, #48]
  stp x6, x7, [sp, #64]
  stp d0, d1, [sp, #80]
  stp d2, d3, [sp, #96]
  stp d4, d5, [sp, #112]
  stp d6, d7, [sp, #128]
  mov w0, w16
  add x1, sp, #16
  add x2, sp, #144
  add x3, sp, #80
  bl memprof_sim_aclnn_plan
  ldp x29, x30, [sp], #144
  .cfi_def_cfa_offset 0
  ret
  .cfi_endproc
  .size memprof_sim_aclnn_entry, .-memprof_sim_aclnn_entry
)");
static constexpr int kRegisterWords = 8;
#else
#error "the simulated device is written for x86-64 and aarch64"
#endif

namespace memprof_sim {
namespace {

constexpr aclError kNoKernels = 561112;  // ACLNN_ERR_INNER_OPP_KERNEL_PKG_NOT_FOUND
constexpr int kMostWords = 128;          // more arguments than any operator has

Registry<aclOpExecutor> &executors() { return process_state<Registry<aclOpExecutor>>(); }

struct StackBounds {
  uintptr_t low = 0, high = 0;
  StackBounds() {
    pthread_attr_t attributes;
    void *start = nullptr;
    size_t size = 0;
    if (pthread_getattr_np(pthread_self(), &attributes) == 0) {
      pthread_attr_getstack(&attributes, &start, &size);
      pthread_attr_destroy(&attributes);
    }
    low = reinterpret_cast<uintptr_t>(start);
    high = low + size;
  }
};

const StackBounds &stack_bounds() {
  static thread_local StackBounds bounds;
  return bounds;
}

// The caller's `uint64_t workspace_size = 0; aclOpExecutor *executor = nullptr;` live on its stack:
// the last two arguments are the first neighbouring pair of pointers to zeroed words of the calling
// thread's stack.
// ATB's are `uint64_t size = 0; atb::Operation *operation`, which is null or one of an earlier
// call.
bool is_result_pair(const uint64_t *words, bool atb) {
  const StackBounds &bounds = stack_bounds();
  for (int index = 0; index < 2; ++index) {
    uint64_t address = words[index];
    if (address % 8 || address < bounds.low || address + 8 > bounds.high) return false;
    uint64_t value = *reinterpret_cast<const uint64_t *>(address);
    bool kept = atb && index == 1 && is_atb_operation(reinterpret_cast<void *>(value));
    if (value != 0 && !kept) return false;
  }
  return words[0] != words[1];
}

// Operators that communicate name their communicator in a string; its buffers are there from the
// first such operator on.
bool communicates(const char *name) {
  static const char *const patterns[] = {"*AllReduce*",     "*Allreduce*", "*AllGather*",
                                         "*ReduceScatter*", "*AlltoAll*",  "*AllToAll*",
                                         "*Distribute*",    "Dispatch*",   "*BatchSendRecv*"};
  for (const char *pattern : patterns)
    if (glob_match(pattern, name)) return true;
  return false;
}

// The string at a word, read through the kernel: the word may be no pointer at all.
std::string text_at(uint64_t word) {
  char text[COMM_NAME_MAX_LENGTH] = {};
  for (size_t length = sizeof text - 1; word >= 4096 && length >= 8; length /= 2) {
    iovec local{text, length}, remote{reinterpret_cast<void *>(word), length};
    if (process_vm_readv(getpid(), &local, 1, &remote, 1, 0) > 0) break;
  }
  return text;
}

aclError touch_communicators(const uint64_t *words, int count) {
  for (int index = 0; index < count; ++index) {
    if (words[index] < 4096 || kind_of(words[index]) != Kind::kNone) continue;
    std::string text = text_at(words[index]);
    aclError status = ACL_SUCCESS;
    if (!text.empty() && communicator_touch_by_name(text.c_str(), &status) && status != ACL_SUCCESS)
      return status;
  }
  return ACL_SUCCESS;
}

// What a workspace grows with: the largest of the operator's tensors. A list counts as one.
uint64_t largest_tensor_bytes(const uint64_t *words, int count) {
  uint64_t largest = 0;
  for (int index = 0; index < count; ++index) {
    Kind kind = kind_of(words[index]);
    uint64_t bytes = 0;
    if (kind == Kind::kTensor) bytes = tensor_bytes(*reinterpret_cast<aclTensor *>(words[index]));
    if (kind == Kind::kTensorList)
      for (aclTensor *tensor : reinterpret_cast<aclTensorList *>(words[index])->tensors)
        if (tensor) bytes += tensor_bytes(*tensor);
    largest = std::max(largest, bytes);
  }
  return largest;
}

Argument argument_of(uint64_t word) {
  Argument argument;
  argument.kind = kind_of(word);
  argument.word = word;
  switch (argument.kind) {
    case Kind::kTensor: argument.tensor = *reinterpret_cast<aclTensor *>(word); break;
    case Kind::kScalar: argument.scalar = *reinterpret_cast<aclScalar *>(word); break;
    case Kind::kIntArray: argument.integers = reinterpret_cast<aclIntArray *>(word)->values; break;
    case Kind::kTensorList:
      for (aclTensor *tensor : reinterpret_cast<aclTensorList *>(word)->tensors)
        argument.tensors.push_back(tensor ? *tensor : aclTensor{});
      break;
    default: break;
  }
  return argument;
}

}  // namespace
}  // namespace memprof_sim

using namespace memprof_sim;

int memprof_sim_aclnn_plan(int index, const uint64_t *registers, const uint64_t *stack,
                           const uint64_t *reals) {
  const char *name = memprof_sim_aclnn_names[index];
  uint64_t words[kMostWords];
  memcpy(words, registers, sizeof(uint64_t) * kRegisterWords);
  uintptr_t room = (stack_bounds().high - reinterpret_cast<uintptr_t>(stack)) / sizeof(uint64_t);
  int count = kRegisterWords;
  for (uintptr_t word = 0; word < room && count < kMostWords; ++word) words[count++] = stack[word];
  bool atb = !strncmp(name, "Atb", 3);
  int results = 0;
  while (results + 1 < count && !is_result_pair(words + results, atb)) ++results;
  if (results + 1 >= count)
    return fail(ACL_ERROR_INVALID_PARAM,
                "%s%sGetWorkspaceSize: no zeroed workspace size and executor among the arguments",
                atb ? "" : "aclnn", name);
  if (atb)
    return plan_atb_operation(name, largest_tensor_bytes(words, results),
                              reinterpret_cast<uint64_t *>(words[results]),
                              reinterpret_cast<void **>(words[results + 1]));

  if (kernels_missing(name))
    return fail(kNoKernels,
                "EZ1001: Get path and read binary_info_config.json failed, please check if the "
                "opp_kernel package is installed!");
  if (communicates(name))
    if (aclError status = touch_communicators(words, results)) return status;

  auto executor = std::make_unique<aclOpExecutor>();
  executor->kernel = find_kernel(name);
  executor->call.name = name;
  memcpy(executor->call.reals, reals, sizeof executor->call.reals);
  if (executor->kernel || tracing() || poison_mode) {
    for (int word = 0; word < results; ++word)
      executor->call.arguments.push_back(argument_of(words[word]));
    // An attention operator's only string is the layout of its tensors. It may not outlive this
    // call.
    for (int word = 0; word < results && executor->kernel && glob_match("*AttentionScore*", name) &&
                       executor->call.text.empty();
         ++word)
      if (executor->call.arguments[static_cast<size_t>(word)].kind == Kind::kNone)
        executor->call.text = text_at(words[word]);
  }
  *reinterpret_cast<uint64_t *>(words[results]) =
      workspace_bytes_for(name, largest_tensor_bytes(words, results));
  *reinterpret_cast<aclOpExecutor **>(words[results + 1]) = executors().add(std::move(executor));
  // In the thread that asks, so that what a reading finds does not hang on how far the thread that
  // launches has come; where it does not fit, the launch fails.
  account_kernels(physical_device(current_device()), name);
  return ACL_SUCCESS;
}

int memprof_sim_aclnn_run(void *, uint64_t, aclOpExecutor *executor, aclrtStream stream) {
  std::shared_ptr<aclOpExecutor> found = executors().find(executor);
  if (!found)
    return fail(ACL_ERROR_INVALID_PARAM, "an aclnn operator was run without its executor");
  if (tracing()) {
    std::string line;
    for (const Argument &argument : found->call.arguments) {
      if (argument.kind != Kind::kTensor) {
        line += argument.kind == Kind::kNone ? " " + std::to_string(argument.word) : " object";
        continue;
      }
      line += " t" + std::to_string(argument.tensor.type) + "[";
      for (int64_t extent : argument.tensor.shape) line += std::to_string(extent) + ",";
      line += "]";
    }
    trace("aclnn%s%s", found->call.name.c_str(), line.c_str());
  }
  graph_count_task(stream);
  if (!account_kernels(physical_device(current_device()), found->call.name))
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "no device memory left for the kernels of aclnn%s",
                found->call.name.c_str());
  {
    PoisonCall poisoned(found->call, "aclnn");
    if (found->kernel) found->kernel(found->call);
  }
  if (!found->repeatable) executors().take(executor);
  return ACL_SUCCESS;
}

SHIM_API aclError aclSetAclOpExecutorRepeatable(aclOpExecutor *executor) {
  std::shared_ptr<aclOpExecutor> found = executors().find(executor);
  if (!found)
    return fail(ACL_ERROR_INVALID_PARAM, "aclSetAclOpExecutorRepeatable: unknown executor");
  found->repeatable = true;
  return ACL_SUCCESS;
}

SHIM_API aclError aclDestroyAclOpExecutor(aclOpExecutor *executor) {
  if (!executors().take(executor))
    return fail(ACL_ERROR_INVALID_PARAM, "aclDestroyAclOpExecutor: unknown executor");
  return ACL_SUCCESS;
}

// The shape that a tensor takes in the fractal format NZ: [..., m, n] becomes [..., n / c, m / 16,
// 16, c], both rounded up, with c elements in 32 bytes. Other formats keep their shape. The caller
// deletes the shape.
SHIM_API int aclnnNpuFormatCastCalculateSizeAndFormat(const aclTensor *source, const int format,
                                                      int, int64_t **shape, uint64_t *dimensions,
                                                      int *actual_format) {
  if (kind_of(reinterpret_cast<uint64_t>(source)) != Kind::kTensor || !shape || !dimensions ||
      !actual_format)
    return fail(ACL_ERROR_INVALID_PARAM, "aclnnNpuFormatCastCalculateSizeAndFormat: bad argument");
  std::vector<int64_t> extents = source->shape;
  if (format == ACL_FORMAT_FRACTAL_NZ && extents.size() >= 2) {
    int64_t per_block =
        static_cast<int64_t>(32 / std::max<uint64_t>(element_bytes(source->type), 1));
    int64_t rows = extents[extents.size() - 2], columns = extents.back();
    extents.resize(extents.size() - 2);
    for (int64_t extent :
         {(columns + per_block - 1) / per_block, (rows + 15) / 16, int64_t{16}, per_block})
      extents.push_back(extent);
  }
  *dimensions = extents.size();
  *shape = hand_out_array(extents);
  *actual_format = format;
  return ACL_SUCCESS;
}
