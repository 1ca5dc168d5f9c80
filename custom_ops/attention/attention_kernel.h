// The pieces of attention that are compiled once per instruction set; attention_cpu.cc and attention_prefill.cc cut a call into
// them.
#ifndef POPTRANSFORMER_CUSTOM_OPS_ATTENTION_ATTENTION_KERNEL_H_
#define POPTRANSFORMER_CUSTOM_OPS_ATTENTION_ATTENTION_KERNEL_H_

#include <cstdint>

#include "attention/attention.h"

namespace poptransformer {

// Decode, T = 1: one chunk of one key/value head's cache, all of its query heads. Chunks begin at multiples of
// kDecodeChunk or of the window, whatever the thread count and the neighbouring rows, so that a row's result depends on neither.
constexpr int64_t kDecodeChunk = 256;
struct DecodeChunk {
  int64_t row, kv_head;
  int64_t begin, end;  // positions; end may include the new one, which this chunk then appends
};

// Prefill: some query heads of one key/value head at some of the new positions.
struct PrefillTile {
  int64_t row, kv_head;
  int64_t first_head, num_heads;      // within the group of N / K; the tile with the first head 0 appends
  int64_t first_token, num_tokens;    // t; all of them less than num_tokens[row]
};

struct PrefillKernels {
  int64_t max_queries;  // of a tile: heads times tokens
  int64_t (*scratch_floats)(const AttentionArgs&);
  void (*tile)(const AttentionArgs&, const PrefillTile&, float* scratch);
};

struct AttentionKernels {
  int64_t (*decode_scratch_floats)(const AttentionArgs&);
  int64_t (*decode_partial_floats)(const AttentionArgs&);  // per chunk
  // Leaves softmax numerator, denominator and maximum of the chunk in `partial`.
  void (*decode_chunk)(const AttentionArgs&, const DecodeChunk&, float* partial, float* scratch);
  // Joins the partial results of a head's chunks, which lie one after the other, into out.
  void (*decode_merge)(const AttentionArgs&, int64_t row, int64_t kv_head, const float* partials, int64_t num_chunks,
                       float* scratch);
  PrefillKernels prefill;
};

// Prefill with operands rounded to bfloat16, only where HasTiles().
namespace amx {
PrefillKernels Prefill();
}
namespace avx512 {
AttentionKernels Attention();
}
namespace avx2 {
AttentionKernels Attention();
}
namespace portable {
AttentionKernels Attention();
}

}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_ATTENTION_ATTENTION_KERNEL_H_
