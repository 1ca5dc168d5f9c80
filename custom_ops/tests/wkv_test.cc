#include "wkv/wkv.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/testing.h"

namespace poptransformer {
namespace testing {

// Padding, and the states of rows that begin, are NaN: nobody may look at them.
POPTRANSFORMER_TEST(Wkv) {
  WkvArgs a;
  a.batch_size = random.Integer(0, 3);
  a.num_positions = random.OneOf<int64_t>({1, 1, 2, 9, 50});
  a.width = random.OneOf<int64_t>({1, 3, 15, 16, 64, 129});
  if (random.Chance(8)) a.width = 700;  // enough for several threads
  a.dtype = random.AnyDType();
  const int64_t B = a.batch_size, T = a.num_positions, D = a.width;
  Array key(random, a.dtype, B * T * D), value(random, a.dtype, B * T * D), out(random, a.dtype, B * T * D);
  Array decay(random, DType::kFloat32, D), first(random, DType::kFloat32, D), state(random, DType::kFloat32, B * 3 * D);
  decay.FillRandom(random);
  first.FillRandom(random);
  std::vector<int32_t> lengths(B), counts(B);
  for (int64_t b = 0; b < B; ++b) {
    lengths[b] = static_cast<int32_t>(random.Integer(0, 2));
    counts[b] = static_cast<int32_t>(random.Integer(0, T));
    for (int64_t i = 0; i < counts[b] * D; ++i) {
      key.Set(b * T * D + i, random.Value());
      value.Set(b * T * D + i, random.Value());
    }
    for (int64_t d = 0; lengths[b] > 0 && d < D; ++d) {
      state.Set((b * 3 + 0) * D + d, random.Value());
      state.Set((b * 3 + 1) * D + d, std::abs(random.Value()) + 0.5f);
      state.Set((b * 3 + 2) * D + d, random.Value());
    }
  }
  std::vector<double> before(state.size());
  for (int64_t i = 0; i < state.size(); ++i) before[i] = state.Get(i);
  const IntArray cache_len(random, lengths), num_tokens(random, counts);
  a.key = key.data();
  a.value = value.data();
  a.time_decay = decay.floats();
  a.time_first = first.floats();
  a.state = static_cast<float*>(state.data());
  a.cache_len = cache_len.data();
  a.num_tokens = num_tokens.data();
  a.out = out.data();
  Wkv(a);
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t d = 0; d < D; ++d) {
      const bool is_empty = lengths[b] == 0;
      const double* const parts = before.data() + b * 3 * D + d;
      double n = is_empty ? 0 : parts[0], denominator = is_empty ? 0 : parts[D], m = is_empty ? -1e38 : parts[2 * D];
      for (int64_t t = 0; t < T; ++t) {
        const int64_t at = (b * T + t) * D + d;
        if (t >= counts[b]) {
          ExpectNear(out.Get(at), 0, 0, "padding");
          continue;
        }
        const double k = key.Get(at), v = value.Get(at), bonus = k + first.Get(d), most = std::max(m, bonus);
        const double old_weight = std::exp(m - most), weight = std::exp(bonus - most);
        const double wanted = (old_weight * n + weight * v) / (old_weight * denominator + weight);
        ExpectNear(out.Get(at), wanted, 1e-4 + Rounding(a.dtype) * std::abs(wanted) * 1.01, "out");
        const double decayed = m - std::exp(decay.Get(d)), top = std::max(decayed, k);
        n = std::exp(decayed - top) * n + std::exp(k - top) * v;
        denominator = std::exp(decayed - top) * denominator + std::exp(k - top);
        m = top;
      }
      const double wanted[3] = {n, denominator, m};
      for (int part = 0; part < 3; ++part) {
        const double number = state.Get((b * 3 + part) * D + d);
        if (counts[b] == 0) {
          ExpectNear(number, parts[part * D], 0, "state of a row without tokens");
        } else {
          ExpectNear(number, wanted[part], 1e-4 * (1 + std::abs(wanted[part])), "state");
        }
      }
    }
  }
}

}  // namespace testing
}  // namespace poptransformer
