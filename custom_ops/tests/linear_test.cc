#include "linear/linear.h"

#include <cmath>

#include "common/tile_product.h"
#include "tests/testing.h"

namespace poptransformer {
namespace testing {

POPTRANSFORMER_TEST(Linear) {
  LinearArgs a;
  a.x_dtype = random.AnyDType();
  a.weight_dtype = random.AnyDType();
  a.out_dtype = random.AnyDType();
  const bool is_tiled = HasTiles() && random.Chance(3);
  if (is_tiled) a.x_dtype = a.weight_dtype = DType::kBfloat16;
  a.num_rows = is_tiled ? random.Integer(kMaxLinearRows + 1, 70) : random.Integer(0, kMaxLinearRows);
  a.in_features = random.OneOf<int64_t>({0, 1, 3, 16, 31, 32, 33, 100, 257});
  a.out_features = random.OneOf<int64_t>({0, 1, 2, 5, 16, 47, 130});
  if (!is_tiled && random.Chance(8)) {  // enough for several threads
    a.in_features = 300;
    a.out_features = 301;
  }
  Array x(random, a.x_dtype, a.num_rows * a.in_features), weight(random, a.weight_dtype, a.out_features * a.in_features);
  Array bias(random, a.x_dtype, a.out_features), out(random, a.out_dtype, a.num_rows * a.out_features);
  x.FillRandom(random);
  weight.FillRandom(random);
  bias.FillRandom(random);
  a.x = x.data();
  a.weight = weight.data();
  a.bias = random.Chance(2) ? bias.data() : nullptr;
  a.out = out.data();
  Linear(a);
  for (int64_t m = 0; m < a.num_rows; ++m) {
    for (int64_t o = 0; o < a.out_features; ++o) {
      double sum = a.bias != nullptr ? bias.Get(o) : 0, magnitude = std::abs(sum);
      for (int64_t i = 0; i < a.in_features; ++i) {
        const double product = x.Get(m * a.in_features + i) * weight.Get(o * a.in_features + i);
        sum += product;
        magnitude += std::abs(product);
      }
      ExpectNear(out.Get(m * a.out_features + o), sum, 1e-5 * magnitude + Rounding(a.out_dtype) * std::abs(sum) * 1.01,
                 "out", m, o);
    }
  }
}

}  // namespace testing
}  // namespace poptransformer
