// Cuts a call into runs of blocks for the thread pool. Few rows are quantised by the calling thread, so that there is one
// parallel region; many rows by all of them, in a region before it.
//
// Measured: see benchmarks/bench_ops.py.
#include "packed_linear/packed_linear.h"

#include <algorithm>
#include <cstddef>

#include "common/cpu_features.h"
#include "common/scratch.h"
#include "common/thread_pool.h"
#include "common/tile_product.h"
#include "packed_linear/packed_linear_amx.h"
#include "packed_linear/packed_linear_float8.h"
#include "packed_linear/packed_linear_kernel.h"

namespace poptransformer {
namespace {

constexpr int64_t kSerialBytes = 64 << 10;    // of weights times tiles of rows: done sooner by one thread than another wakes
constexpr int64_t kTaskBytes = 32 << 10;      // per task at least
constexpr int64_t kTasksPerThread = 8;        // evens out cores that other processes slow down
constexpr int64_t kTileProductRows = 12;      // from so many on unpacking to bfloat16 pays where there are tiles
constexpr int64_t kSerialValues = 32 << 10;   // of x: quantised by the calling thread

void MultiplyInTiles(const PackedLinearArgs& a) {
#if defined(POPTRANSFORMER_BUILDS_AMX)
  TileProduct({a.num_rows, a.in_features, a.out_features, a.x_dtype, a.out_dtype, a.x, a.bias, a.out,
               amx::FillPackedPanel, &a});
#else
  static_cast<void>(a);
#endif
}

int64_t Align(int64_t bytes) { return (bytes + 63) / 64 * 64; }
int64_t CodeBytes(const PackedLinearArgs& a) { return Align(a.num_rows * a.num_units() * kPackedUnit); }
int64_t UnitBytes(const PackedLinearArgs& a) { return Align(a.num_rows * a.num_units() * 4); }
int64_t GroupBytes(const PackedLinearArgs& a) { return Align(a.num_rows * a.num_groups() * 4); }

}  // namespace

PackedLinearKernels ActivePackedLinear() {
#if defined(__x86_64__)
  // The AVX-512 build multiplies with VNNI, which the first CPUs with AVX-512 lack.
  if (ActiveIsa() == Isa::kAvx512 && !HasAvx512Vnni()) return avx2::PackedLinear();
#endif
  return POPTRANSFORMER_SELECT_ISA(PackedLinear);
}

int64_t QuantizedFloats(const PackedLinearArgs& a) { return (CodeBytes(a) + 2 * UnitBytes(a) + GroupBytes(a)) / 4; }

QuantizedRows CutQuantized(const PackedLinearArgs& a, float* memory) {
  char* bytes = reinterpret_cast<char*>(memory);
  QuantizedRows rows;
  rows.codes = reinterpret_cast<int8_t*>(bytes);
  rows.scales = reinterpret_cast<float*>(bytes += CodeBytes(a));
  rows.offsets = reinterpret_cast<int32_t*>(bytes += UnitBytes(a));
  rows.group_sums = reinterpret_cast<float*>(bytes += UnitBytes(a));
  return rows;
}

void PackedLinear(const PackedLinearArgs& a) {
  static const PackedLinearKernels kernels = ActivePackedLinear();
  if (a.num_rows == 0 || a.out_features == 0) return;
  if (a.num_rows >= kTileProductRows && HasTiles()) return MultiplyInTiles(a);
  if (a.is_float8) return PackedLinearFloat8(a);
  // Stays in use until the outputs are done: tasks must not ask for scratch themselves.
  const QuantizedRows rows = CutQuantized(a, ThreadScratch(QuantizedFloats(a)));
  if (a.num_rows * a.num_units() * kPackedUnit <= kSerialValues) {
    kernels.quantize(a, rows, 0, a.num_rows);
  } else {
    const int64_t num_tasks = std::min(a.num_rows, NumThreads() * kTasksPerThread);
    ParallelFor(num_tasks, [&](int64_t task) {
      kernels.quantize(a, rows, a.num_rows * task / num_tasks, a.num_rows * (task + 1) / num_tasks);
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
