// XLA binding of wkv: checks, then plain pointers. wkv.h has the meaning.
#include "wkv/wkv.h"

#include <cstring>
#include <initializer_list>
#include <optional>
#include <string>

#include "common/ffi_checks.h"
#include "common/manifest.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace poptransformer {
namespace {

ffi::Error Invalid(const std::string& message) { return ffi::Error::InvalidArgument("wkv: " + message); }

ffi::Error WkvFfi(ffi::AnyBuffer key, ffi::AnyBuffer value, ffi::Buffer<ffi::F32> time_decay,
                  ffi::Buffer<ffi::F32> time_first, ffi::Buffer<ffi::F32> state, ffi::Buffer<ffi::S32> cache_len,
                  ffi::Buffer<ffi::S32> num_tokens, ffi::Result<ffi::AnyBuffer> out,
                  ffi::Result<ffi::Buffer<ffi::F32>> new_state) {
  const Shape ks = key.dimensions();
  if (ks.size() != 3) return Invalid("key [B, T, D] has 3 axes; got " + ShapeText(ks));
  WkvArgs a;
  a.batch_size = ks[0];
  a.num_positions = ks[1];
  a.width = ks[2];
  const struct {
    const char* name;
    Shape shape;
    std::initializer_list<int64_t> wanted;
  } shapes[] = {
      {"value", value.dimensions(), {a.batch_size, a.num_positions, a.width}},
      {"time_decay", time_decay.dimensions(), {a.width}},
      {"time_first", time_first.dimensions(), {a.width}},
      {"wkv_state", state.dimensions(), {a.batch_size, 3, a.width}},
      {"cache_len", cache_len.dimensions(), {a.batch_size}},
      {"num_tokens", num_tokens.dimensions(), {a.batch_size}},
      {"out", out->dimensions(), {a.batch_size, a.num_positions, a.width}},
      {"result wkv_state", new_state->dimensions(), {a.batch_size, 3, a.width}},
  };
  for (const auto& [name, shape, wanted] : shapes) {
    if (!IsShape(shape, wanted)) {
      return Invalid(std::string(name) + " has shape " + ShapeText(shape) + ", which does not fit key " + ShapeText(ks));
    }
  }
  const std::optional<DType> dtype = FloatType(key.element_type());
  if (!dtype || value.element_type() != key.element_type() || out->element_type() != key.element_type()) {
    return Invalid("key, value and out must have one dtype of float32, bfloat16 and float16");
  }
  a.dtype = *dtype;

  a.cache_len = cache_len.typed_data();
  a.num_tokens = num_tokens.typed_data();
  for (int64_t b = 0; b < a.batch_size; ++b) {
    if (a.cache_len[b] < 0 || a.num_tokens[b] < 0 || a.num_tokens[b] > a.num_positions) {
      return Invalid("row " + std::to_string(b) + ": cache_len " + std::to_string(a.cache_len[b]) + " and num_tokens " +
                     std::to_string(a.num_tokens[b]) + " do not fit " + std::to_string(a.num_positions) + " new positions");
    }
  }

  // XLA aliases the result to the argument; where it could not, the old contents are copied.
  if (new_state->untyped_data() != state.untyped_data()) {
    std::memcpy(new_state->untyped_data(), state.untyped_data(), state.size_bytes());
  }
  a.key = key.untyped_data();
  a.value = value.untyped_data();
  a.time_decay = time_decay.typed_data();
  a.time_first = time_first.typed_data();
  a.state = new_state->typed_data();
  a.out = out->untyped_data();
  Wkv(a);
  return ffi::Error::Success();
}

}  // namespace

POPTRANSFORMER_LIST_OP(wkv, 1);

}  // namespace poptransformer

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(wkv, poptransformer::WkvFfi,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()          // key [B, T, D]
                                  .Arg<ffi::AnyBuffer>()          // value [B, T, D]
                                  .Arg<ffi::Buffer<ffi::F32>>()   // time_decay [D]
                                  .Arg<ffi::Buffer<ffi::F32>>()   // time_first [D]
                                  .Arg<ffi::Buffer<ffi::F32>>()   // wkv_state [B, 3, D]
                                  .Arg<ffi::Buffer<ffi::S32>>()   // cache_len [B]
                                  .Arg<ffi::Buffer<ffi::S32>>()   // num_tokens [B]
                                  .Ret<ffi::AnyBuffer>()          // out [B, T, D]
                                  .Ret<ffi::Buffer<ffi::F32>>());  // wkv_state, aliased to the argument
#pragma GCC visibility pop
