// XLA binding of gather: checks, then plain pointers. gather.h has the meaning.
#include "gather/gather.h"

#include <string>

#include "common/ffi_checks.h"
#include "common/manifest.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace poptransformer {
namespace {

ffi::Error Invalid(const std::string& message) { return ffi::Error::InvalidArgument("gather: " + message); }

ffi::Error GatherFfi(ffi::AnyBuffer table, ffi::Buffer<ffi::S32> indices, ffi::Result<ffi::AnyBuffer> out) {
  const Shape ts = table.dimensions(), is = indices.dimensions();
  if (ts.size() != 2 || is.size() != 1 || !IsShape(out->dimensions(), {is[0], ts[1]}) ||
      out->element_type() != table.element_type()) {
    return Invalid("wanted table [V, D], indices [M] and out [M, D] of the table's dtype; got " + ShapeText(ts) + ", " +
                   ShapeText(is) + ", " + ShapeText(out->dimensions()));
  }
  for (int64_t n = 0; n < is[0]; ++n) {
    const int64_t index = indices.typed_data()[n];
    if (index < 0 || index >= ts[0]) {
      return Invalid("index " + std::to_string(index) + " is outside a table of " + std::to_string(ts[0]) + " rows");
    }
  }
  GatherArgs a;
  a.row_bytes = ts[0] ? static_cast<int64_t>(table.size_bytes()) / ts[0] : 0;
  a.num_indices = is[0];
  a.table = table.untyped_data();
  a.indices = indices.typed_data();
  a.out = out->untyped_data();
  Gather(a);
  return ffi::Error::Success();
}

}  // namespace

POPTRANSFORMER_LIST_OP(gather, 1);

}  // namespace poptransformer

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(gather, poptransformer::GatherFfi,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()         // table [V, D]
                                  .Arg<ffi::Buffer<ffi::S32>>()  // indices [M]
                                  .Ret<ffi::AnyBuffer>());       // out [M, D]
#pragma GCC visibility pop
