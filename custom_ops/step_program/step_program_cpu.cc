// Cuts the steps of a program into tasks, and runs them phase by phase.
//
// What a product multiplies, normed and (for packed weights) quantised x, is prepared by every thread for itself: it takes less
// time than to hand it over, and spares a barrier. Attention of a row is cut into chunks of positions, few of them up to a
// context of kShortContext, so that two threads share three heads evenly; a row's result depends on its context alone.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>

#include "attention/attention_kernel.h"
#include "attention/attention_prefill.h"
#include "common/cpu_features.h"
#include "common/phases.h"
#include "common/scratch.h"
#include "common/thread_pool.h"
#include "linear/linear_kernel.h"
#include "packed_linear/packed_linear_kernel.h"
#include "step_program/step_program.h"
#include "step_program/step_program_kernel.h"
#include "step_program/step_program_tiles.h"

namespace poptransformer {
namespace {

constexpr int64_t kTaskBytes = 8 << 10;       // of weights, per task at least
constexpr int64_t kTasksPerThread = 12;       // of a phase: evens out cores that other processes slow down
constexpr int64_t kPackedOutputs = kPackedBlockRows;
constexpr int64_t kPlainOutputs = 12;         // a multiple of 1, 2, 3 and 4: only a weight's last task has short blocks
constexpr int64_t kShortContext = 1024, kShortChunk = 64;

int64_t CeilDivide(int64_t n, int64_t divisor) { return (n + divisor - 1) / divisor; }
int64_t RoundUp(int64_t n, int64_t multiple) { return CeilDivide(n, multiple) * multiple; }

struct Kernels {
  ProgramKernels rows = POPTRANSFORMER_SELECT_ISA(ProgramRows);
  LinearKernels linear = POPTRANSFORMER_SELECT_ISA(Linear);
  PackedLinearKernels packed = ActivePackedLinear();
  AttentionKernels attention = POPTRANSFORMER_SELECT_ISA(Attention);
};

const Kernels& ActiveKernels() {
  static const Kernels kernels;
  return kernels;
}

// ---- Views of a step for the kernels ------------------------------------------------------------------------------------

// Outputs [begin, end) of a matrix, to be multiplied with num_rows rows of x into out [M, end - begin].
PackedLinearArgs PackedArgs(const Matrix& w, int64_t num_rows, int64_t begin, int64_t end, const float* x, float* out) {
  PackedLinearArgs a;
  a.num_rows = num_rows;
  a.in_features = w.in_features;
  a.out_features = end - begin;
  a.bits = w.bits;
  a.is_float8 = false;
  a.units_per_group = w.units_per_group;
  a.block_bytes = w.block_bytes;
  a.x_dtype = a.out_dtype = DType::kFloat32;
  a.x = x;
  a.weight = static_cast<const uint8_t*>(w.data) + begin / kPackedBlockRows * w.block_bytes;
  a.bias = nullptr;
  a.out = out;
  return a;
}

LinearArgs PlainArgs(const Matrix& w, int64_t num_rows, int64_t begin, int64_t end, float* out) {
  LinearArgs a;
  a.num_rows = num_rows;
  a.in_features = w.in_features;
  a.out_features = end - begin;
  a.x_dtype = a.out_dtype = DType::kFloat32;
  a.weight_dtype = w.dtype;
  a.x = nullptr;
  a.weight = static_cast<const char*>(w.data) + begin * w.in_features * ByteWidth(w.dtype);
  a.bias = nullptr;
  a.out = out;
  return a;
}

// One row and key/value head of an attention step, as a call of its own.
AttentionArgs HeadArgs(const Step& s, int64_t row, int64_t kv_head) {
  const int64_t group = s.num_heads / s.num_kv_heads;
  const int64_t cache_offset = (row * s.num_kv_heads + kv_head) * s.cache_size * CacheRow(s.cache_type, s.head_dim) * ByteWidth(s.cache_type);
  AttentionArgs a;
  a.batch_size = a.num_positions = a.num_kv_heads = 1;
  a.cache_size = s.cache_size;
  a.num_heads = group;
  a.head_dim = s.head_dim;
  a.scale = s.scale;
  a.window = s.window;
  a.dtype = DType::kFloat32;
  a.cache_type = s.cache_type;
  a.query = s.in[row] + kv_head * group * s.head_dim;
  a.key = s.key[row] + kv_head * s.head_dim;
  a.value = s.value[row] + kv_head * s.head_dim;
  a.k_cache = static_cast<char*>(s.k_cache) + cache_offset;
  a.v_cache = static_cast<char*>(s.v_cache) + cache_offset;
  a.cache_len = s.cache_len + row;
  a.num_tokens = s.num_tokens + row;
  a.context_len = nullptr;
  a.alibi_slopes = s.alibi_slopes ? s.alibi_slopes + kv_head * group : nullptr;
  a.out = s.out[row] + kv_head * group * s.head_dim;
  return a;
}

// An attention step with T > 1, as a call of its own.
AttentionArgs PromptArgs(const Program& program, const Step& s) {
  AttentionArgs a = HeadArgs(s, 0, 0);
  a.batch_size = program.num_rows / program.num_positions;
  a.num_positions = program.num_positions;
  a.num_kv_heads = s.num_kv_heads;
  a.num_heads = s.num_heads;
  a.context_len = s.context_len;
  a.allow_bfloat16 = true;  // as the products beside it do
  return a;
}

// The chunks of an attention step: those of row b are first_chunk[b] .. first_chunk[b + 1], equally many for each head.
struct Chunks {
  static int64_t Size(const Step& s, int64_t row) {
    return s.cache_len[row] < kShortContext ? kShortChunk : kDecodeChunk;
  }
  static int64_t WindowBegin(const Step& s, int64_t row) {
    return s.window > 0 ? std::max<int64_t>(0, s.cache_len[row] + 1 - s.window) : 0;
  }
  // A row at rest has one, which only fills zeros in.
  static int64_t PerHead(const Step& s, int64_t row) {
    if (s.num_tokens[row] == 0) return 1;
    return CeilDivide(s.cache_len[row] + int64_t{1}, Size(s, row)) - WindowBegin(s, row) / Size(s, row);
  }
  static int64_t Count(const Step& s, int64_t num_rows) {
    int64_t count = 0;
    for (int64_t b = 0; b < num_rows; ++b) count += s.num_kv_heads * PerHead(s, b);
    return count;
  }
};

// ---- A run --------------------------------------------------------------------------------------------------------------

// Where a step's tasks stand in its phase, and how they are cut.
struct Cut {
  int64_t first_task = 0, num_tasks = 0;
  float* partials = nullptr;              // attention: [chunks, partial floats]
  std::atomic<int32_t>* done = nullptr;   // attention: [M, K], chunks finished
  PrefillPlan prompt;                     // attention with T > 1
};

// Kept between runs by the calling thread.
struct Memory {
  std::vector<Cut> cuts;
  std::vector<int32_t> num_tasks;
  std::vector<float> partials;
  std::unique_ptr<std::atomic<int32_t>[]> done;
  int64_t done_size = 0;
  std::unique_ptr<int64_t[]> prepared;  // of each member, a cache line apart
  int64_t prepared_size = 0;
};
constexpr int64_t kLine = 8;  // of int64_t

class Run {
 public:
  Run(const Program& program, Memory& memory)
      : program_(program), memory_(memory), kernels_(ActiveKernels()), num_rows_(program.num_rows) {
    memory.cuts.assign(program.steps.size(), Cut());
    for (const Step& step : program.steps) Measure(step);
    PlaceAttention();
    const int64_t num_phases = static_cast<int64_t>(program.phase_begin.size()) - 1;
    memory.num_tasks.assign(num_phases, 0);
    for (int64_t p = 0; p < num_phases; ++p) memory.num_tasks[p] = CutPhase(program.phase_begin[p], program.phase_begin[p + 1]);
    const int64_t num_members = NumThreads();
    if (memory.prepared_size < num_members) {
      memory.prepared.reset(new int64_t[num_members * kLine]);
      memory.prepared_size = num_members;
    }
    for (int64_t m = 0; m < num_members; ++m) memory.prepared[m * kLine] = -1;
  }

