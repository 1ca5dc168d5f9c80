// Tiles of up to PrefillKernels::max_queries queries, longest contexts first, then one task a row for its padding.
//
// Bytes moved: 2 * visible positions * K * H * sizeof(cache) once for every tile.
//
// Measured with 2 cores of a Xeon: float32 with AVX-512 200 to 350 GFLOP/s, bfloat16 in tiles 800 to 1150 of 512 new tokens with
// H = 64, where reading the new tokens and writing out take a third of the time, and 1300 to 2100 with H = 128.
#include "attention/attention_prefill.h"

#include <algorithm>
#include <cstring>

#include "common/cpu_features.h"
#include "common/thread_pool.h"
#include "common/tile_product.h"

namespace poptransformer {
namespace {

// Less than this is done sooner by one thread than a parked one takes to wake.
constexpr int64_t kSerialMultiplyAdds = 400'000;
constexpr int64_t kLeastQueries = 16;  // of a tile

int64_t CeilDivide(int64_t n, int64_t divisor) { return (n + divisor - 1) / divisor; }

PrefillKernels ChooseKernels(const AttentionArgs& a) {
#if defined(POPTRANSFORMER_BUILDS_AMX)
  if ((a.allow_bfloat16 || a.dtype == DType::kBfloat16) && HasTiles()) return amx::Prefill();
#else
  (void)a;
#endif
  static const PrefillKernels kernels = POPTRANSFORMER_SELECT_ISA(Attention).prefill;
  return kernels;
}

}  // namespace

void ZeroTokens(const AttentionArgs& a, int64_t row, int64_t first_token) {
  const int64_t token_bytes = a.num_heads * a.head_dim * ByteWidth(a.dtype);
  char* const out = static_cast<char*>(a.out) + row * a.num_positions * token_bytes;
  std::memset(out + first_token * token_bytes, 0, (a.num_positions - first_token) * token_bytes);
}

PrefillPlan MakePrefillPlan(const AttentionArgs& a) {
  const int64_t group = a.num_heads / a.num_kv_heads;
  int64_t most_tokens = 0;
  double multiply_adds = 0;
  for (int64_t b = 0; b < a.batch_size; ++b) {
    const int64_t tokens = a.num_tokens[b];
    most_tokens = std::max(most_tokens, tokens);
    double visible = a.cache_len[b] + 0.5 * tokens;  // of a query, about
    if (a.window > 0) visible = std::min<double>(visible, a.window);
    if (a.context_len) visible = std::max<double>(visible, std::min(int64_t{a.context_len[b]}, a.cache_len[b] + tokens));
    multiply_adds += 2.0 * tokens * visible * a.num_heads * a.head_dim;
  }

  PrefillPlan plan;
  plan.kernels = ChooseKernels(a);
  plan.is_serial = multiply_adds < kSerialMultiplyAdds;
  // Large tiles share the conversion of keys and values; smaller ones where threads would have nothing to do.
  const int64_t wanted_tiles = plan.is_serial ? 1 : 2 * NumThreads();
  for (int64_t queries = plan.kernels.max_queries; queries >= kLeastQueries; queries /= 2) {
    plan.tile_heads = std::min(group, queries);
    plan.tile_tokens = queries / plan.tile_heads;
    plan.head_tiles = CeilDivide(group, plan.tile_heads);
    plan.token_tiles = CeilDivide(most_tokens, plan.tile_tokens);
    if (a.batch_size * a.num_kv_heads * plan.head_tiles * plan.token_tiles >= wanted_tiles) break;
  }
  plan.num_tiles = a.batch_size * a.num_kv_heads * plan.head_tiles * plan.token_tiles;
  plan.num_tasks = plan.num_tiles + a.batch_size;
  plan.scratch_floats = plan.kernels.scratch_floats(a);
  return plan;
}

void RunPrefillTask(const AttentionArgs& a, const PrefillPlan& plan, int64_t task, float* scratch) {
  if (task >= plan.num_tiles) {
    const int64_t b = task - plan.num_tiles;
    return ZeroTokens(a, b, a.num_tokens[b]);
  }
  const int64_t group = a.num_heads / a.num_kv_heads;
  const int64_t tiles_per_step = plan.num_tiles / plan.token_tiles;
  PrefillTile tile;
  tile.first_token = (plan.token_tiles - 1 - task / tiles_per_step) * plan.tile_tokens;
  tile.first_head = task % plan.head_tiles * plan.tile_heads;
  tile.kv_head = task / plan.head_tiles % a.num_kv_heads;
  tile.row = task / (plan.head_tiles * a.num_kv_heads) % a.batch_size;
  tile.num_heads = std::min(plan.tile_heads, group - tile.first_head);
  tile.num_tokens = std::min(plan.tile_tokens, a.num_tokens[tile.row] - tile.first_token);
  if (tile.num_tokens <= 0) return;
  plan.kernels.tile(a, tile, scratch);
}

}  // namespace poptransformer
