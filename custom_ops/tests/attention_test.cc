#include "attention/attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/testing.h"

namespace poptransformer {
namespace testing {

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
  a.cache_dtype = random.AnyDType();
  const int64_t B = a.batch_size, T = a.num_positions, S = a.cache_size, N = a.num_heads, K = a.num_kv_heads, H = a.head_dim;
  Array query(random, a.dtype, B * T * N * H), key(random, a.dtype, B * T * K * H), value(random, a.dtype, B * T * K * H);
  Array k_cache(random, a.cache_dtype, B * K * S * H), v_cache(random, a.cache_dtype, B * K * S * H);
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
      for (int64_t i = ((b * K + k) * S + first_seen) * H; i < ((b * K + k) * S + lengths[b]) * H; ++i) {
        k_cache.Set(i, random.Value());
        v_cache.Set(i, random.Value());
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
  const std::vector<double> k_before = [&] {
    std::vector<double> numbers(k_cache.size());
    for (int64_t i = 0; i < k_cache.size(); ++i) numbers[i] = k_cache.Get(i);
    return numbers;
  }();
  Attention(a);

  for (int64_t b = 0; b < B; ++b) {
    for (int64_t k = 0; k < K; ++k) {
      for (int64_t s = 0; s < S; ++s) {
        for (int64_t h = 0; h < H; ++h) {
          const int64_t at = ((b * K + k) * S + s) * H + h, t = s - lengths[b];
          const bool is_new = t >= 0 && t < counts[b];
          ExpectNear(k_cache.Get(at), is_new ? key.Get(((b * T + t) * K + k) * H + h) : k_before[at], 0, "k_cache");
          if (is_new) ExpectNear(v_cache.Get(at), value.Get(((b * T + t) * K + k) * H + h), 0, "v_cache");
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
          for (int64_t h = 0; h < H; ++h) scores[s] += query.Get(at + h) * k_cache.Get(((b * K + n / group) * S + s) * H + h);
          scores[s] = a.scale * scores[s];
          if (a.alibi_slopes != nullptr) scores[s] += slopes.Get(n) * static_cast<double>(s - position);
          most = std::max(most, scores[s]);
        }
        for (int64_t s = 0; t < counts[b] && s < total; ++s) {
          if (!is_visible(s)) continue;
          const double weight = std::exp(scores[s] - most);
          sum += weight;
          for (int64_t h = 0; h < H; ++h) result[h] += weight * v_cache.Get(((b * K + n / group) * S + s) * H + h);
        }
        for (int64_t h = 0; h < H; ++h) {
          const double wanted = t < counts[b] ? result[h] / sum : 0;
          ExpectNear(out.Get(at + h), wanted, 4e-5 + Rounding(a.dtype) * std::abs(wanted) * 1.01, "out");
        }
      }
    }
  }
}

}  // namespace testing
}  // namespace poptransformer