  void Go() {
    RunPhases(static_cast<int64_t>(memory_.num_tasks.size()), memory_.num_tasks.data(),
              [this](int64_t member, int64_t phase, int64_t task) {
                int64_t i = program_.phase_begin[phase];
                while (task >= memory_.cuts[i].first_task + memory_.cuts[i].num_tasks) ++i;
                RunTask(program_.steps[i], memory_.cuts[i], task - memory_.cuts[i].first_task, member);
              });
  }

 private:
  // ---- Sizes

  void Measure(const Step& s) {
    if (s.kind == StepKind::kRound) {
      work_floats_ = std::max(work_floats_, kRowsPerTask * s.width);
    } else if (s.kind == StepKind::kProduct && program_.is_tiled) {
      work_floats_ = std::max(work_floats_, TileScratchFloats(s));
    } else if (s.kind == StepKind::kAttention && program_.num_positions > 1) {
      work_floats_ = std::max(work_floats_, MakePrefillPlan(PromptArgs(program_, s)).scratch_floats);
    } else if (s.kind == StepKind::kProduct) {
      int64_t floats = num_rows_ * RoundUp(s.matrix.in_features, 64);  // normed x
      if (s.matrix.bits) {
        floats += QuantizedFloats(PackedArgs(s.matrix, num_rows_, 0, 1, nullptr, nullptr));
      } else {
        floats += num_rows_ * kernels_.linear.x_stride(PlainArgs(s.matrix, num_rows_, 0, 1, nullptr));
      }
      prepared_floats_ = std::max(prepared_floats_, RoundUp(floats, 16));
    } else if (s.kind == StepKind::kAttention) {
      const AttentionArgs a = HeadArgs(s, 0, 0);
      const int64_t heads = RoundUp((a.num_heads + 1) * s.head_dim, 16);
      work_floats_ = std::max(work_floats_, heads + RoundUp(kernels_.attention.decode_scratch_floats(a), 16) +
                                                kernels_.attention.decode_partial_floats(a));
    }
  }

