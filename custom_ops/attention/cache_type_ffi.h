// The cache's type for the dtype that XLA knows it by.
#ifndef POPTRANSFORMER_CUSTOM_OPS_ATTENTION_CACHE_TYPE_FFI_H_
#define POPTRANSFORMER_CUSTOM_OPS_ATTENTION_CACHE_TYPE_FFI_H_

#include <optional>

#include "attention/attention.h"
#include "common/ffi_checks.h"

namespace poptransformer {

inline std::optional<CacheType> CacheTypeOf(xla::ffi::DataType type) {
  if (const std::optional<DType> dtype = FloatType(type)) return AsCacheType(*dtype);
  if (type == xla::ffi::DataType::F8E4M3FN) return CacheType::kFloat8;
  if (type == xla::ffi::DataType::S8) return CacheType::kInt8;
  return std::nullopt;
}

}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_ATTENTION_CACHE_TYPE_FFI_H_
