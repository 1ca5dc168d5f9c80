#include "common/tile_product.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "common/cpu_features.h"
#include "common/scratch.h"
#include "common/thread_pool.h"

#if defined(POPTRANSFORMER_BUILDS_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/tile_product_amx.h"
#endif

namespace poptransformer {

#if defined(POPTRANSFORMER_BUILDS_AMX)
namespace {

constexpr int64_t kTasksPerThread = 8;
constexpr int64_t kSerialValues = 64 << 10;  // of x: rounded by the calling thread

bool FindTiles() {
  const char* isa = std::getenv("POPTRANSFORMER_ISA");
  if (ActiveIsa() != Isa::kAvx512 || (isa != nullptr && std::strcmp(isa, "amx") != 0)) return false;
  uint32_t a, b, c, d;
  constexpr uint32_t kBf16 = uint32_t{1} << 22, kTile = uint32_t{1} << 24;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (kBf16 | kTile)) != (kBf16 | kTile)) return false;
  // The kernel saves the tiles' contents only for processes that have asked for it.
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// bfloat16 rows that the calling thread keeps between calls.
struct RowMemory {
  std::unique_ptr<Bfloat16[]> memory;
  int64_t size = 0;

  Bfloat16* Get(int64_t wanted) {
    constexpr int64_t kSpare = 32;  // to begin at a multiple of 64 bytes
    if (size < wanted) {
      memory.reset(new Bfloat16[wanted + kSpare]);
      size = wanted;
    }
    const uintptr_t begin = reinterpret_cast<uintptr_t>(memory.get());
    return reinterpret_cast<Bfloat16*>((begin + 63) / 64 * 64);
  }
};

}  // namespace

bool HasTiles() {
  static const bool has_tiles = FindTiles();
  return has_tiles;
}

void TileProduct(const TileProductArgs& a) {
  thread_local RowMemory row_memory;
  if (a.num_rows == 0 || a.out_features == 0) return;
  const int64_t padded_rows = (a.num_rows + amx::kRowBlock - 1) / amx::kRowBlock * amx::kRowBlock;
  const int64_t width = a.num_steps() * kTileInputs;
  Bfloat16* const rows = row_memory.Get(padded_rows * width);
  if (padded_rows * width <= kSerialValues) {
    amx::RoundRows(a.x, a.x_dtype, a.in_features, a.num_rows, a.in_features, rows, 0, padded_rows);
  } else {
    const int64_t num_tasks = std::min(padded_rows, NumThreads() * kTasksPerThread);
    ParallelFor(num_tasks, [&](int64_t task) {
      amx::RoundRows(a.x, a.x_dtype, a.in_features, a.num_rows, a.in_features, rows, padded_rows * task / num_tasks,
                     padded_rows * (task + 1) / num_tasks);
    });
  }
  const int64_t num_pairs = (a.out_features + 2 * kPanelOutputs - 1) / (2 * kPanelOutputs);
  const int64_t num_tasks = std::min(num_pairs, NumThreads() * kTasksPerThread);
  ParallelFor(num_tasks, [&](int64_t task) {
    constexpr int64_t kSums = amx::kRowBlock * 2 * kPanelOutputs;
    float* const sums = ThreadScratch(kSums + width * kPanelOutputs);
    Bfloat16* const panels = reinterpret_cast<Bfloat16*>(sums + kSums);  // two of width * 16 values of 2 bytes
    for (int64_t pair = num_pairs * task / num_tasks; pair < num_pairs * (task + 1) / num_tasks; ++pair) {
      const int64_t block = 2 * pair;
      const int64_t num_blocks = (block + 1) * kPanelOutputs < a.out_features ? 2 : 1;
      for (int64_t side = 0; side < num_blocks; ++side) {
        a.fill_panel(a.weights, block + side, panels + side * width * kPanelOutputs);
      }
      amx::MultiplyPanels(rows, a.num_steps(), a.num_rows, a.out_features, block, num_blocks, 1, panels, amx::StoreSums, &a, sums);
    }
  });
}

#else

bool HasTiles() { return false; }
void TileProduct(const TileProductArgs&) { std::abort(); }

#endif

}  // namespace poptransformer

extern "C" __attribute__((visibility("default"))) bool poptransformer_has_tiles() { return poptransformer::HasTiles(); }
