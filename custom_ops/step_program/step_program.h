// A program: what lies between the embedding and the logits of a decode step or a prompt, or a part of it, as one call.
//
// A step reads and writes rows of floats, one for each token: M = B * T of them, row b * T + t. Steps that do not wait for each other form a phase; the phases
// follow each other inside one parallel region (common/phases.h), so that a step costs no call and no change of dtype, and the
// threads go from one weight to the next without a stop. All values between steps are float32, whatever the dtype of the graph.
//
//   load      out = an argument                         store     a result = in
//   embed     out = row ids[m] of a table (packed or not)
//   norm      out = rms_norm or layer_norm of in
//   product   out = activation(x W^T + b) (* (x U^T + c)) (+ residual), x normed first if asked for: `multiply` is the second
//             product of a gated MLP
//   rope      a table of cosines and sines for the positions, [M, 2 * half]
//   attention appends key and value to the caches and attends; with T = 1, query and key are normed and turned first if asked for
//   map       out = f(in) or f(in, other), element by element
//   round     out = in, normed first if asked for, as bfloat16 in tiles: what products multiply in tiled programs
//   heads     out = the heads of in, normed and turned if asked for: what attention reads where T > 1
//
// With few rows a program is bound by reading each weight once. In a tiled one, for many rows, weights become bfloat16 panels
// of the CPU's tile unit (common/tile_product.h), and products are bound by that.
#ifndef POPTRANSFORMER_CUSTOM_OPS_STEP_PROGRAM_STEP_PROGRAM_H_
#define POPTRANSFORMER_CUSTOM_OPS_STEP_PROGRAM_STEP_PROGRAM_H_

#include <cstdint>
#include <vector>

#include "attention/attention.h"
#include "common/dtype.h"

namespace poptransformer {

constexpr int64_t kMaxProgramRows = 8;  // where it is not tiled

// Numbers of an argument of the call; none where data is null.
struct Numbers {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
};

// One row of floats for each of M, `stride` apart; none where data is null.
struct Rows {
  float* data = nullptr;
  int64_t stride = 0;
  float* operator[](int64_t m) const { return data + m * stride; }
};

enum class NormKind { kNone, kRms, kLayer };

struct Norm {
  NormKind kind = NormKind::kNone;
  float eps = 0;
  Numbers weight, bias;  // bias: of kLayer
};

// Rows `first` .. first + out_features - 1 of a weight, as linear.h and packed_linear.h have it.
struct Matrix {
  const void* data = nullptr;  // of row `first`
  DType dtype = DType::kFloat32;
  int64_t bits = 0;  // of a code; 0: numbers of dtype
  int64_t units_per_group = 0, block_bytes = 0;
  int64_t in_features = 0, out_features = 0;
  Numbers bias;  // [out_features]
};

enum class StepKind { kLoad, kStore, kEmbed, kNorm, kProduct, kRope, kAttention, kMap, kRound, kHeads };

// The functions of `map`, and the activations of `product`. The order is known to backends/xla/step_program.py.
enum class Function { kNone, kSilu, kGelu, kGeluTanh, kRelu, kTanh, kSigmoid, kAdd, kSub, kMul };

struct Step {
  StepKind kind = StepKind::kLoad;
  int64_t width = 0;  // of out: D, out_features, N * H
  Rows in, out;
  Norm norm;              // norm, product
  Function function = Function::kNone;

  Numbers numbers;        // load: [M, width]. map: [1], in place of `other`
  void* result = nullptr;  // store: [M, width] of result_dtype
  DType result_dtype = DType::kFloat32;

  const int32_t* ids = nullptr;  // embed: [M]. rope: positions [M]
  Matrix matrix;                 // embed, product
  Matrix multiply;               // product; data is null for none
  Rows other;                    // product: residual. map: second operand
  int64_t prepared = 0;          // product: number of the x it multiplies; equal numbers, equal x
  Bfloat16* tiles = nullptr;     // round: out. product of a tiled program: x
  Bfloat16* out_tiles = nullptr;  // product of a tiled program: its result, rounded, in place of `out`; width is whole tiles

  int64_t half = 0;              // rope, attention, heads: pairs that turn; 0 for none
  const float* inv_freq = nullptr;  // rope: [half]
  float scale = 0;               // rope: on the table. attention: on the scores
  bool is_interleaved = false;

  Rows key, value, table;        // attention; query is `in`. heads: table
  Norm key_norm;                 // attention; query_norm is `norm`
  int64_t num_heads = 0, num_kv_heads = 0, head_dim = 0, cache_size = 0, window = 0;
  CacheType cache_type = CacheType::kFloat32;
  void* k_cache = nullptr;       // [B, K, S, CacheRow]
  void* v_cache = nullptr;
  const int32_t* cache_len = nullptr;    // [B]
  const int32_t* num_tokens = nullptr;   // [B], 0 .. T
  const int32_t* context_len = nullptr;  // [B] or null; where T > 1
  const float* alibi_slopes = nullptr;  // [N] or null
};

struct Program {
  int64_t num_rows = 0;       // M
  int64_t num_positions = 1;  // T
  bool is_tiled = false;      // T > 1 and M > kMaxProgramRows only if so, and only where HasTiles()
  std::vector<Step> steps;
  std::vector<int64_t> phase_begin;  // step that each phase begins with, then the number of steps
};

// The caller has checked all sizes and numbers.
void RunProgram(const Program& program);

// Floats that values between the steps live in; of this thread, kept for its next program.
float* ProgramArena(int64_t num_floats);

}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_STEP_PROGRAM_STEP_PROGRAM_H_
