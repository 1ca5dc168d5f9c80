// Cuts a call into tasks for the thread pool: one parallel region a call, no barrier inside. How prefill (T > 1) is cut is in
// attention_prefill.cc.
//
// Decode (T = 1): the cache of each (row, kv head) in chunks of kDecodeChunk positions, tasks being equal runs of chunks. The
// task with the chunk of the new position appends it; whoever finishes a head's last chunk joins the partial results, in order.
// A window cuts the first chunk short and leaves those before it out.
//
// Bytes moved by decode: 2 * visible positions * K * H * sizeof(cache) a row.
//
// Measured with 2 cores of a Xeon with AVX-512, decode of caches too large for its L3: 27 GB/s float32 and 21 GB/s bfloat16 at
// H = 64, where a plain stream over memory in 4 KiB pages reads 29. Beside the plain XLA lowering:
// benchmarks/bench_ops.py --op attention --plain.
#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "attention/attention.h"
#include "attention/attention_kernel.h"
#include "attention/attention_prefill.h"
#include "common/cpu_features.h"
#include "common/scratch.h"
#include "common/thread_pool.h"

namespace poptransformer {
namespace {

// Less than this is done sooner by one thread than a parked one takes to wake.
constexpr int64_t kSerialBytes = 96 << 10;           // of cache read
constexpr int64_t kTaskBytes = 48 << 10;             // per task at least
constexpr int64_t kTasksPerThread = 4;               // evens out cores that other processes slow down

int64_t CeilDivide(int64_t n, int64_t divisor) { return (n + divisor - 1) / divisor; }

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

void Prefill(const AttentionArgs& a) {
  const PrefillPlan plan = MakePrefillPlan(a);
  Run(plan.num_tasks, plan.is_serial,
      [&](int64_t task) { RunPrefillTask(a, plan, task, ThreadScratch(plan.scratch_floats)); });
}

}  // namespace

void Attention(const AttentionArgs& a) {
  static const AttentionKernels kernels = POPTRANSFORMER_SELECT_ISA(Attention);
  if (a.batch_size == 0 || a.num_positions == 0 || a.head_dim == 0) return;
  if (a.num_positions == 1) {
    Decode(a, kernels);
  } else {
    Prefill(a);
  }
}

}  // namespace poptransformer
