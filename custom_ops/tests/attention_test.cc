#include "attention/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "common/tile_product.h"
#include "tests/testing.h"

namespace poptransformer {
namespace testing {
namespace {

// Rows of H numbers as a cache holds them.
class CacheRows {
 public:
  CacheRows(Random& random, CacheType type, int64_t num_rows, int64_t head_dim)
      : type_(type), head_dim_(head_dim), bytes_(ByteWidth(type) * CacheRow(type, head_dim)), memory_(random, num_rows * bytes_) {
    std::memset(memory_.data(), 0xff, memory_.size());  // NaN, and scales that are NaN
  }

  void* data() const { return memory_.data(); }
  const uint8_t* Row(int64_t row) const { return static_cast<const uint8_t*>(memory_.data()) + row * bytes_; }
  int64_t row_bytes() const { return bytes_; }

  void FillRow(Random& random, int64_t row) {
    uint8_t* const bytes = static_cast<uint8_t*>(memory_.data()) + row * bytes_;
    for (int64_t h = 0; h < head_dim_; ++h) {
      if (type_ == CacheType::kFloat8) {
        bytes[h] = static_cast<uint8_t>(random.Integer(0, 0x40) | random.Integer(0, 1) << 7);  // up to 2
      } else if (type_ == CacheType::kInt8) {
        bytes[h] = static_cast<uint8_t>(random.Integer(-127, 127));
      } else {
        PutNumber(NumberType(), random.Value(), memory_.data(), row * head_dim_ + h);
      }
    }
    const float scale = 1.0f / 64;
    if (type_ == CacheType::kInt8) std::memcpy(bytes + head_dim_, &scale, sizeof(scale));
  }

  double Get(int64_t row, int64_t h) const {
    const uint8_t* const bytes = Row(row);
    if (type_ == CacheType::kFloat8) return Float8Value(bytes[h]);
    if (type_ != CacheType::kInt8) return GetNumber(NumberType(), memory_.data(), row * head_dim_ + h);
    float scale;
    std::memcpy(&scale, bytes + head_dim_, sizeof(scale));
    return static_cast<double>(scale) * static_cast<int8_t>(bytes[h]);
  }

  // How far what is stored may be from x, in a row whose largest number is `most`.
  double Error(double x, double most) const {
    if (type_ == CacheType::kFloat8) return std::abs(x) / 16 + 0x1p-10;
    return type_ == CacheType::kInt8 ? most / 254 * 1.01 : 0;  // Random::Value is exact in the others
  }

 private:
  DType NumberType() const {
    return type_ == CacheType::kFloat32 ? DType::kFloat32 : type_ == CacheType::kBfloat16 ? DType::kBfloat16 : DType::kFloat16;
  }

