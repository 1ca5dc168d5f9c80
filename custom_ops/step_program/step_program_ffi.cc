// XLA binding of step_program: reads the steps, checks every number in them against the buffers of the call, runs them.
//
// The attribute `steps` is a row of integers, written by poptransformer/backends/xla/step_program.py:
//
//   rows M, new positions T, whether it is tiled, floats of the arena, phases P, P + 1 steps that phases begin with (the last: the number of steps), then the steps
//   step      kind, width, then by kind
//     load      NUMBERS, out VIEW
//     store     in VIEW, result
//     embed     MATRIX, ids, out VIEW
//     norm      NORM, in VIEW, out VIEW
//     product   in_features, in VIEW (TILES if it is tiled), NORM, function, MATRIX, MATRIX, residual VIEW, number of the prepared x,
//               whether the result is rounded, out VIEW (TILES if it is)
//     rope      positions, inv_freq, scale, out VIEW
//     attention half, is_interleaved, N, K, H, window, scale, in VIEW, key VIEW, value VIEW, table VIEW, NORM, NORM,
//               k_cache, its result, v_cache, its result, cache_len, num_tokens, context_len or -1, alibi_slopes or -1,
//               out VIEW
//     map       function, in VIEW, other VIEW, NUMBERS, out VIEW
//     round     in VIEW, NORM, out TILES
//     heads     half, is_interleaved, H, in VIEW, NORM, table VIEW, out VIEW
//   VIEW      place, offset, stride: place -1 is the arena, 0 and more a float32 result; or only place -2 for none
//   TILES     -1, offset in the arena, 0
//   NUMBERS   an argument, or -1 for none
//   NORM      kind, eps, NUMBERS, NUMBERS; or only kind 0
//   MATRIX    argument, bits, group_size, first row, in_features, out_features, first of bias, bias NUMBERS; or only -1
//
// Other integers are numbers of arguments or results; a float is the integer with its bits.
#include <cstring>
#include <memory>
#include <string>

#include "attention/cache_type_ffi.h"
#include "common/ffi_checks.h"
#include "common/manifest.h"
#include "common/tile_product.h"
#include "packed_linear/packed_linear.h"
#include "step_program/step_program.h"
#include "step_program/step_program_tiles.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace poptransformer {
namespace {

class Reader {
 public:
  Reader(const ffi::RemainingArgs& args, const ffi::RemainingRets& results, ffi::Span<const int64_t> numbers)
      : args_(args), results_(results), numbers_(numbers) {}

  // The program's steps; see error().
  void Read(Program& program) {
    num_rows_ = program.num_rows = Next();
    num_positions_ = program.num_positions = Next();
    is_tiled_ = program.is_tiled = Next() != 0;
    arena_floats_ = Next();
    const int64_t num_phases = Next();
    program.steps.clear();
    program.phase_begin.clear();
    const bool is_few = num_rows_ <= kMaxProgramRows && num_positions_ == 1;
    if (!Check(num_rows_ > 0 && num_rows_ < int64_t{1} << 32 && num_positions_ > 0 && num_rows_ % num_positions_ == 0,
               "rows of whole sequences") ||
        !Check(is_tiled_ || is_few, "1 to 8 rows, one of each sequence") ||
        !Check(!is_tiled_ || HasTiles(), "a CPU with tiles") ||
        !Check(arena_floats_ >= 0 && arena_floats_ < int64_t{1} << 40, "a size of the arena") ||
        !Check(num_phases >= 0 && num_phases < int64_t{1} << 20, "a number of phases")) {
      return;
    }
    arena_ = ProgramArena(arena_floats_);
    for (int64_t p = 0; p <= num_phases; ++p) {
      program.phase_begin.push_back(Next());
      const int64_t before = p == 0 ? 0 : program.phase_begin[p - 1];
      if (!Check(program.phase_begin[p] >= before && (p > 0 || program.phase_begin[0] == 0), "phases in order")) return;
    }
    for (step_ = 0; step_ < program.phase_begin.back() && error_.empty(); ++step_) {
      program.steps.emplace_back();
      ReadStep(program.steps.back());
    }
    Check(at_ == numbers_.size(), "no numbers after the steps");
  }

  const std::string& error() const { return error_; }

