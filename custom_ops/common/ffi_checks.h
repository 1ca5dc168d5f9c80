// What the XLA bindings of several ops need to check and describe their buffers.
#ifndef POPTRANSFORMER_CUSTOM_OPS_COMMON_FFI_CHECKS_H_
#define POPTRANSFORMER_CUSTOM_OPS_COMMON_FFI_CHECKS_H_

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>

#include "common/dtype.h"
#include "xla/ffi/api/ffi.h"

namespace poptransformer {

using Shape = xla::ffi::AnyBuffer::Dimensions;

inline std::optional<DType> FloatType(xla::ffi::DataType type) {
  switch (type) {
    case xla::ffi::DataType::F32:
      return DType::kFloat32;
    case xla::ffi::DataType::BF16:
      return DType::kBfloat16;
    case xla::ffi::DataType::F16:
      return DType::kFloat16;
    default:
      return std::nullopt;
  }
}

inline std::string ShapeText(const Shape& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

inline bool IsShape(const Shape& shape, std::initializer_list<int64_t> wanted) {
  return shape.size() == wanted.size() && std::equal(wanted.begin(), wanted.end(), shape.begin());
}

}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_COMMON_FFI_CHECKS_H_
