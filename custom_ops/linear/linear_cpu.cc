// Cuts a call into runs of outputs for the thread pool: one parallel region a call, no barrier inside.
//
// A sum is made by one thread in one order, whatever the cut and the number of rows, so that results do not depend on thread
// counts, nor a row's on its neighbours.
//
// Measured: see benchmarks/bench_ops.py, which times this beside XLA's own product.
#include "linear/linear.h"

#include <algorithm>

#include "common/cpu_features.h"
#include "common/scratch.h"
#include "common/thread_pool.h"
#include "common/tile_product.h"
#include "linear/linear_amx.h"
#include "linear/linear_kernel.h"

namespace poptransformer {
namespace {

constexpr int64_t kSerialBytes = 64 << 10;  // of weights: read sooner by one thread than a parked one takes to wake
constexpr int64_t kTaskBytes = 32 << 10;    // per task at least
constexpr int64_t kTasksPerThread = 8;      // evens out cores that other processes slow down
constexpr int64_t kTaskAlign = 12;          // outputs, a multiple of 1, 2, 3 and 4: only the last task has short blocks

}  // namespace

void Linear(const LinearArgs& a) {
  static const LinearKernels kernels = POPTRANSFORMER_SELECT_ISA(Linear);
  if (a.num_rows == 0 || a.out_features == 0) return;
#if defined(POPTRANSFORMER_BUILDS_AMX)
  if (a.num_rows > kMaxLinearRows) {
    const BfloatMatrix weights{static_cast<const Bfloat16*>(a.weight), a.out_features, a.in_features};
    return TileProduct({a.num_rows, a.in_features, a.out_features, a.x_dtype, a.out_dtype, a.x, a.bias, a.out,
                        amx::FillPanel, &weights});
  }
#endif
  // Stays in use until the outputs are done: they must not ask for scratch themselves.
  float* const x = ThreadScratch(a.num_rows * kernels.x_stride(a));
  kernels.widen_x(a, x);
  const int64_t bytes = a.out_features * a.in_features * ByteWidth(a.weight_dtype);
  if (bytes < kSerialBytes) return kernels.outputs(a, x, 0, a.out_features);
  const int64_t num_tasks = std::max<int64_t>(1, std::min(NumThreads() * kTasksPerThread, bytes / kTaskBytes));
  const int64_t blocks = (a.out_features + kTaskAlign - 1) / kTaskAlign;
  ParallelFor(num_tasks, [&](int64_t task) {
    const int64_t begin = blocks * task / num_tasks * kTaskAlign;
    const int64_t end = std::min(blocks * (task + 1) / num_tasks * kTaskAlign, a.out_features);
    kernels.outputs(a, x, begin, end);
  });
}

}  // namespace poptransformer
