#include "common/tile_product_amx.h"

#include "common/simd.h"

namespace poptransformer {
namespace amx {
namespace {

// What _tile_loadconfig reads.
struct TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t num_rows[16] = {};
};

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileSize = kTileRows * kTileInputs;  // values

template <typename T>
void RoundRow(const void* all, int64_t stride, int64_t num_rows, int64_t in_features, Bfloat16* rows, int64_t m) {
  const int64_t num_steps = (in_features + kTileInputs - 1) / kTileInputs;
  Bfloat16* out = rows + m / kTileRows * num_steps * kTileSize + m % kTileRows * kTileInputs;
  const T* const x = static_cast<const T*>(all) + m * stride;
  for (int64_t i = 0; i < in_features; i += kTileInputs, out += kTileSize) {
    for (int64_t half = 0; half < kTileInputs; half += kLanes) {
      const int64_t left = m < num_rows ? in_features - i - half : 0;
      const Vec v = left >= kLanes ? Load(x + i + half)
                                   : left > 0 ? LoadPartial(x + i + half, static_cast<int>(left)) : Zero();
      StorePartial(out + half, v, kLanes);
    }
  }
}

template <typename T>
Vec LoadNumbers(const void* numbers, int64_t first, int64_t n) {
  return LoadPartial(static_cast<const T*>(numbers) + first, static_cast<int>(n < kLanes ? n : kLanes));
}

Vec LoadBias(const TileProductArgs& a, int64_t first, int64_t n) {
  if (a.bias == nullptr || n <= 0) return Zero();
  switch (a.x_dtype) {
    case DType::kFloat32:
      return LoadNumbers<float>(a.bias, first, n);
    case DType::kBfloat16:
      return LoadNumbers<Bfloat16>(a.bias, first, n);
    case DType::kFloat16:
      return LoadNumbers<Float16>(a.bias, first, n);
  }
  return Zero();
}

template <typename T>
void Store(const TileProductArgs& a, int64_t first_row, int64_t num_rows, int64_t first, int64_t n, const float* sums) {
  const Vec left_bias = LoadBias(a, first, n), right_bias = LoadBias(a, first + kLanes, n - kLanes);
  const int left = static_cast<int>(n < kLanes ? n : kLanes), right = static_cast<int>(n) - left;
  T* out = static_cast<T*>(a.out) + first_row * a.out_features + first;
  for (int64_t m = 0; m < num_rows; ++m, sums += kRowBlock, out += a.out_features) {
    StorePartial(out, Add(Load(sums), left_bias), left);
    if (right > 0) StorePartial(out + kLanes, Add(Load(sums + kLanes), right_bias), right);
  }
}

}  // namespace

void RoundRows(const void* x, DType dtype, int64_t stride, int64_t num_rows, int64_t in_features, Bfloat16* rows, int64_t begin,
               int64_t end) {
  for (int64_t m = begin; m < end; ++m) {
    switch (dtype) {
      case DType::kFloat32:
        RoundRow<float>(x, stride, num_rows, in_features, rows, m);
        break;
      case DType::kBfloat16:
        RoundRow<Bfloat16>(x, stride, num_rows, in_features, rows, m);
        break;
      case DType::kFloat16:
        RoundRow<Float16>(x, stride, num_rows, in_features, rows, m);
        break;
    }
  }
}

namespace {

constexpr int64_t kSumsBytes = kRowBlock * sizeof(float);

// Sums of 32 rows with the 32 outputs of two panels.
POPTRANSFORMER_INLINE void MultiplyTwo(const Bfloat16* upper, int64_t num_steps, const Bfloat16* left, float* sums) {
  const Bfloat16* const lower = upper + num_steps * kTileSize;
  const Bfloat16* const right = left + num_steps * kTileSize;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t at = 0; at < num_steps * kTileSize; at += kTileSize) {
    _tile_loadd(6, left + at, 64);
    _tile_loadd(4, upper + at, 64);
    _tile_loadd(5, lower + at, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    _tile_loadd(7, right + at, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, kSumsBytes);
  _tile_stored(1, sums + 16, kSumsBytes);
  _tile_stored(2, sums + 16 * kRowBlock, kSumsBytes);
  _tile_stored(3, sums + 16 * kRowBlock + 16, kSumsBytes);
}

// With the 16 outputs of one.
POPTRANSFORMER_INLINE void MultiplyOne(const Bfloat16* upper, int64_t num_steps, const Bfloat16* left, float* sums) {
  const Bfloat16* const lower = upper + num_steps * kTileSize;
  _tile_zero(0);
  _tile_zero(2);
  for (int64_t at = 0; at < num_steps * kTileSize; at += kTileSize) {
    _tile_loadd(6, left + at, 64);
    _tile_loadd(4, upper + at, 64);
    _tile_loadd(5, lower + at, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
  }
  _tile_stored(0, sums, kSumsBytes);
  _tile_stored(2, sums + 16 * kRowBlock, kSumsBytes);
}

}  // namespace

void MultiplyPanels(const Bfloat16* rows, int64_t num_steps, int64_t num_rows, int64_t out_features, int64_t block,
                    int64_t num_blocks, int64_t num_matrices, const Bfloat16* panels, FinishSums finish, const void* context,
                    float* sums) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = 64;
    config.num_rows[tile] = 16;
  }
  _tile_loadconfig(&config);
  const int64_t output = block * kPanelOutputs, left = out_features - output, wide = num_blocks * kPanelOutputs;
  for (int64_t first = 0; first < num_rows; first += kRowBlock) {
    const Bfloat16* const upper = rows + first / kTileRows * num_steps * kTileSize;
    for (int64_t i = 0; i < num_matrices; ++i) {
      const Bfloat16* const own = panels + i * num_blocks * num_steps * kTileSize;
      float* const own_sums = sums + i * kRowBlock * kRowBlock;
      if (num_blocks == 2) {
        MultiplyTwo(upper, num_steps, own, own_sums);
      } else {
        MultiplyOne(upper, num_steps, own, own_sums);
      }
    }
    finish(context, first, num_rows - first < kRowBlock ? num_rows - first : kRowBlock, output, left < wide ? left : wide, sums);
  }
  _tile_release();
}

void StoreSums(const void* context, int64_t first_row, int64_t num_rows, int64_t first_output, int64_t num_outputs,
               const float* sums) {
  const TileProductArgs& a = *static_cast<const TileProductArgs*>(context);
  switch (a.out_dtype) {
    case DType::kFloat32:
      return Store<float>(a, first_row, num_rows, first_output, num_outputs, sums);
    case DType::kBfloat16:
      return Store<Bfloat16>(a, first_row, num_rows, first_output, num_outputs, sums);
    case DType::kFloat16:
      return Store<Float16>(a, first_row, num_rows, first_output, num_outputs, sums);
  }
}

}  // namespace amx
}  // namespace poptransformer
