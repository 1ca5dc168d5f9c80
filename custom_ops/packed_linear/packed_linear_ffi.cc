// XLA binding of packed_linear: checks, then plain pointers. packed_linear.h has the meaning.
#include <string>

#include "common/ffi_checks.h"
#include "common/manifest.h"
#include "packed_linear/packed_linear.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace poptransformer {
namespace {

ffi::Error Invalid(const std::string& message) { return ffi::Error::InvalidArgument("packed_linear: " + message); }

ffi::Error PackedLinearFfi(ffi::AnyBuffer x, ffi::Buffer<ffi::U8> weight, ffi::AnyBuffer bias,
                           ffi::Result<ffi::AnyBuffer> out, int64_t bits, int64_t group_size, int64_t is_float8) {
  const Shape xs = x.dimensions(), ws = weight.dimensions(), os = out->dimensions();
  if (xs.size() != 2 || ws.size() != 2 || os.size() != 2 || os[0] != xs[0]) {
    return Invalid("wanted x [M, I], weight [blocks, block_bytes] and out [M, O]; got " + ShapeText(xs) + ", " +
                   ShapeText(ws) + ", " + ShapeText(os));
  }
  if (bits != 8 && bits != 4) return Invalid("codes have 8 or 4 bits, not " + std::to_string(bits));
  if (is_float8 && (bits != 8 || group_size != -1)) return Invalid("float8 codes have 8 bits and one scale a row");
  if (group_size != -1 && (group_size <= 0 || group_size % kPackedUnit != 0)) {
    return Invalid("group_size must be -1 or a multiple of 32, not " + std::to_string(group_size));
  }
  const std::optional<DType> x_dtype = FloatType(x.element_type());
  const std::optional<DType> out_dtype = FloatType(out->element_type());
  if (!x_dtype || !out_dtype) return Invalid("x and out must be float32, bfloat16 or float16");
  const bool has_bias = !IsShape(bias.dimensions(), {0});
  if (has_bias && !IsShape(bias.dimensions(), {os[1]})) {
    return Invalid("bias must be [O] or empty; got " + ShapeText(bias.dimensions()));
  }
  if (bias.element_type() != x.element_type()) return Invalid("x and bias must have one dtype");
  PackedLinearArgs a;
  a.num_rows = xs[0];
  a.in_features = xs[1];
  a.out_features = os[1];
  a.bits = bits;
  a.is_float8 = is_float8 != 0;
  a.units_per_group = group_size == -1 ? std::max<int64_t>(1, a.num_units()) : group_size / kPackedUnit;
  a.block_bytes = ws[1];
  const int64_t wanted_bytes = (a.code_bytes() + a.scale_bytes() * (bits == 4 ? 2 : 1) + 63) / 64 * 64;
  if (a.block_bytes != wanted_bytes || ws[0] != (a.out_features + kPackedBlockRows - 1) / kPackedBlockRows) {
    return Invalid("the weight is " + ShapeText(ws) + ", which does not fit " + std::to_string(a.out_features) + " x " +
                   std::to_string(a.in_features) + " codes of " + std::to_string(bits) + " bits");
  }
  a.x_dtype = *x_dtype;
  a.out_dtype = *out_dtype;
  a.x = x.untyped_data();
  a.weight = weight.typed_data();
  a.bias = has_bias ? bias.untyped_data() : nullptr;
  a.out = out->untyped_data();
  PackedLinear(a);
  return ffi::Error::Success();
}

}  // namespace

POPTRANSFORMER_LIST_OP(packed_linear, 2);

}  // namespace poptransformer

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(packed_linear, poptransformer::PackedLinearFfi,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()          // x [M, I]
                                  .Arg<ffi::Buffer<ffi::U8>>()    // weight [ceil(O / 16), block_bytes]
                                  .Arg<ffi::AnyBuffer>()          // bias [O], dtype of x, or [0] for none
                                  .Ret<ffi::AnyBuffer>()          // out [M, O]
                                  .Attr<int64_t>("bits")          // of a code
                                  .Attr<int64_t>("group_size")    // inputs that share a scale, -1: the whole row
                                  .Attr<int64_t>("is_float8"));   // 1: codes are e4m3 floats
#pragma GCC visibility pop