  void PlaceAttention() {
    int64_t most_partials = 0, num_heads = 0;
    for (const Step& s : program_.steps) {
      if (s.kind != StepKind::kAttention || program_.num_positions > 1) continue;
      most_partials = std::max(most_partials, Chunks::Count(s, num_rows_) * PartialFloats(s));
      num_heads += num_rows_ * s.num_kv_heads;
    }
    if (static_cast<int64_t>(memory_.partials.size()) < most_partials) {
      memory_.partials.resize(most_partials + most_partials / 2);
    }
    if (memory_.done_size < num_heads) {
      memory_.done.reset(new std::atomic<int32_t>[num_heads]);
      memory_.done_size = num_heads;
    }
    for (int64_t i = 0; i < num_heads; ++i) memory_.done[i].store(0, std::memory_order_relaxed);
  }

  int64_t PartialFloats(const Step& s) const { return kernels_.attention.decode_partial_floats(HeadArgs(s, 0, 0)); }

  static int64_t OutputsPerBlock(const Step& s) { return s.matrix.bits ? kPackedOutputs : kPlainOutputs; }
  static int64_t NumBlocks(const Step& s) { return CeilDivide(s.width, OutputsPerBlock(s)); }
  static int64_t MatrixBytes(const Matrix& w) {
    if (w.data == nullptr) return 0;
    return w.bits ? CeilDivide(w.out_features, kPackedBlockRows) * w.block_bytes
                  : w.out_features * w.in_features * ByteWidth(w.dtype);
  }
  static int64_t ProductBytes(const Step& s) { return MatrixBytes(s.matrix) + MatrixBytes(s.multiply); }

