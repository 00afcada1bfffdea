// The older operator interface: descriptions, attributes, compile and execute.
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "accounting.h"
#include "device.h"
#include "error.h"
#include "graph.h"
#include "kernels/table.h"
#include "kernels/tensor_view.h"
#include "memory.h"
#include "ownership.h"
#include "poison.h"
#include "tensor.h"

struct aclDataBuffer {
  void *data;
  size_t bytes;
};
struct aclTensorDesc {
  aclDataType type;
  aclFormat format;
  std::vector<int64_t> shape;
  std::string name;
};
struct aclopAttr {
  int values = 0;
};

namespace memprof_sim {
namespace {

aclTensor tensor_of(const aclTensorDesc *desc, const aclDataBuffer *buffer) {
  aclTensor tensor{};
  if (!desc || !buffer) return tensor;
  tensor.type = desc->type;
  tensor.format = desc->format;
  tensor.shape = desc->shape;
  tensor.strides = dense_strides(desc->shape);
  tensor.data = buffer->data;
  return tensor;
}

// The host kernel of the same meaning, by the name it has in the aclnn family.
Kernel kernel_of(const std::string &type) {
  static constexpr const char *kNames[][2] = {
      {"Add", "Add"},
      {"Sub", "Sub"},
      {"Mul", "Mul"},
      {"FloorDiv", "FloorDivide"},
      {"FloorMod", "RemainderTensorTensor"},
      {"Equal", "EqTensor"},
      {"NotEqual", "NeTensor"},
      {"Greater", "GtTensor"},
      {"GreaterEqual", "GeTensor"},
      {"Less", "LtTensor"},
      {"LessEqual", "LeTensor"},
      {"Minimum", "Minimum"},
      {"Maximum", "Maximum"},
      {"LogicalAnd", "LogicalAnd"},
      {"LogicalOr", "LogicalOr"},
      {"LogicalNot", "LogicalNot"},
      {"Neg", "Neg"},
      {"Cast", "Cast"},
      {"Identity", "Cast"},
      {"TensorMove", "Cast"},
  };
  for (const auto &[older, name] : kNames)
    if (type == older) return find_kernel(name);
  return nullptr;
}

// Integer results of operators that compute nothing are zero: a position, a count or a token id
// that always exists. Results that share their memory with an argument keep it.
void zero_integers(const std::vector<aclTensor> &inputs, const aclTensor &output) {
  uint64_t bytes = static_cast<uint64_t>(element_count(output)) * element_bytes(output.type),
           left = 0;
  if (output.type != ACL_INT32 && output.type != ACL_INT64) return;
  for (const aclTensor &input : inputs)
    if (input.data == output.data) return;
  if (within_limit(static_cast<uint64_t>(element_count(output)), output.type) &&
      device_range(output.data, &left, nullptr) && bytes <= left) {
    Answering answering;
    note_write(output.data, bytes);
    memset(output.data, 0, bytes);
  }
}

struct CompileOptions {
  std::mutex mutex;
  std::map<int, std::string> values;
};
CompileOptions &compile_options() { return process_state<CompileOptions>(); }

}  // namespace
}  // namespace memprof_sim

using namespace memprof_sim;

SHIM_API aclDataBuffer *aclCreateDataBuffer(void *data, size_t bytes) {
  return hand_out<aclDataBuffer>(aclDataBuffer{data, bytes});
}

SHIM_API aclError aclDestroyDataBuffer(const aclDataBuffer *buffer) {
  take_back(buffer);
  return ACL_SUCCESS;
}

SHIM_API void *aclGetDataBufferAddr(const aclDataBuffer *buffer) {
  return buffer ? buffer->data : nullptr;
}
SHIM_API size_t aclGetDataBufferSizeV2(const aclDataBuffer *buffer) {
  return buffer ? buffer->bytes : 0;
}

SHIM_API aclTensorDesc *aclCreateTensorDesc(aclDataType type, int dimensions, const int64_t *shape,
                                            aclFormat format) {
  auto *desc = hand_out<aclTensorDesc>(aclTensorDesc{type, format, {}, {}});
  if (shape && dimensions > 0) desc->shape.assign(shape, shape + dimensions);
  return desc;
}

SHIM_API void aclDestroyTensorDesc(const aclTensorDesc *desc) { take_back(desc); }
SHIM_API aclDataType aclGetTensorDescType(const aclTensorDesc *desc) {
  return desc ? desc->type : ACL_DT_UNDEFINED;
}
SHIM_API aclFormat aclGetTensorDescFormat(const aclTensorDesc *desc) {
  return desc ? desc->format : ACL_FORMAT_UNDEFINED;
}
SHIM_API size_t aclGetTensorDescNumDims(const aclTensorDesc *desc) {
  return desc ? desc->shape.size() : 0;
}

