// How prefill attention (T > 1) is cut into tasks, for whoever runs them: attention_cpu.cc on the thread pool, a program among
// tasks of other ops.
#ifndef POPTRANSFORMER_CUSTOM_OPS_ATTENTION_ATTENTION_PREFILL_H_
#define POPTRANSFORMER_CUSTOM_OPS_ATTENTION_ATTENTION_PREFILL_H_

#include <cstdint>

#include "attention/attention.h"
#include "attention/attention_kernel.h"

namespace poptransformer {

// Follows from the arguments' sizes, lengths and options, and from the number of threads; holds no memory.
struct PrefillPlan {
  PrefillKernels kernels;   // which arithmetic
  int64_t num_tasks;        // independent of each other; those with low numbers take longest
  int64_t scratch_floats;   // of each task, aligned to 64 bytes
  bool is_serial;           // so little work that one thread has done it before another wakes

  // Tiles of tile_tokens new positions and tile_heads query heads of a group.
  int64_t tile_tokens, tile_heads;
  int64_t token_tiles, head_tiles;  // of a row, of a group
  int64_t num_tiles;
};

PrefillPlan MakePrefillPlan(const AttentionArgs& args);

// A task appends its own tokens and reads other new tokens from key and value, not from the cache, so that it waits for none.
void RunPrefillTask(const AttentionArgs& args, const PrefillPlan& plan, int64_t task, float* scratch);

// out[row, first_token ..] = 0.
void ZeroTokens(const AttentionArgs& args, int64_t row, int64_t first_token);

}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_ATTENTION_ATTENTION_PREFILL_H_