  // Tasks of one phase are of about one size.
  int32_t CutPhase(int64_t begin, int64_t end) {
    int64_t phase_bytes = 0;
    for (int64_t i = begin; i < end; ++i) {
      if (program_.steps[i].kind == StepKind::kProduct) phase_bytes += ProductBytes(program_.steps[i]);
    }
    const int64_t task_bytes = std::max(kTaskBytes, phase_bytes / (NumThreads() * kTasksPerThread));
    int64_t next = 0;
    float* partials = memory_.partials.data();
    for (int64_t i = begin; i < end; ++i) {
      const Step& s = program_.steps[i];
      Cut& cut = memory_.cuts[i];
      cut.first_task = next;
      if (s.kind == StepKind::kAttention && program_.num_positions > 1) {
        cut.prompt = MakePrefillPlan(PromptArgs(program_, s));
        cut.num_tasks = std::min(cut.prompt.num_tasks, kMaxPhaseTasks / (end - begin));
      } else if (program_.is_tiled && s.kind != StepKind::kAttention) {
        const int64_t count = s.kind == StepKind::kProduct ? NumTileTasks(s) : CeilDivide(num_rows_, kRowsPerTask);
        cut.num_tasks = std::min(count, kMaxPhaseTasks / (end - begin));
      } else if (s.kind == StepKind::kProduct) {
        cut.num_tasks = std::clamp<int64_t>(ProductBytes(s) / task_bytes, 1, std::max<int64_t>(1, NumBlocks(s)));
        cut.num_tasks = std::min(cut.num_tasks, kMaxPhaseTasks / (end - begin));
        work_floats_ = std::max(work_floats_, 2 * num_rows_ * (CeilDivide(NumBlocks(s), cut.num_tasks) + 1) * OutputsPerBlock(s));
      } else if (s.kind == StepKind::kAttention) {
        const int64_t count = Chunks::Count(s, num_rows_);
        cut.num_tasks = std::min(count, kMaxPhaseTasks / (end - begin));
        cut.partials = partials;
        cut.done = memory_.done.get() + next_head_;
        partials += count * PartialFloats(s);
        next_head_ += num_rows_ * s.num_kv_heads;
      } else {
        cut.num_tasks = num_rows_;
      }
      next += cut.num_tasks;
    }
    return static_cast<int32_t>(next);
  }

  // ---- Tasks

  void RunTask(const Step& s, const Cut& cut, int64_t task, int64_t member) const {
    float* const scratch = ThreadScratch(prepared_floats_ + work_floats_);
    if (s.kind == StepKind::kAttention) {
      if (program_.num_positions == 1) return Attend(s, cut, task, scratch + prepared_floats_);
      const AttentionArgs a = PromptArgs(program_, s);
      return ForRun(cut.prompt.num_tasks, cut, task, [&](int64_t i) { RunPrefillTask(a, cut.prompt, i, scratch); });
    }
    if (!program_.is_tiled) return s.kind == StepKind::kProduct ? Product(s, cut, task, member, scratch) : RunRow(s, task);
    if (s.kind == StepKind::kProduct) {
      return ForRun(NumTileTasks(s), cut, task, [&](int64_t i) { MultiplyTiles(s, num_rows_, i, scratch); });
    }
    ForRun(CeilDivide(num_rows_, kRowsPerTask), cut, task, [&](int64_t block) {
      if (s.kind == StepKind::kRound) return RoundBlock(s, kernels_.rows, num_rows_, block, scratch);
      const int64_t end = std::min((block + 1) * kRowsPerTask, num_rows_);
      for (int64_t row = block * kRowsPerTask; row < end; ++row) RunRow(s, row);
    });
  }

  // The task's equal share of `count` pieces.
  template <typename Piece>
  static void ForRun(int64_t count, const Cut& cut, int64_t task, const Piece& piece) {
    for (int64_t i = count * task / cut.num_tasks; i < count * (task + 1) / cut.num_tasks; ++i) piece(i);
  }

  void RunRow(const Step& s, int64_t row) const {
    switch (s.kind) {
      case StepKind::kLoad:
        return kernels_.rows.widen(s.numbers, row * s.width, s.width, s.out[row]);
      case StepKind::kStore:
        return kernels_.rows.narrow(s.in[row], s.width, s.result_dtype, s.result, row * s.width);
      case StepKind::kEmbed:
        return Embed(s, row);
      case StepKind::kNorm:
        return kernels_.rows.norm(s.norm, s.in[row], s.width, s.out[row]);
      case StepKind::kRope:
        return Rope(s, row);
      case StepKind::kMap:
        return Map(s, row);
      case StepKind::kHeads:
        for (int64_t i = 0; i < s.width; i += s.head_dim) TurnHead(s, s.norm, row, s.in[row] + i, s.out[row] + i);
        return;
      default:
        return;  // steps of more than a row
    }
  }

  void Embed(const Step& s, int64_t row) const {
    const int64_t id = s.ids[row];
    if (s.matrix.bits) {
      kernels_.rows.unpack_row(s.matrix, id, s.out[row]);
    } else {
      kernels_.rows.widen({s.matrix.data, s.matrix.dtype}, id * s.width, s.width, s.out[row]);
    }
  }