SHIM_API aclError aclGetTensorDescDimV2(const aclTensorDesc *desc, size_t index, int64_t *extent) {
  if (!desc || !extent || index >= desc->shape.size())
    return fail(ACL_ERROR_INVALID_PARAM, "aclGetTensorDescDimV2: bad argument");
  *extent = desc->shape[index];
  return ACL_SUCCESS;
}

SHIM_API void aclSetTensorDescName(aclTensorDesc *desc, const char *name) {
  if (desc && name) desc->name = name;
}

SHIM_API aclopAttr *aclopCreateAttr() { return hand_out<aclopAttr>(); }
SHIM_API void aclopDestroyAttr(const aclopAttr *attributes) { take_back(attributes); }

SHIM_API aclError aclopCompileAndExecute(const char *type, int input_count,
                                         const aclTensorDesc *const input_descs[],
                                         const aclDataBuffer *const inputs[], int output_count,
                                         const aclTensorDesc *const output_descs[],
                                         aclDataBuffer *const outputs[], const aclopAttr *,
                                         aclopEngineType, aclopCompileType, const char *,
                                         aclrtStream stream) {
  if (!type) return fail(ACL_ERROR_INVALID_PARAM, "aclopCompileAndExecute: null operator type");
  graph_count_task(stream);
  trace("aclop %s", type);
  if (!account_kernels(physical_device(current_device()), type))
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "no device memory left for the kernels of %s",
                type);
  std::vector<aclTensor> arguments, results;
  for (int index = 0; index < input_count; ++index)
    arguments.push_back(tensor_of(input_descs[index], inputs[index]));
  for (int index = 0; index < output_count; ++index)
    results.push_back(tensor_of(output_descs[index], outputs[index]));
  Call call;
  call.name = type;
  auto add = [&](const std::vector<aclTensor> &tensors) {
    for (const aclTensor &tensor : tensors) {
      Argument argument;
      argument.kind = Kind::kTensor;
      argument.tensor = tensor;
      call.arguments.push_back(argument);
    }
  };
  add(arguments);
  call.arguments.emplace_back();  // no attribute is looked at; it parts arguments and results
  add(results);
  PoisonCall poisoned(call, "aclop ");
  if (Kernel kernel = kernel_of(type))
    kernel(call);
  else
    for (const aclTensor &result : results) zero_integers(arguments, result);
  return ACL_SUCCESS;
}

// For results whose size the operator decides: they stay as large as there is room for.
SHIM_API aclError aclopCompileAndExecuteV2(const char *type, int input_count,
                                           aclTensorDesc *input_descs[], aclDataBuffer *inputs[],
                                           int output_count, aclTensorDesc *output_descs[],
                                           aclDataBuffer *outputs[], aclopAttr *attributes,
                                           aclopEngineType engine, aclopCompileType compile,
                                           const char *path, aclrtStream stream) {
  return aclopCompileAndExecute(type, input_count, input_descs, inputs, output_count, output_descs,
                                outputs, attributes, engine, compile, path, stream);
}

SHIM_API aclError aclSetCompileopt(aclCompileOpt option, const char *value) {
  std::lock_guard<std::mutex> guard(compile_options().mutex);
  compile_options().values[option] = value ? value : "";
  return ACL_SUCCESS;
}

SHIM_API size_t aclGetCompileoptSize(aclCompileOpt option) {
  std::lock_guard<std::mutex> guard(compile_options().mutex);
  return compile_options().values[option].size() + 1;
}

SHIM_API aclError aclGetCompileopt(aclCompileOpt option, char *value, size_t room) {
  std::lock_guard<std::mutex> guard(compile_options().mutex);
  const std::string &held = compile_options().values[option];
  if (!value || room <= held.size())
    return fail(ACL_ERROR_INVALID_PARAM, "aclGetCompileopt: %zu bytes are too few", room);
  memcpy(value, held.c_str(), held.size() + 1);
  return ACL_SUCCESS;
}

SHIM_API aclGraphDumpOption *aclCreateGraphDumpOpt() {
  return reinterpret_cast<aclGraphDumpOption *>(hand_out<char>());
}

SHIM_API aclError aclDestroyGraphDumpOpt(const aclGraphDumpOption *option) {
  take_back(reinterpret_cast<const char *>(option));
  return ACL_SUCCESS;
}
