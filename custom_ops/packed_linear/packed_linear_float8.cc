// Cuts a product with e4m3 codes into runs of blocks for the thread pool; one parallel region, after the rows are arranged.
#include "packed_linear/packed_linear_float8.h"

#include <algorithm>

#include "common/cpu_features.h"
#include "common/scratch.h"
#include "common/thread_pool.h"

namespace poptransformer {
namespace {

constexpr int64_t kSerialBytes = 64 << 10;    // of weights times tiles of rows: done sooner by one thread than another wakes
constexpr int64_t kTaskBytes = 32 << 10;      // per task at least
constexpr int64_t kTasksPerThread = 8;        // evens out cores that other processes slow down
constexpr int64_t kSerialValues = 64 << 10;   // of x: arranged by the calling thread

PackedLinearFloat8Kernels Kernels() {
#if defined(__x86_64__)
  // This folder's AVX-512 build has VNNI, which the first CPUs with AVX-512 lack.
  if (ActiveIsa() == Isa::kAvx512 && !HasAvx512Vnni()) return avx2::PackedLinearFloat8();
#endif
  return POPTRANSFORMER_SELECT_ISA(PackedLinearFloat8);
}

}  // namespace

void PackedLinearFloat8(const PackedLinearArgs& a) {
  static const PackedLinearFloat8Kernels kernels = Kernels();
  const int64_t values = a.num_rows * a.num_units() * kPackedUnit;
  float* const rows = ThreadScratch(values);  // in use until the outputs are done: tasks must not ask for scratch themselves
  if (values <= kSerialValues) {
    kernels.arrange(a, 0, a.num_rows, rows);
  } else {
    const int64_t num_tasks = std::min(a.num_rows, NumThreads() * kTasksPerThread);
    ParallelFor(num_tasks, [&](int64_t task) {
      kernels.arrange(a, a.num_rows * task / num_tasks, a.num_rows * (task + 1) / num_tasks, rows);
    });
  }
  const int64_t blocks = (a.out_features + kPackedBlockRows - 1) / kPackedBlockRows;
  const int64_t bytes = blocks * a.block_bytes * ((a.num_rows + 7) / 8);
  if (bytes < kSerialBytes) return kernels.blocks(a, rows, 0, blocks);
  const int64_t num_tasks = std::max<int64_t>(1, std::min({NumThreads() * kTasksPerThread, bytes / kTaskBytes, blocks}));
  ParallelFor(num_tasks, [&](int64_t task) {
    kernels.blocks(a, rows, blocks * task / num_tasks, blocks * (task + 1) / num_tasks);
  });
}

}  // namespace poptransformer
