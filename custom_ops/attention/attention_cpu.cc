// Cuts a call into tasks for the thread pool: one parallel region a call, no barrier inside.
//
// Decode (T = 1): the cache of each (row, kv head) in chunks of kDecodeChunk positions, tasks being equal runs of chunks. The
// task with the chunk of the new position appends it; whoever finishes a head's last chunk joins the partial results, in order.
// A window cuts the first chunk short and leaves those before it out.
// Prefill: tiles of up to kMaxTileQueries queries, longest contexts first. A tile appends its own tokens and reads other new
// tokens from key and value, not from the cache, so that it waits for no other tile.
//
// Bytes moved: decode 2 * visible positions * K * H * sizeof(cache) a row; prefill the same once for every tile.
//
// Measured with 2 cores of a Xeon with AVX-512, decode of caches too large for its L3: 27 GB/s float32 and 21 GB/s bfloat16 at
// H = 64, where a plain stream over memory in 4 KiB pages reads 29; prefill 170 to 270 GFLOP/s. Beside the plain XLA lowering:
// benchmarks/bench_ops.py --op attention --plain.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "attention/attention.h"
#include "attention/attention_kernel.h"
#include "common/cpu_features.h"
#include "common/scratch.h"
#include "common/thread_pool.h"

namespace poptransformer {
namespace {

// Less than this is done sooner by one thread than a parked one takes to wake.
constexpr int64_t kSerialBytes = 96 << 10;           // of cache read, decode
constexpr int64_t kTaskBytes = 48 << 10;             // per task at least, decode
constexpr int64_t kSerialMultiplyAdds = 400'000;     // prefill
constexpr int64_t kTasksPerThread = 4;               // evens out cores that other processes slow down

int64_t CeilDivide(int64_t n, int64_t divisor) { return (n + divisor - 1) / divisor; }

void ZeroTokens(const AttentionArgs& a, int64_t row, int64_t first_token) {
  const int64_t token_bytes = a.num_heads * a.head_dim * ByteWidth(a.dtype);
  char* const out = static_cast<char*>(a.out) + row * a.num_positions * token_bytes;
  std::memset(out + first_token * token_bytes, 0, (a.num_positions - first_token) * token_bytes);
}

// The first position that a query at `position` sees.
int64_t WindowBegin(const AttentionArgs& a, int64_t position) {
  return a.window > 0 ? std::max<int64_t>(0, position + 1 - a.window) : 0;
}

template <typename Task>
void Run(int64_t num_tasks, bool is_serial, const Task& task) {
  if (is_serial) {
    for (int64_t i = 0; i < num_tasks; ++i) task(i);
  } else {
    ParallelFor(num_tasks, task);
  }
}

// Kept between calls by the calling thread.
struct DecodeMemory {
  std::vector<int64_t> first_chunk;               // [B + 1], numbering chunks by row, kv head, position
  std::vector<float> partials;                    // [chunks, decode_partial_floats]
  std::unique_ptr<std::atomic<int32_t>[]> done;   // [B, K], chunks finished
  int64_t done_size = 0;
};

void Decode(const AttentionArgs& a, const AttentionKernels& kernels) {
  thread_local DecodeMemory memory;
  std::vector<int64_t>& first_chunk = memory.first_chunk;
  first_chunk.resize(a.batch_size + 1);
  first_chunk[0] = 0;
  int64_t total_positions = 0;
  bool is_joined = false;  // some head has more than one chunk
  for (int64_t b = 0; b < a.batch_size; ++b) {
    int64_t chunks_per_head = 0;
    if (a.num_tokens[b] == 0) {
      ZeroTokens(a, b, 0);
    } else {
      const int64_t context = a.cache_len[b] + int64_t{1};
      const int64_t window_begin = WindowBegin(a, a.cache_len[b]);
      chunks_per_head = CeilDivide(context, kDecodeChunk) - window_begin / kDecodeChunk;
      total_positions += context - window_begin;
      is_joined |= chunks_per_head > 1;
    }
    first_chunk[b + 1] = first_chunk[b] + a.num_kv_heads * chunks_per_head;
  }
  const int64_t num_chunks = first_chunk[a.batch_size];
  if (num_chunks == 0) return;

  const int64_t partial_floats = kernels.decode_partial_floats(a);
  const int64_t scratch_floats = kernels.decode_scratch_floats(a);
  if (is_joined) {
    const size_t wanted = static_cast<size_t>(num_chunks * partial_floats);
    if (memory.partials.size() < wanted) memory.partials.resize(wanted + wanted / 2);
    const int64_t num_heads = a.batch_size * a.num_kv_heads;
    if (memory.done_size < num_heads) {
      memory.done.reset(new std::atomic<int32_t>[num_heads]);
      memory.done_size = num_heads;
    }
    for (int64_t i = 0; i < num_heads; ++i) memory.done[i].store(0, std::memory_order_relaxed);
  }
  float* const partials = memory.partials.data();
  std::atomic<int32_t>* const done = memory.done.get();

  const int64_t cache_bytes = total_positions * a.num_kv_heads * 2 * CacheRow(a.cache_type, a.head_dim) * ByteWidth(a.cache_type);
  const bool is_serial = cache_bytes < kSerialBytes;
  const int64_t most_tasks = is_serial ? 1 : std::min(NumThreads() * kTasksPerThread, cache_bytes / kTaskBytes);
  const int64_t num_tasks = std::min(num_chunks, std::max<int64_t>(1, most_tasks));
  Run(num_tasks, is_serial, [&](int64_t task) {
    float* const scratch = ThreadScratch(scratch_floats + partial_floats);
    const int64_t end = num_chunks * (task + 1) / num_tasks;
    int64_t index = num_chunks * task / num_tasks;
    int64_t b = std::upper_bound(first_chunk.begin(), first_chunk.end(), index) - first_chunk.begin() - 1;
    for (; index < end; ++index) {
      while (index >= first_chunk[b + 1]) ++b;
      const int64_t chunks_per_head = (first_chunk[b + 1] - first_chunk[b]) / a.num_kv_heads;
      const int64_t kv_head = (index - first_chunk[b]) / chunks_per_head;
      const int64_t window_begin = WindowBegin(a, a.cache_len[b]);
      const int64_t begin = ((index - first_chunk[b]) % chunks_per_head + window_begin / kDecodeChunk) * kDecodeChunk;
      const DecodeChunk chunk{b, kv_head, std::max(begin, window_begin),
                              std::min(begin + kDecodeChunk, a.cache_len[b] + int64_t{1})};
      if (chunks_per_head == 1) {
        float* const partial = scratch + scratch_floats;
        kernels.decode_chunk(a, chunk, partial, scratch);
        kernels.decode_merge(a, b, kv_head, partial, 1, scratch);
        continue;
      }
      kernels.decode_chunk(a, chunk, partials + index * partial_floats, scratch);
      const int32_t num_done = done[b * a.num_kv_heads + kv_head].fetch_add(1, std::memory_order_acq_rel) + 1;
      if (num_done == chunks_per_head) {
        const float* const first = partials + (first_chunk[b] + kv_head * chunks_per_head) * partial_floats;
        kernels.decode_merge(a, b, kv_head, first, chunks_per_head, scratch);
      }
    }
  });
}

void Prefill(const AttentionArgs& a, const AttentionKernels& kernels) {
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

  // Large tiles share the widening of keys and values; smaller ones where threads would have nothing to do.
  const bool is_serial = multiply_adds < kSerialMultiplyAdds;
  const int64_t wanted_tiles = is_serial ? 1 : 2 * NumThreads();
  int64_t tile_heads = 0, tile_tokens = 0, head_tiles = 0, token_tiles = 0;
  for (int64_t queries = kMaxTileQueries; queries >= 16; queries /= 2) {
    tile_heads = std::min(group, queries);
    tile_tokens = queries / tile_heads;
    head_tiles = CeilDivide(group, tile_heads);
    token_tiles = CeilDivide(most_tokens, tile_tokens);
    if (a.batch_size * a.num_kv_heads * head_tiles * token_tiles >= wanted_tiles) break;
  }

  const int64_t scratch_floats = kernels.prefill_scratch_floats(a);
  const int64_t tiles_per_step = a.batch_size * a.num_kv_heads * head_tiles;
  const int64_t num_tiles = tiles_per_step * token_tiles;
  Run(num_tiles + a.batch_size, is_serial, [&](int64_t task) {
    if (task >= num_tiles) {
      const int64_t b = task - num_tiles;
      return ZeroTokens(a, b, a.num_tokens[b]);
    }
    PrefillTile tile;
    tile.first_token = (token_tiles - 1 - task / tiles_per_step) * tile_tokens;
    tile.first_head = task % head_tiles * tile_heads;
    tile.kv_head = task / head_tiles % a.num_kv_heads;
    tile.row = task / (head_tiles * a.num_kv_heads) % a.batch_size;
    tile.num_heads = std::min(tile_heads, group - tile.first_head);
    tile.num_tokens = std::min(tile_tokens, a.num_tokens[tile.row] - tile.first_token);
    if (tile.num_tokens <= 0) return;
    kernels.prefill_tile(a, tile, ThreadScratch(scratch_floats));
  });
}

}  // namespace

void Attention(const AttentionArgs& a) {
  static const AttentionKernels kernels = POPTRANSFORMER_SELECT_ISA(Attention);
  if (a.batch_size == 0 || a.num_positions == 0 || a.head_dim == 0) return;
  if (a.num_positions == 1) {
    Decode(a, kernels);
  } else {
    Prefill(a, kernels);
  }
}

}  // namespace poptransformer