 private:
  bool Check(bool is_good, const char* wanted) {
    if (!is_good && error_.empty()) error_ = "step " + std::to_string(step_) + ": wanted " + wanted;
    return is_good;
  }

  int64_t Next() {
    if (!Check(at_ < numbers_.size(), "more numbers")) return 0;
    return numbers_.begin()[at_++];
  }

  float NextFloat() {
    const uint32_t bits = static_cast<uint32_t>(Next());
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  }

  std::optional<ffi::AnyBuffer> Argument(int64_t index) {
    if (!Check(index >= 0 && index < static_cast<int64_t>(args_.size()), "an argument")) return std::nullopt;
    return *args_.get<ffi::AnyBuffer>(static_cast<size_t>(index));
  }

  std::optional<ffi::AnyBuffer> Result(int64_t index) {
    if (!Check(index >= 0 && index < static_cast<int64_t>(results_.size()), "a result")) return std::nullopt;
    return **results_.get<ffi::AnyBuffer>(static_cast<size_t>(index));
  }

  // At least `count` numbers of an argument from `first` on.
  Numbers NextNumbers(int64_t count, int64_t first = 0) {
    const int64_t index = Next();
    if (index == -1) return {};
    const auto buffer = Argument(index);
    if (!buffer) return {};
    const std::optional<DType> dtype = FloatType(buffer->element_type());
    if (!Check(dtype.has_value(), "floating numbers") ||
        !Check(first >= 0 && static_cast<int64_t>(buffer->element_count()) >= first + count, "more numbers in an argument")) {
      return {};
    }
    return {static_cast<const char*>(buffer->untyped_data()) + first * ByteWidth(*dtype), *dtype};
  }

  // `count` 32-bit numbers of an argument, or null for -1.
  template <typename T>
  const T* NextExactly(int64_t count, ffi::DataType dtype) {
    const int64_t index = Next();
    if (index == -1) return nullptr;
    const auto buffer = Argument(index);
    if (!buffer || !Check(buffer->element_type() == dtype, "int32 or float32 numbers") ||
        !Check(static_cast<int64_t>(buffer->element_count()) == count, "as many numbers as rows, heads or pairs")) {
      return nullptr;
    }
    return static_cast<const T*>(buffer->untyped_data());
  }
  const int32_t* NextInts(int64_t count) { return NextExactly<int32_t>(count, ffi::DataType::S32); }
  const float* NextFloats(int64_t count) { return NextExactly<float>(count, ffi::DataType::F32); }

  Rows NextView(int64_t width) {
    const int64_t place = Next();
    if (place == -2) return {};
    const int64_t offset = Next(), stride = Next();
    float* data = arena_;
    int64_t size = arena_floats_;
    if (place != -1) {
      const auto buffer = Result(place);
      if (!buffer || !Check(buffer->element_type() == ffi::DataType::F32, "a float32 result")) return {};
      data = static_cast<float*>(buffer->untyped_data());
      size = static_cast<int64_t>(buffer->element_count());
    }
    if (!Check(offset >= 0 && stride >= 0 && offset <= size && stride <= size && width >= 0 && width <= size &&
                   offset + (num_rows_ - 1) * stride + width <= size,
               "rows inside the arena or result")) {
      return {};
    }
    return {data + offset, stride};
  }

  // Rows of `width` numbers in tiles.
  Bfloat16* NextTiles(int64_t width) {
    const int64_t place = Next(), offset = Next(), stride = Next();
    const int64_t size = TileFloats(num_rows_, width);
    if (!Check(place == -1 && stride == 0 && offset >= 0 && offset <= arena_floats_ && size <= arena_floats_ - offset,
               "tiles inside the arena")) {
      return nullptr;
    }
    return reinterpret_cast<Bfloat16*>(arena_ + offset);
  }

  Norm NextNorm(int64_t width) {
    Norm norm;
    const int64_t kind = Next();
    if (!Check(kind >= 0 && kind <= 2, "a kind of norm") || kind == 0) return norm;
    norm.kind = static_cast<NormKind>(kind);
    norm.eps = NextFloat();
    norm.weight = NextNumbers(width);
    norm.bias = NextNumbers(width);
    Check(norm.weight.data != nullptr, "a norm's weight");
    return norm;
  }

