// The piece of wkv that is compiled once per instruction set; wkv_cpu.cc cuts a call into them.
#ifndef POPTRANSFORMER_CUSTOM_OPS_WKV_WKV_KERNEL_H_
#define POPTRANSFORMER_CUSTOM_OPS_WKV_WKV_KERNEL_H_

#include <cstdint>

#include "wkv/wkv.h"

namespace poptransformer {

// All tokens of features [begin, end) of one row, padding included.
using WkvFunction = void (*)(const WkvArgs&, int64_t row, int64_t begin, int64_t end);

namespace avx512 {
WkvFunction Wkv();
}
namespace avx2 {
WkvFunction Wkv();
}
namespace portable {
WkvFunction Wkv();
}

}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_WKV_WKV_KERNEL_H_
