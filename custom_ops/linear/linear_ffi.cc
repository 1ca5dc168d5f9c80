// XLA binding of linear: checks, then plain pointers. linear.h has the meaning.
#include <string>

#include "common/ffi_checks.h"
#include "common/manifest.h"
#include "common/tile_product.h"
#include "linear/linear.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace poptransformer {
namespace {

ffi::Error Invalid(const std::string& message) { return ffi::Error::InvalidArgument("linear: " + message); }

ffi::Error LinearFfi(ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> out) {
  const Shape xs = x.dimensions(), ws = weight.dimensions(), bs = bias.dimensions();
  if (xs.size() != 2 || ws.size() != 2 || xs[1] != ws[1] || !IsShape(out->dimensions(), {xs[0], ws[0]})) {
    return Invalid("wanted x [M, I], weight [O, I] and out [M, O]; got " + ShapeText(xs) + ", " + ShapeText(ws) + ", " +
                   ShapeText(out->dimensions()));
  }
  const bool has_bias = !IsShape(bs, {0});
  if (has_bias && !IsShape(bs, {ws[0]})) return Invalid("bias must be [O] or empty; got " + ShapeText(bs));
  const std::optional<DType> x_dtype = FloatType(x.element_type());
  const std::optional<DType> weight_dtype = FloatType(weight.element_type());
  const std::optional<DType> out_dtype = FloatType(out->element_type());
  if (!x_dtype || !weight_dtype || !out_dtype) return Invalid("buffers must be float32, bfloat16 or float16");
  if (bias.element_type() != x.element_type()) return Invalid("x and bias must have one dtype");
  const bool is_tiled = HasTiles() && *x_dtype == DType::kBfloat16 && *weight_dtype == DType::kBfloat16;
  if (xs[0] > kMaxLinearRows && !is_tiled) {
    return Invalid("x has " + std::to_string(xs[0]) + " rows, at most " + std::to_string(kMaxLinearRows) +
                   " are supported for these dtypes on this CPU");
  }
  LinearArgs a;
  a.num_rows = xs[0];
  a.in_features = xs[1];
  a.out_features = ws[0];
  a.x_dtype = *x_dtype;
  a.weight_dtype = *weight_dtype;
  a.out_dtype = *out_dtype;
  a.x = x.untyped_data();
  a.weight = weight.untyped_data();
  a.bias = has_bias ? bias.untyped_data() : nullptr;
  a.out = out->untyped_data();
  Linear(a);
  return ffi::Error::Success();
}

}  // namespace

POPTRANSFORMER_LIST_OP(linear, 2);

}  // namespace poptransformer

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(linear, poptransformer::LinearFfi,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()   // x [M, I]
                                  .Arg<ffi::AnyBuffer>()   // weight [O, I]
                                  .Arg<ffi::AnyBuffer>()   // bias [O], dtype of x, or [0] for none
                                  .Ret<ffi::AnyBuffer>());  // out [M, O]
#pragma GCC visibility pop