  Matrix NextMatrix() {
    Matrix w;
    const int64_t index = Next();
    if (index == -1) return w;
    const auto buffer = Argument(index);
    w.bits = Next();
    const int64_t group_size = Next(), first = Next();
    w.in_features = Next();
    w.out_features = Next();
    const bool is_sized = w.in_features > 0 && w.out_features > 0 && first >= 0 && w.in_features < int64_t{1} << 32 &&
                          w.out_features < int64_t{1} << 32 && first < int64_t{1} << 32;
    if (!buffer || !Check(is_sized, "sizes of a matrix") || !Check(buffer->dimensions().size() == 2, "a matrix")) return w;
    const int64_t rows = buffer->dimensions()[0], columns = buffer->dimensions()[1];
    const char* const data = static_cast<const char*>(buffer->untyped_data());
    if (w.bits == 0) {
      const std::optional<DType> dtype = FloatType(buffer->element_type());
      if (!Check(dtype && columns == w.in_features && first + w.out_features <= rows, "rows of a floating matrix")) return w;
      w.dtype = *dtype;
      w.data = data + first * columns * ByteWidth(*dtype);
    } else {
      PackedLinearArgs a;
      a.in_features = w.in_features;
      a.bits = w.bits;
      a.is_float8 = false;
      if (!Check((w.bits == 8 || w.bits == 4) && (group_size == -1 || (group_size > 0 && group_size % kPackedUnit == 0)),
                 "8 or 4 bits in groups of whole units")) {
        return w;
      }
      w.units_per_group = a.units_per_group = group_size == -1 ? a.num_units() : group_size / kPackedUnit;
      w.block_bytes = columns;
      const int64_t block_bytes = (a.code_bytes() + a.scale_bytes() * (w.bits == 4 ? 2 : 1) + 63) / 64 * 64;
      if (!Check(buffer->element_type() == ffi::DataType::U8 && columns == block_bytes && first % kPackedBlockRows == 0 &&
                     first + w.out_features <= rows * kPackedBlockRows,
                 "blocks of a packed matrix")) {
        return w;
      }
      w.data = data + first / kPackedBlockRows * block_bytes;
    }
    const int64_t bias_first = Next();
    w.bias = NextNumbers(w.out_features, bias_first);
    return w;
  }

  Function NextFunction() {
    const int64_t function = Next();
    Check(function >= 0 && function <= static_cast<int64_t>(Function::kMul), "a function");
    return static_cast<Function>(function);
  }

  void ReadStep(Step& s) {
    const int64_t kind = Next();
    s.width = Next();
    if (!Check(kind >= 0 && kind <= static_cast<int64_t>(StepKind::kHeads), "a kind of step") ||
        !Check(s.width > 0 && s.width < int64_t{1} << 32, "a width")) {
      return;
    }
    s.kind = static_cast<StepKind>(kind);
    switch (s.kind) {
      case StepKind::kLoad:
        s.numbers = NextNumbers(num_rows_ * s.width);
        s.out = NextView(s.width);
        Check(s.numbers.data && s.out.data, "numbers and a place for them");
        break;
      case StepKind::kStore:
        return ReadStore(s);
      case StepKind::kEmbed:
        return ReadEmbed(s);
      case StepKind::kNorm:
        s.norm = NextNorm(s.width);
        s.in = NextView(s.width);
        s.out = NextView(s.width);
        Check(s.norm.kind != NormKind::kNone && s.in.data && s.out.data, "a norm, its input and its result");
        break;
      case StepKind::kProduct:
        return ReadProduct(s);
      case StepKind::kRope:
        s.half = s.width / 2;
        s.ids = NextInts(num_rows_);
        s.inv_freq = NextFloats(s.half);
        s.scale = NextFloat();
        s.out = NextView(s.width);
        Check(s.width % 2 == 0 && s.ids && s.inv_freq && s.out.data, "positions, frequencies and a table");
        break;
      case StepKind::kAttention:
        return ReadAttention(s);
      case StepKind::kMap:
        s.function = NextFunction();
        s.in = NextView(s.width);
        s.other = NextView(s.width);
        s.numbers = NextNumbers(1);
        s.out = NextView(s.width);
        Check(s.in.data && s.out.data, "an operand and a result");
        Check(s.function < Function::kAdd || s.other.data || s.numbers.data, "a second operand");
        break;
      case StepKind::kRound:
        s.in = NextView(s.width);
        s.norm = NextNorm(s.width);
        s.tiles = NextTiles(s.width);
        Check(is_tiled_ && s.in.data && s.tiles, "a tiled program, an input and tiles");
        break;
      case StepKind::kHeads:
        s.half = Next();
        s.is_interleaved = Next() != 0;
        s.head_dim = Next();
        if (!Check(s.head_dim > 0 && s.width % s.head_dim == 0 && s.half >= 0 && 2 * s.half <= s.head_dim, "heads")) return;
        s.in = NextView(s.width);
        s.norm = NextNorm(s.head_dim);
        s.table = NextView(2 * s.half);
        s.out = NextView(s.width);
        Check(s.in.data && s.out.data && (s.half == 0 || s.table.data), "an input, a table and a result");
        break;
    }
  }

