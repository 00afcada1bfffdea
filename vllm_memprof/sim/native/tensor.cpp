// aclTensor and the other argument objects of operators.
#include "tensor.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <variant>

#include "error.h"
#include "ownership.h"

namespace memprof_sim {
namespace {

// In the order of Kind.
using Object = std::variant<std::monostate, std::unique_ptr<aclTensor>, std::unique_ptr<aclScalar>,
                            std::unique_ptr<aclIntArray>, std::unique_ptr<aclFloatArray>,
                            std::unique_ptr<aclBoolArray>, std::unique_ptr<aclTensorList>,
                            std::unique_ptr<aclScalarList>>;

struct Objects {
  std::mutex mutex;
  std::unordered_map<uint64_t, Object> live;  // by address
};

Objects &objects() { return process_state<Objects>(); }

template <typename T>
T *add(std::unique_ptr<T> object) {
  std::lock_guard<std::mutex> guard(objects().mutex);
  T *handle = object.get();
  objects().live[reinterpret_cast<uint64_t>(handle)] = std::move(object);
  return handle;
}

template <typename T>
aclError destroy(const T *object, const char *function) {
  if (!object) return ACL_SUCCESS;
  std::lock_guard<std::mutex> guard(objects().mutex);
  auto found = objects().live.find(reinterpret_cast<uint64_t>(object));
  if (found == objects().live.end() || !std::holds_alternative<std::unique_ptr<T>>(found->second))
    return fail(ACL_ERROR_INVALID_PARAM, "%s: unknown object", function);
  objects().live.erase(found);
  return ACL_SUCCESS;
}

}  // namespace

Kind kind_of(uint64_t word) {
  if (word < 4096 || word % 8) return Kind::kNone;
  std::lock_guard<std::mutex> guard(objects().mutex);
  auto found = objects().live.find(word);
  return found == objects().live.end() ? Kind::kNone : static_cast<Kind>(found->second.index());
}

uint64_t element_bytes(aclDataType type) {
  switch (static_cast<int>(type)) {
    case ACL_INT8:
    case ACL_UINT8:
    case ACL_BOOL:
    case ACL_HIFLOAT8:
    case ACL_FLOAT8_E5M2:
    case ACL_FLOAT8_E4M3FN:
    case ACL_FLOAT8_E8M0: return 1;
    case ACL_INT16:
    case ACL_UINT16:
    case ACL_FLOAT16:
    case ACL_BF16: return 2;
    case ACL_FLOAT:
    case ACL_INT32:
    case ACL_UINT32:
    case ACL_COMPLEX32: return 4;
    case ACL_DOUBLE:
    case ACL_INT64:
    case ACL_UINT64:
    case ACL_COMPLEX64: return 8;
    case ACL_COMPLEX128: return 16;
    default: return 0;
  }
}

int64_t element_count(const aclTensor &tensor) {
  int64_t count = 1;
  for (int64_t extent : tensor.shape) count *= extent;
  return count;
}

uint64_t tensor_bytes(const aclTensor &tensor) {
  return static_cast<uint64_t>(std::max<int64_t>(element_count(tensor), 0)) *
         element_bytes(tensor.type);
}

std::vector<int64_t> dense_strides(const std::vector<int64_t> &shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t axis = shape.size(); axis-- > 1;) strides[axis - 1] = strides[axis] * shape[axis];
  return strides;
}

}  // namespace memprof_sim

using namespace memprof_sim;

SHIM_API aclTensor *aclCreateTensor(const int64_t *shape, uint64_t dimensions, aclDataType type,
                                    const int64_t *strides, int64_t offset, aclFormat format,
                                    const int64_t *storage_shape, uint64_t storage_dimensions,
                                    void *data) {
  auto tensor = std::make_unique<aclTensor>();
  if (shape) tensor->shape.assign(shape, shape + dimensions);
  tensor->strides =
      strides ? std::vector<int64_t>(strides, strides + dimensions) : dense_strides(tensor->shape);
  tensor->offset = offset;
  tensor->type = type;
  tensor->format = format;
  if (storage_shape)
    tensor->storage_shape.assign(storage_shape, storage_shape + storage_dimensions);
  tensor->data = data;
  return add(std::move(tensor));
}

