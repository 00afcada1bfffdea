// Numbers of every plain type. Values pass through long double, which holds every 64-bit integer
// exactly.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "acl.h"

namespace memprof_sim {

using Value = long double;

inline float from_half(uint16_t half) {
  uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, exponent = half >> 10 & 0x1f,
           fraction = half & 0x3ff;
  float magnitude = exponent == 0    ? std::ldexp(static_cast<float>(fraction), -24)
                    : exponent == 31 ? (fraction ? NAN : INFINITY)
                                     : std::ldexp(static_cast<float>(fraction | 0x400),
                                                  static_cast<int>(exponent) - 25);
  return sign ? -magnitude : magnitude;
}

inline uint16_t to_half(float value) {
  uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  float magnitude = std::fabs(value);
  if (std::isnan(value)) return 0x7e00;
  if (magnitude >= 65520.0f) return sign | 0x7c00;
  if (magnitude < 6.103515625e-05f)
    return sign | static_cast<uint16_t>(std::nearbyint(magnitude * 16777216.0f));
  int exponent = 0;
  float fraction = std::frexp(magnitude, &exponent);  // in [0.5, 1)
  uint32_t bits = static_cast<uint32_t>(std::nearbyint(fraction * 2048.0f));
  return static_cast<uint16_t>(
      sign | (((static_cast<uint32_t>(exponent + 14) << 10) + bits - 1024) & 0x7fff));
}

inline float from_bfloat(uint16_t bits) {
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

inline uint16_t to_bfloat(float value) {
  uint32_t wide;
  memcpy(&wide, &value, sizeof wide);
  if (std::isnan(value)) return 0x7fc0;
  return static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
}

template <typename T>
inline T load_raw(const void *address) {
  T value;
  memcpy(&value, address, sizeof value);
  return value;
}

template <typename T>
inline Value load_as(const void *address) {
  T value;
  memcpy(&value, address, sizeof value);
  return static_cast<Value>(value);
}

// A whole number modulo 2^64, as integer arithmetic and casts between integers have it.
inline uint64_t wrapped(Value value) {
  constexpr Value kWrap = 18446744073709551616.0L, kHalf = kWrap / 2;
  if (value > -kHalf && value < kHalf) return static_cast<uint64_t>(static_cast<int64_t>(value));
  if (!std::isfinite(value)) return 0;
  Value size = std::fabs(value);
  uint64_t bits = static_cast<uint64_t>(size < kWrap ? size : std::fmod(size, kWrap));
  return value < 0 ? 0 - bits : bits;
}

template <typename T>
inline void store_as(void *address, Value value) {
  T narrow = static_cast<T>(wrapped(value));
  memcpy(address, &narrow, sizeof narrow);
}

// A float as the processor's instruction converts it, which torch on a CPU relies on: beyond the
// range aarch64 has the nearest integer (0 for a NaN), x86-64 the least.
template <typename T>
inline Value truncated(Value value) {
  constexpr Value low = std::numeric_limits<T>::min(), high = std::numeric_limits<T>::max();
  if (value > low - 1 && value < high + 1) return std::trunc(value);
#if defined(__aarch64__)
  return std::isnan(value) ? 0 : value < 0 ? low : high;
#else
  return low;
#endif
}

// A float cast to `type`: torch converts to 32 bits where those hold the type, else to 64.
inline Value cast_float(Value value, aclDataType type) {
  switch (type) {
    case ACL_INT8:
    case ACL_INT16:
    case ACL_UINT16:
    case ACL_INT32: return truncated<int32_t>(value);
    case ACL_UINT8:
    case ACL_UINT32:
    case ACL_INT64: return truncated<int64_t>(value);
    default: return value;
  }
}

inline bool is_integer(aclDataType type) {
  switch (type) {
    case ACL_INT8:
    case ACL_UINT8:
    case ACL_INT16:
    case ACL_UINT16:
    case ACL_INT32:
    case ACL_UINT32:
    case ACL_INT64:
    case ACL_UINT64:
    case ACL_BOOL: return true;
    default: return false;
  }
}

inline bool is_plain(aclDataType type) {
  return is_integer(type) || type == ACL_FLOAT || type == ACL_DOUBLE || type == ACL_FLOAT16 ||
         type == ACL_BF16;
}

inline Value load(const void *address, aclDataType type) {
  switch (type) {
    case ACL_BOOL: return *static_cast<const unsigned char *>(address) ? 1 : 0;
    case ACL_INT8: return load_as<int8_t>(address);
    case ACL_UINT8: return load_as<uint8_t>(address);
    case ACL_INT16: return load_as<int16_t>(address);
    case ACL_UINT16: return load_as<uint16_t>(address);
    case ACL_INT32: return load_as<int32_t>(address);
    case ACL_UINT32: return load_as<uint32_t>(address);
    case ACL_INT64: return load_as<int64_t>(address);
    case ACL_UINT64: return load_as<uint64_t>(address);
    case ACL_FLOAT: return load_as<float>(address);
    case ACL_DOUBLE: return load_as<double>(address);
    case ACL_FLOAT16: return from_half(*static_cast<const uint16_t *>(address));
    case ACL_BF16: return from_bfloat(*static_cast<const uint16_t *>(address));
    default: return 0;
  }
}

inline void store(void *address, aclDataType type, Value value) {
  switch (type) {
    case ACL_BOOL: *static_cast<unsigned char *>(address) = value != 0; break;
    case ACL_INT8: store_as<int8_t>(address, value); break;
    case ACL_UINT8: store_as<uint8_t>(address, value); break;
    case ACL_INT16: store_as<int16_t>(address, value); break;
    case ACL_UINT16: store_as<uint16_t>(address, value); break;
    case ACL_INT32: store_as<int32_t>(address, value); break;
    case ACL_UINT32: store_as<uint32_t>(address, value); break;
    case ACL_INT64: store_as<int64_t>(address, value); break;
    case ACL_UINT64: store_as<uint64_t>(address, value); break;
    case ACL_FLOAT: {
      float narrow = static_cast<float>(value);
      memcpy(address, &narrow, sizeof narrow);
      break;
    }
    case ACL_DOUBLE: {
      double narrow = static_cast<double>(value);
      memcpy(address, &narrow, sizeof narrow);
      break;
    }
    case ACL_FLOAT16: *static_cast<uint16_t *>(address) = to_half(static_cast<float>(value)); break;
    case ACL_BF16: *static_cast<uint16_t *>(address) = to_bfloat(static_cast<float>(value)); break;
    default: break;
  }
}

}  // namespace memprof_sim