  void ReadStore(Step& s) {
    s.in = NextView(s.width);
    const auto result = Result(Next());
    if (!result) return;
    const std::optional<DType> dtype = FloatType(result->element_type());
    if (!Check(dtype && static_cast<int64_t>(result->element_count()) == num_rows_ * s.width && s.in.data, "a result as wide")) {
      return;
    }
    s.result_dtype = *dtype;
    s.result = result->untyped_data();
  }

  void ReadEmbed(Step& s) {
    s.matrix = NextMatrix();
    s.ids = NextInts(num_rows_);
    s.out = NextView(s.width);
    if (!Check(s.matrix.data && s.ids && s.out.data && s.matrix.in_features == s.width, "a table, ids and rows")) return;
    for (int64_t m = 0; m < num_rows_; ++m) {
      Check(s.ids[m] >= 0 && s.ids[m] < s.matrix.out_features, "ids of rows that the table has");
    }
  }

  void ReadProduct(Step& s) {
    const int64_t in_features = Next();
    if (!Check(in_features > 0 && in_features < int64_t{1} << 32, "a width")) return;
    if (is_tiled_) {
      s.tiles = NextTiles(in_features);
    } else {
      s.in = NextView(in_features);
    }
    s.norm = NextNorm(in_features);
    s.function = NextFunction();
    s.matrix = NextMatrix();
    s.multiply = NextMatrix();
    s.other = NextView(s.width);
    s.prepared = Next();
    if (Next() != 0) {
      s.out_tiles = NextTiles(s.width);
      if (!Check(is_tiled_ && s.out_tiles && s.width % kTileInputs == 0, "a tiled program and whole tiles")) return;
    } else {
      s.out = NextView(s.width);
    }
    Check(s.function < Function::kAdd, "an activation");
    Check((s.in.data || s.tiles) && (s.out.data || s.out_tiles) && s.matrix.data, "an input, a matrix and a result");
    Check(!is_tiled_ || (s.norm.kind == NormKind::kNone && (s.matrix.bits || s.matrix.dtype == DType::kBfloat16) &&
                         (!s.multiply.data || s.multiply.bits || s.multiply.dtype == DType::kBfloat16)),
          "rounded rows and a packed or bfloat16 matrix");
    Check(s.matrix.in_features == in_features && s.matrix.out_features == s.width, "a matrix that fits");
    if (s.multiply.data) {
      Check(s.multiply.in_features == in_features && s.multiply.out_features == s.width && s.multiply.bits == s.matrix.bits &&
                s.multiply.units_per_group == s.matrix.units_per_group,
            "two matrices of one form");
    }
    Check(s.prepared >= 0, "the number of a prepared input");
  }

