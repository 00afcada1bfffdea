// The older operator interface: descriptions, attributes, compile and execute.
#include "shim.h"

#include <cstring>
#include <map>

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
std::map<int, std::string> &compile_options() {
  static auto *options = new std::map<int, std::string>;
  return *options;
}
std::mutex compile_options_mutex;
}  // namespace
}  // namespace memprof_sim

using namespace memprof_sim;

SHIM_API aclDataBuffer *aclCreateDataBuffer(void *data, size_t bytes) { return new aclDataBuffer{data, bytes}; }

SHIM_API aclError aclDestroyDataBuffer(const aclDataBuffer *buffer) {
  delete buffer;
  return ACL_SUCCESS;
}

SHIM_API void *aclGetDataBufferAddr(const aclDataBuffer *buffer) { return buffer ? buffer->data : nullptr; }
SHIM_API size_t aclGetDataBufferSizeV2(const aclDataBuffer *buffer) { return buffer ? buffer->bytes : 0; }

SHIM_API aclTensorDesc *aclCreateTensorDesc(aclDataType type, int dimensions, const int64_t *shape, aclFormat format) {
  auto *desc = new aclTensorDesc{type, format, {}, {}};
  if (shape && dimensions > 0) desc->shape.assign(shape, shape + dimensions);
  return desc;
}

SHIM_API void aclDestroyTensorDesc(const aclTensorDesc *desc) { delete desc; }
SHIM_API aclDataType aclGetTensorDescType(const aclTensorDesc *desc) { return desc ? desc->type : ACL_DT_UNDEFINED; }
SHIM_API aclFormat aclGetTensorDescFormat(const aclTensorDesc *desc) { return desc ? desc->format : ACL_FORMAT_UNDEFINED; }
SHIM_API size_t aclGetTensorDescNumDims(const aclTensorDesc *desc) { return desc ? desc->shape.size() : 0; }

SHIM_API aclError aclGetTensorDescDimV2(const aclTensorDesc *desc, size_t index, int64_t *extent) {
  if (!desc || !extent || index >= desc->shape.size()) return fail(ACL_ERROR_INVALID_PARAM, "aclGetTensorDescDimV2: bad argument");
  *extent = desc->shape[index];
  return ACL_SUCCESS;
}

SHIM_API void aclSetTensorDescName(aclTensorDesc *desc, const char *name) {
  if (desc && name) desc->name = name;
}

SHIM_API aclopAttr *aclopCreateAttr() { return new aclopAttr; }
SHIM_API void aclopDestroyAttr(const aclopAttr *attributes) { delete attributes; }

SHIM_API aclError aclopCompileAndExecute(const char *, int, const aclTensorDesc *const[], const aclDataBuffer *const[], int,
                                         const aclTensorDesc *const[], aclDataBuffer *const[], const aclopAttr *, aclopEngineType, aclopCompileType,
                                         const char *, aclrtStream stream) {
  graph_count_task(stream);  // computes nothing: its outputs keep what they held
  return ACL_SUCCESS;
}

SHIM_API aclError aclSetCompileopt(aclCompileOpt option, const char *value) {
  std::lock_guard<std::mutex> guard(compile_options_mutex);
  compile_options()[option] = value ? value : "";
  return ACL_SUCCESS;
}

SHIM_API size_t aclGetCompileoptSize(aclCompileOpt option) {
  std::lock_guard<std::mutex> guard(compile_options_mutex);
  return compile_options()[option].size() + 1;
}

SHIM_API aclError aclGetCompileopt(aclCompileOpt option, char *value, size_t room) {
  std::lock_guard<std::mutex> guard(compile_options_mutex);
  const std::string &held = compile_options()[option];
  if (!value || room <= held.size()) return fail(ACL_ERROR_INVALID_PARAM, "aclGetCompileopt: %zu bytes are too few", room);
  memcpy(value, held.c_str(), held.size() + 1);
  return ACL_SUCCESS;
}

SHIM_API aclGraphDumpOption *aclCreateGraphDumpOpt() { return reinterpret_cast<aclGraphDumpOption *>(new char); }

SHIM_API aclError aclDestroyGraphDumpOpt(const aclGraphDumpOption *option) {
  delete reinterpret_cast<const char *>(option);
  return ACL_SUCCESS;
}