SHIM_API aclScalar *aclCreateScalar(void *value, aclDataType type) {
  auto scalar = std::make_unique<aclScalar>();
  scalar->type = type;
  if (value) memcpy(scalar->bytes, value, element_bytes(type));
  return add(std::move(scalar));
}

SHIM_API aclIntArray *aclCreateIntArray(const int64_t *values, uint64_t count) {
  return add(std::make_unique<aclIntArray>(aclIntArray{{values, values + count}}));
}

SHIM_API aclFloatArray *aclCreateFloatArray(const float *values, uint64_t count) {
  return add(std::make_unique<aclFloatArray>(aclFloatArray{{values, values + count}}));
}

SHIM_API aclBoolArray *aclCreateBoolArray(const bool *values, uint64_t count) {
  return add(std::make_unique<aclBoolArray>(aclBoolArray{{values, values + count}}));
}

SHIM_API aclTensorList *aclCreateTensorList(const aclTensor *const *tensors, uint64_t count) {
  auto list = std::make_unique<aclTensorList>();
  for (uint64_t index = 0; index < count; ++index)
    list->tensors.push_back(const_cast<aclTensor *>(tensors[index]));
  return add(std::move(list));
}

SHIM_API aclScalarList *aclCreateScalarList(const aclScalar *const *scalars, uint64_t count) {
  auto list = std::make_unique<aclScalarList>();
  for (uint64_t index = 0; index < count; ++index)
    list->scalars.push_back(const_cast<aclScalar *>(scalars[index]));
  return add(std::move(list));
}

SHIM_API aclError aclDestroyTensor(const aclTensor *object) {
  return destroy(object, "aclDestroyTensor");
}
SHIM_API aclError aclDestroyScalar(const aclScalar *object) {
  return destroy(object, "aclDestroyScalar");
}
SHIM_API aclError aclDestroyIntArray(const aclIntArray *object) {
  return destroy(object, "aclDestroyIntArray");
}
SHIM_API aclError aclDestroyFloatArray(const aclFloatArray *object) {
  return destroy(object, "aclDestroyFloatArray");
}
SHIM_API aclError aclDestroyBoolArray(const aclBoolArray *object) {
  return destroy(object, "aclDestroyBoolArray");
}

SHIM_API aclError aclDestroyTensorList(const aclTensorList *object) {
  if (object && kind_of(reinterpret_cast<uint64_t>(object)) == Kind::kTensorList)
    for (aclTensor *tensor : object->tensors) aclDestroyTensor(tensor);  // a list owns its tensors
  return destroy(object, "aclDestroyTensorList");
}

SHIM_API aclError aclDestroyScalarList(const aclScalarList *object) {
  if (object && kind_of(reinterpret_cast<uint64_t>(object)) == Kind::kScalarList)
    for (aclScalar *scalar : object->scalars) aclDestroyScalar(scalar);
  return destroy(object, "aclDestroyScalarList");
}

SHIM_API aclError aclGetViewShape(const aclTensor *tensor, int64_t **shape, uint64_t *dimensions) {
  if (!shape || !dimensions || kind_of(reinterpret_cast<uint64_t>(tensor)) != Kind::kTensor)
    return fail(ACL_ERROR_INVALID_PARAM, "aclGetViewShape: bad argument");
  *dimensions = tensor->shape.size();
  *shape = hand_out_array(tensor->shape);
  return ACL_SUCCESS;
}

SHIM_API aclError aclGetDataType(const aclTensor *tensor, aclDataType *type) {
  if (!type || kind_of(reinterpret_cast<uint64_t>(tensor)) != Kind::kTensor)
    return fail(ACL_ERROR_INVALID_PARAM, "aclGetDataType: bad argument");
  *type = tensor->type;
  return ACL_SUCCESS;
}