  void ReadAttention(Step& s) {
    s.half = Next();
    s.is_interleaved = Next() != 0;
    s.num_heads = Next();
    s.num_kv_heads = Next();
    s.head_dim = Next();
    s.window = Next();
    s.scale = NextFloat();
    const bool is_sized = s.num_kv_heads > 0 && s.num_heads > 0 && s.num_heads < int64_t{1} << 24 && s.head_dim > 0 &&
                          s.head_dim < int64_t{1} << 24 && s.num_heads % s.num_kv_heads == 0 &&
                          s.width == s.num_heads * s.head_dim && s.window >= 0;
    if (!Check(is_sized && s.half >= 0 && 2 * s.half <= s.head_dim, "heads")) return;
    const int64_t kv_width = s.num_kv_heads * s.head_dim;
    s.in = NextView(s.width);
    s.key = NextView(kv_width);
    s.value = NextView(kv_width);
    s.table = NextView(2 * s.half);
    s.norm = NextNorm(s.head_dim);
    s.key_norm = NextNorm(s.head_dim);
    s.k_cache = NextCache(s);
    s.v_cache = NextCache(s);
    const int64_t batch_size = num_rows_ / num_positions_;
    s.cache_len = NextInts(batch_size);
    s.num_tokens = NextInts(batch_size);
    s.context_len = NextInts(batch_size);
    s.alibi_slopes = NextFloats(s.num_heads);
    s.out = NextView(s.width);
    if (!Check(s.in.data && s.key.data && s.value.data && s.out.data && (s.half == 0 || s.table.data), "queries, keys, values") ||
        !Check(s.k_cache && s.v_cache && s.cache_len && s.num_tokens, "caches and lengths")) {
      return;
    }
    if (num_positions_ > 1 &&
        !Check(s.half == 0 && s.norm.kind == NormKind::kNone && s.key_norm.kind == NormKind::kNone && s.in.stride == s.width &&
                   s.out.stride == s.width && s.key.stride == kv_width && s.value.stride == kv_width,
               "heads as the step of this name leaves them")) {
      return;
    }
    for (int64_t b = 0; b < batch_size; ++b) {
      const int64_t cached = s.cache_len[b], tokens = s.num_tokens[b];
      if (cached < 0 || tokens < 0 || tokens > num_positions_ || cached + tokens > s.cache_size) {
        error_ = "row " + std::to_string(b) + ": cache_len " + std::to_string(cached) + " and num_tokens " +
                 std::to_string(tokens) + " do not fit " + std::to_string(s.cache_size) + " cached positions and " +
                 std::to_string(num_positions_) + " new " + (num_positions_ == 1 ? "one" : "ones");
      }
    }
  }

  // An argument and the result that XLA aliases to it; where it could not, the old contents are copied.
  void* NextCache(Step& s) {
    const auto argument = Argument(Next());
    const auto result = Result(Next());
    if (!argument || !result) return nullptr;
    const Shape shape = argument->dimensions();
    const std::optional<CacheType> type = CacheTypeOf(argument->element_type());
    if (!Check(shape.size() == 4 && type, "a cache [B, K, S, H]")) return nullptr;
    const bool is_second = s.k_cache != nullptr;
    const int64_t width = CacheRow(*type, s.head_dim);
    if (!Check(!is_second || (s.cache_size == shape[2] && s.cache_type == *type), "two caches alike") ||
        !Check(IsShape(shape, {num_rows_ / num_positions_, s.num_kv_heads, shape[2], width}) && result->dimensions() == shape &&
                   result->element_type() == argument->element_type(),
               "a cache that fits the heads")) {
      return nullptr;
    }
    s.cache_size = shape[2];
    s.cache_type = *type;
    if (result->untyped_data() != argument->untyped_data()) {
      std::memcpy(result->untyped_data(), argument->untyped_data(), argument->size_bytes());
    }
    return result->untyped_data();
  }

  const ffi::RemainingArgs& args_;
  const ffi::RemainingRets& results_;
  const ffi::Span<const int64_t> numbers_;
  size_t at_ = 0;
  int64_t step_ = 0, num_rows_ = 0, num_positions_ = 1, arena_floats_ = 0;
  bool is_tiled_ = false;
  float* arena_ = nullptr;
  std::string error_;
};

ffi::Error ProgramFfi(ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Span<const int64_t> steps) {
  thread_local Program program;
  Reader reader(args, results, steps);
  reader.Read(program);
  if (!reader.error().empty()) return ffi::Error::InvalidArgument("step_program: " + reader.error());
  RunProgram(program);
  return ffi::Error::Success();
}

}  // namespace

POPTRANSFORMER_LIST_OP(step_program, 1);

}  // namespace poptransformer

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(step_program, poptransformer::ProgramFfi,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()   // whatever the steps name: weights, caches, ids, lengths
                                  .RemainingRets()   // values that others use, caches
                                  .Attr<ffi::Span<const int64_t>>("steps"));
#pragma GCC visibility pop