  CacheType type_;
  int64_t head_dim_, bytes_;
  Memory memory_;
};

}  // namespace

// Whatever nobody may read is NaN: padding, and positions of the caches past a row's length or before its window.
POPTRANSFORMER_TEST(Attention) {
  AttentionArgs a;
  a.batch_size = random.Integer(0, 3);
  a.num_positions = random.OneOf<int64_t>({1, 1, 2, 17, 70});
  a.num_kv_heads = random.Integer(1, 3);
  const int64_t group = random.OneOf<int64_t>({1, 2, 3, 5});
  a.num_heads = a.num_kv_heads * group;
  a.head_dim = random.OneOf<int64_t>({1, 3, 8, 16, 33, 64});
  a.cache_size = a.num_positions + random.OneOf<int64_t>({0, 5, 100, 300, 600});
  a.scale = 0.25f;
  a.window = random.Chance(3) ? random.OneOf<int64_t>({1, 2, 31, 256, 5000}) : 0;
  a.dtype = random.AnyDType();
  a.allow_bfloat16 = random.Chance(2);
  a.cache_type = random.OneOf(
      {CacheType::kFloat32, CacheType::kBfloat16, CacheType::kFloat16, CacheType::kFloat8, CacheType::kInt8});
  const int64_t B = a.batch_size, T = a.num_positions, S = a.cache_size, N = a.num_heads, K = a.num_kv_heads, H = a.head_dim;
  Array query(random, a.dtype, B * T * N * H), key(random, a.dtype, B * T * K * H), value(random, a.dtype, B * T * K * H);
  CacheRows k_cache(random, a.cache_type, B * K * S, H), v_cache(random, a.cache_type, B * K * S, H);
  Array out(random, a.dtype, B * T * N * H), slopes(random, DType::kFloat32, N);
  const bool has_context = a.window == 0 && random.Chance(3);
  std::vector<int32_t> lengths(B), counts(B), contexts(B);
  for (int64_t b = 0; b < B; ++b) {
    counts[b] = static_cast<int32_t>(random.Integer(0, T));
    lengths[b] = static_cast<int32_t>(random.Integer(0, S - counts[b]));
    contexts[b] = has_context ? static_cast<int32_t>(random.Integer(-1, S + 1)) : 0;
    for (int64_t t = 0; t < counts[b]; ++t) {
      for (int64_t i = 0; i < N * H; ++i) query.Set((b * T + t) * N * H + i, random.Value());
      for (int64_t i = 0; i < K * H; ++i) {
        key.Set((b * T + t) * K * H + i, random.Value());
        value.Set((b * T + t) * K * H + i, random.Value());
      }
    }
    const int64_t first_seen = a.window > 0 ? std::max<int64_t>(0, lengths[b] + 1 - a.window) : 0;
    for (int64_t k = 0; k < K; ++k) {
      for (int64_t s = first_seen; s < lengths[b]; ++s) {
        k_cache.FillRow(random, (b * K + k) * S + s);
        v_cache.FillRow(random, (b * K + k) * S + s);
      }
    }
  }
  for (int64_t n = 0; n < N; ++n) slopes.Set(n, 1.0f / static_cast<float>(n + 1));
  const IntArray cache_len(random, lengths), num_tokens(random, counts), context_len(random, contexts);
  a.query = query.data();
  a.key = key.data();
  a.value = value.data();
  a.k_cache = k_cache.data();
  a.v_cache = v_cache.data();
  a.cache_len = cache_len.data();
  a.num_tokens = num_tokens.data();
  a.context_len = has_context ? context_len.data() : nullptr;
  a.alibi_slopes = random.Chance(3) ? slopes.floats() : nullptr;
  a.out = out.data();
  const std::vector<uint8_t> k_before(k_cache.Row(0), k_cache.Row(B * K * S));
  Attention(a);

  // Random::Value is exact in bfloat16, so that tiles round the weights and what an int8 cache makes of it.
  const bool has_tiles = T > 1 && (a.allow_bfloat16 || a.dtype == DType::kBfloat16) && HasTiles();
  const double error = !has_tiles ? 4e-5 : a.cache_type == CacheType::kInt8 ? 0.1 : 0.01;

  for (int64_t b = 0; b < B; ++b) {
    for (int64_t k = 0; k < K; ++k) {
      for (int64_t s = 0; s < S; ++s) {
        const int64_t row = (b * K + k) * S + s, t = s - lengths[b], from = ((b * T + t) * K + k) * H;
        if (t < 0 || t >= counts[b]) {
          Expect(std::memcmp(k_cache.Row(row), k_before.data() + row * k_cache.row_bytes(), k_cache.row_bytes()) == 0,
                 "positions of k_cache that are not new");
          continue;
        }
        double most_key = 0, most_value = 0;
        for (int64_t h = 0; h < H; ++h) {
          most_key = std::max(most_key, std::abs(key.Get(from + h)));
          most_value = std::max(most_value, std::abs(value.Get(from + h)));
        }
        for (int64_t h = 0; h < H; ++h) {
          const double wanted_key = key.Get(from + h), wanted_value = value.Get(from + h);
          ExpectNear(k_cache.Get(row, h), wanted_key, k_cache.Error(wanted_key, most_key), "k_cache", s, h);
          ExpectNear(v_cache.Get(row, h), wanted_value, v_cache.Error(wanted_value, most_value), "v_cache", s, h);
        }
      }
    }
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t n = 0; n < N; ++n) {
        const int64_t at = ((b * T + t) * N + n) * H, position = lengths[b] + t, total = lengths[b] + counts[b];
        std::vector<double> scores(std::max<int64_t>(total, 0)), result(H, 0.0);
        double most = -INFINITY, sum = 0;
        const auto is_visible = [&](int64_t s) {
          return (s <= position || s < contexts[b]) && (a.window == 0 || position - s < a.window);
        };
        for (int64_t s = 0; t < counts[b] && s < total; ++s) {
          if (!is_visible(s)) continue;
          for (int64_t h = 0; h < H; ++h) scores[s] += query.Get(at + h) * k_cache.Get((b * K + n / group) * S + s, h);
          scores[s] = a.scale * scores[s];
          if (a.alibi_slopes != nullptr) scores[s] += slopes.Get(n) * static_cast<double>(s - position);
          most = std::max(most, scores[s]);
        }
        for (int64_t s = 0; t < counts[b] && s < total; ++s) {
          if (!is_visible(s)) continue;
          const double weight = std::exp(scores[s] - most);
          sum += weight;
          for (int64_t h = 0; h < H; ++h) result[h] += weight * v_cache.Get((b * K + n / group) * S + s, h);
        }
        for (int64_t h = 0; h < H; ++h) {
          const double wanted = t < counts[b] ? result[h] / sum : 0;
          ExpectNear(out.Get(at + h), wanted, error + Rounding(a.dtype) * std::abs(wanted) * 1.01, "out", t, h);
        }
      }
    }
  }
}

}  // namespace testing
}  // namespace poptransformer