  void Rope(const Step& s, int64_t row) const {
    float* const cosines = s.out[row];
    float* const sines = cosines + s.half;
    const float position = static_cast<float>(s.ids[row]);
    for (int64_t i = 0; i < s.half; ++i) {
      const float angle = position * s.inv_freq[i];
      cosines[i] = s.scale * std::cos(angle);
      sines[i] = s.scale * std::sin(angle);
    }
  }

  void Map(const Step& s, int64_t row) const {
    float number = 0;
    if (s.numbers.data) kernels_.rows.widen(s.numbers, 0, 1, &number);
    kernels_.rows.map(s.function, s.in[row], s.other.data ? s.other[row] : nullptr, number, s.width, s.out[row]);
  }

  // x of a product, normed if asked for: dense [M, I].
  const float* NormedRows(const Step& s, float* memory) const {
    const int64_t width = s.matrix.in_features;
    const bool is_dense = num_rows_ == 1 || s.in.stride == width;
    if (s.norm.kind == NormKind::kNone && is_dense) return s.in.data;
    for (int64_t m = 0; m < num_rows_; ++m) {
      if (s.norm.kind == NormKind::kNone) {
        std::memcpy(memory + m * width, s.in[m], width * sizeof(float));
      } else {
        kernels_.rows.norm(s.norm, s.in[m], width, memory + m * width);
      }
    }
    return memory;
  }

  void Prepare(const Step& s, float* normed, float* prepared) const {
    const float* const x = NormedRows(s, normed);
    if (s.matrix.bits) {
      const PackedLinearArgs a = PackedArgs(s.matrix, num_rows_, 0, 1, x, nullptr);
      return kernels_.packed.quantize(a, CutQuantized(a, prepared), 0, num_rows_);
    }
    LinearArgs a = PlainArgs(s.matrix, num_rows_, 0, 1, nullptr);
    a.x = x;
    kernels_.linear.widen_x(a, prepared);
  }

  void Multiply(const Matrix& w, int64_t begin, int64_t end, float* prepared, float* out) const {
    if (w.bits) {
      const PackedLinearArgs a = PackedArgs(w, num_rows_, begin, end, nullptr, out);
      kernels_.packed.blocks(a, CutQuantized(a, prepared), 0, CeilDivide(end - begin, kPackedBlockRows));
    } else {
      kernels_.linear.outputs(PlainArgs(w, num_rows_, begin, end, out), prepared, 0, end - begin);
    }
  }

  void Product(const Step& s, const Cut& cut, int64_t task, int64_t member, float* scratch) const {
    float* const normed = scratch + 0;
    float* const prepared = scratch + num_rows_ * RoundUp(s.matrix.in_features, 64);
    int64_t& has_prepared = memory_.prepared[member * kLine];
    if (has_prepared != s.prepared) {
      Prepare(s, normed, prepared);
      has_prepared = s.prepared;
    }
    const int64_t blocks = NumBlocks(s), outputs = OutputsPerBlock(s);
    const int64_t begin = blocks * task / cut.num_tasks * outputs;
    const int64_t end = std::min(blocks * (task + 1) / cut.num_tasks * outputs, s.width);
    const int64_t n = end - begin;
    if (n <= 0) return;
    float* const sums = scratch + prepared_floats_;
    float* const factors = sums + num_rows_ * n;
    Multiply(s.matrix, begin, end, prepared, sums);
    if (s.multiply.data) Multiply(s.multiply, begin, end, prepared, factors);
    FinishArgs finish;
    finish.num_rows = num_rows_;
    finish.width = n;
    finish.first = begin;
    if (s.multiply.data) {
      if (s.multiply.bias.data) {
        finish.sums = finish.out = {factors, n};
        finish.bias = s.multiply.bias;
        kernels_.rows.finish(finish);
      }
      finish.factors = {factors, n};
    }
    finish.function = s.function;
    finish.sums = {sums, n};
    finish.bias = s.matrix.bias;
    if (s.other.data) finish.residual = {s.other[0] + begin, s.other.stride};
    finish.out = {s.out[0] + begin, s.out.stride};
    kernels_.rows.finish(finish);
  }

