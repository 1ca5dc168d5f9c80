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
void RoundRow(const TileProductArgs& a, Bfloat16* rows, int64_t m) {
  Bfloat16* out = rows + m / kTileRows * a.num_steps() * kTileSize + m % kTileRows * kTileInputs;
  const T* const x = static_cast<const T*>(a.x) + m * a.in_features;
  for (int64_t i = 0; i < a.in_features; i += kTileInputs, out += kTileSize) {
    for (int64_t half = 0; half < kTileInputs; half += kLanes) {
      const int64_t left = m < a.num_rows ? a.in_features - i - half : 0;
      const Vec v = left >= kLanes ? Load(x + i + half)
                                   : left > 0 ? LoadPartial(x + i + half, static_cast<int>(left)) : Zero();
      StorePartial(out + half, v, kLanes);
    }
  }
}

template <typename T>
void StoreSums(const TileProductArgs& a, int64_t m, int64_t o, Vec y) {
  const int64_t left = a.out_features - o;
  StorePartial(static_cast<T*>(a.out) + m * a.out_features + o, y, static_cast<int>(left < kLanes ? left : kLanes));
}

template <typename T>
Vec LoadBias(const TileProductArgs& a, int64_t o) {
  const int64_t left = a.out_features - o;
  return LoadPartial(static_cast<const T*>(a.bias) + o, static_cast<int>(left < kLanes ? left : kLanes));
}

Vec BiasOf(const TileProductArgs& a, int64_t o) {
  if (a.bias == nullptr) return Zero();
  switch (a.x_dtype) {
    case DType::kFloat32:
      return LoadBias<float>(a, o);
    case DType::kBfloat16:
      return LoadBias<Bfloat16>(a, o);
    case DType::kFloat16:
      return LoadBias<Float16>(a, o);
  }
  return Zero();
}

}  // namespace

void RoundRows(const TileProductArgs& a, Bfloat16* rows, int64_t begin, int64_t end) {
  for (int64_t m = begin; m < end; ++m) {
    switch (a.x_dtype) {
      case DType::kFloat32:
        RoundRow<float>(a, rows, m);
        break;
      case DType::kBfloat16:
        RoundRow<Bfloat16>(a, rows, m);
        break;
      case DType::kFloat16:
        RoundRow<Float16>(a, rows, m);
        break;
    }
  }
}

void MultiplyPanels(const TileProductArgs& a, const Bfloat16* rows, int64_t block, int64_t num_blocks, const Bfloat16* panels,
                    float* sums) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = 64;
    config.num_rows[tile] = 16;
  }
  _tile_loadconfig(&config);
  const int64_t num_steps = a.num_steps(), panel_size = num_steps * kTileSize;
  constexpr int64_t kSumsBytes = kRowBlock * sizeof(float);
  for (int64_t first = 0; first < a.num_rows; first += kRowBlock) {
    const Bfloat16* const upper = rows + first / kTileRows * num_steps * kTileSize;
    const Bfloat16* const lower = upper + num_steps * kTileSize;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (num_blocks == 2) {
      for (int64_t step = 0; step < num_steps; ++step) {
        _tile_loadd(6, panels + step * kTileSize, 64);
        _tile_loadd(4, upper + step * kTileSize, 64);
        _tile_loadd(5, lower + step * kTileSize, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        _tile_loadd(7, panels + panel_size + step * kTileSize, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    } else {
      for (int64_t step = 0; step < num_steps; ++step) {
        _tile_loadd(6, panels + step * kTileSize, 64);
        _tile_loadd(4, upper + step * kTileSize, 64);
        _tile_loadd(5, lower + step * kTileSize, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
      }
    }
    _tile_stored(0, sums, kSumsBytes);
    _tile_stored(1, sums + 16, kSumsBytes);
    _tile_stored(2, sums + 16 * kRowBlock, kSumsBytes);
    _tile_stored(3, sums + 16 * kRowBlock + 16, kSumsBytes);
    const int64_t last = first + kRowBlock < a.num_rows ? first + kRowBlock : a.num_rows;
    for (int64_t side = 0; side < num_blocks; ++side) {
      const int64_t o = (block + side) * kPanelOutputs;
      const Vec bias = BiasOf(a, o);
      for (int64_t m = first; m < last; ++m) {
        const Vec y = Add(Load(sums + (m - first) * kRowBlock + side * 16), bias);
        switch (a.out_dtype) {
          case DType::kFloat32:
            StoreSums<float>(a, m, o, y);
            break;
          case DType::kBfloat16:
            StoreSums<Bfloat16>(a, m, o, y);
            break;
          case DType::kFloat16:
            StoreSums<Float16>(a, m, o, y);
            break;
        }
      }
    }
  }
  _tile_release();
}

}  // namespace amx
}  // namespace poptransformer