  void Attend(const Step& s, const Cut& cut, int64_t task, float* scratch) const {
    const int64_t count = Chunks::Count(s, num_rows_);
    const int64_t end = count * (task + 1) / cut.num_tasks;
    int64_t index = count * task / cut.num_tasks;
    int64_t row = 0, first = 0;
    for (; index < end; ++index) {
      int64_t per_head = Chunks::PerHead(s, row);
      while (index >= first + s.num_kv_heads * per_head) {
        first += s.num_kv_heads * per_head;
        per_head = Chunks::PerHead(s, ++row);
      }
      AttendChunk(s, cut, row, (index - first) / per_head, (index - first) % per_head, per_head, index, scratch);
    }
  }

  void AttendChunk(const Step& s, const Cut& cut, int64_t row, int64_t kv_head, int64_t chunk_number, int64_t per_head,
                   int64_t index, float* scratch) const {
    AttentionArgs a = HeadArgs(s, row, kv_head);
    const int64_t dim = s.head_dim;
    if (s.num_tokens[row] == 0) {
      std::memset(a.out, 0, a.num_heads * dim * sizeof(float));
      return;
    }
    const int64_t size = Chunks::Size(s, row), window_begin = Chunks::WindowBegin(s, row), context = s.cache_len[row] + int64_t{1};
    const int64_t begin = (chunk_number + window_begin / size) * size;
    const DecodeChunk chunk{0, 0, std::max(begin, window_begin), std::min(begin + size, context)};

    float* const query = scratch;
    float* const key = query + a.num_heads * dim;
    float* const work = scratch + RoundUp((a.num_heads + 1) * dim, 16);
    if (s.norm.kind != NormKind::kNone || s.half > 0) {
      for (int64_t g = 0; g < a.num_heads; ++g) {
        TurnHead(s, s.norm, row, static_cast<const float*>(a.query) + g * dim, query + g * dim);
      }
      a.query = query;
    }
    if (chunk.end == context && (s.key_norm.kind != NormKind::kNone || s.half > 0)) {
      TurnHead(s, s.key_norm, row, static_cast<const float*>(a.key), key);
      a.key = key;
    }

    const int64_t partial_floats = kernels_.attention.decode_partial_floats(a);
    float* const own = work + RoundUp(kernels_.attention.decode_scratch_floats(a), 16);
    float* const partial = per_head == 1 ? own : cut.partials + index * partial_floats;
    kernels_.attention.decode_chunk(a, chunk, partial, work);
    if (per_head > 1) {
      std::atomic<int32_t>& done = cut.done[row * s.num_kv_heads + kv_head];
      if (done.fetch_add(1, std::memory_order_acq_rel) + 1 != per_head) return;
    }
    kernels_.attention.decode_merge(a, 0, 0, partial - (per_head == 1 ? 0 : chunk_number * partial_floats), per_head, work);
  }

  // One head of query or key: normed, then turned.
  void TurnHead(const Step& s, const Norm& norm, int64_t row, const float* x, float* out) const {
    if (norm.kind != NormKind::kNone) {
      kernels_.rows.norm(norm, x, s.head_dim, out);
      x = out;
    }
    if (s.half > 0) {
      kernels_.rows.turn(x, s.head_dim, s.table[row], s.half, s.is_interleaved, out);
    } else if (x != out) {
      std::memcpy(out, x, s.head_dim * sizeof(float));
    }
  }

  const Program& program_;
  Memory& memory_;
  const Kernels& kernels_;
  const int64_t num_rows_;
  int64_t prepared_floats_ = 0, work_floats_ = 0;
  int64_t next_head_ = 0;
};

}  // namespace

float* ProgramArena(int64_t num_floats) {
  constexpr size_t kAlignFloats = 16;
  thread_local std::vector<float> arena;
  if (arena.size() < num_floats + kAlignFloats) arena.resize(num_floats + num_floats / 2 + kAlignFloats);
  const size_t misaligned = reinterpret_cast<uintptr_t>(arena.data()) / sizeof(float) % kAlignFloats;
  return arena.data() + (kAlignFloats - misaligned) % kAlignFloats;
}

void RunProgram(const Program& program) {
  thread_local Memory memory;
  if (program.num_rows == 0) return;
  Run(program, memory).Go();
}

}  // namespace poptransformer
