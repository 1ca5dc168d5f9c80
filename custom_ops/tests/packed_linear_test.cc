#include "packed_linear/packed_linear.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "tests/testing.h"

namespace poptransformer {
namespace testing {
namespace {

// A packed matrix of random codes, and the values that they stand for, by the layout that poptransformer/packing.py describes.
class PackedMatrix {
 public:
  PackedMatrix(Random& random, const PackedLinearArgs& a)
      : a_(a), memory_(random, Blocks(a) * a.block_bytes),
        groups_(random, a.is_float8 ? DType::kFloat32 : DType::kFloat16, 2 * Blocks(a) * GroupNumbers(a)) {
    groups_.FillRandom(random);
    uint8_t* const bytes = static_cast<uint8_t*>(memory_.data());
    for (int64_t i = 0; i < memory_.size(); ++i) {
      bytes[i] = static_cast<uint8_t>(random.Integer(0, 255));
      if (a.is_float8 && (bytes[i] & 0x7f) == 0x7f) bytes[i] = 0;  // no NaN
    }
    for (int64_t block = 0; block < Blocks(a); ++block) {
      uint8_t* const numbers = bytes + block * a.block_bytes + a.code_bytes();
      std::memcpy(numbers, Numbers(block, false), a.scale_bytes());
      if (a.bits == 4) std::memcpy(numbers + a.scale_bytes(), Numbers(block, true), a.scale_bytes());
    }
  }

  const uint8_t* data() const { return static_cast<const uint8_t*>(memory_.data()); }

  double Value(int64_t o, int64_t i) const {
    const int64_t block = o / kPackedBlockRows, row = o % kPackedBlockRows, unit = i / kPackedUnit;
    const int64_t quad = i % kPackedUnit / 4, byte = i % 4;
    const uint8_t* const codes = data() + block * a_.block_bytes + unit * kPackedUnit * kPackedBlockRows * a_.bits / 8;
    const int64_t group = unit / a_.units_per_group * kPackedBlockRows + row;
    const double scale = groups_.Get(2 * block * GroupNumbers(a_) + group);
    if (a_.is_float8) return scale * Float8Value(codes[quad * 64 + row * 4 + byte]);
    if (a_.bits == 8) return scale * (codes[quad * 64 + row * 4 + byte] - 128);
    const int both = codes[quad % 4 * 64 + row * 4 + byte];
    return scale * (quad < 4 ? both & 15 : both >> 4) + groups_.Get((2 * block + 1) * GroupNumbers(a_) + group);
  }

 private:
  static int64_t Blocks(const PackedLinearArgs& a) { return (a.out_features + kPackedBlockRows - 1) / kPackedBlockRows; }
  static int64_t GroupNumbers(const PackedLinearArgs& a) { return a.num_groups() * kPackedBlockRows; }
  const void* Numbers(int64_t block, bool is_minimum) const {
    return static_cast<const uint8_t*>(groups_.data()) + (2 * block + is_minimum) * a_.scale_bytes();
  }

  const PackedLinearArgs& a_;
  Memory memory_;
  Array groups_;  // for each block its scales, then its minimums
};

}  // namespace

POPTRANSFORMER_TEST(PackedLinear) {
  PackedLinearArgs a;
  a.x_dtype = random.AnyDType();
  a.out_dtype = random.AnyDType();
  a.num_rows = random.Chance(3) ? random.Integer(9, 40) : random.Integer(0, 9);
  a.in_features = random.OneOf<int64_t>({1, 3, 31, 32, 33, 96, 200});
  a.out_features = random.OneOf<int64_t>({0, 1, 5, 16, 17, 47, 130});
  if (random.Chance(8)) {  // enough for several threads
    a.in_features = 520;
    a.out_features = 270;
    a.num_rows = random.OneOf<int64_t>({1, 3, 80});
  }
  a.is_float8 = random.Chance(3);
  a.bits = a.is_float8 ? 8 : random.OneOf<int64_t>({4, 8});
  const int64_t units = a.is_float8 ? -1 : random.OneOf<int64_t>({1, 2, 4, -1});
  a.units_per_group = units > 0 ? units : a.num_units();
  a.block_bytes = (a.code_bytes() + a.scale_bytes() * (a.bits == 4 ? 2 : 1) + 63) / 64 * 64;
  const PackedMatrix weight(random, a);
  Array x(random, a.x_dtype, a.num_rows * a.in_features);
  Array bias(random, a.x_dtype, a.out_features), out(random, a.out_dtype, a.num_rows * a.out_features);
  x.FillRandom(random);
  bias.FillRandom(random);
  a.x = x.data();
  a.weight = weight.data();
  a.bias = random.Chance(2) ? bias.data() : nullptr;
  a.out = out.data();
  PackedLinear(a);
  for (int64_t o = 0; o < a.out_features; ++o) {
    std::vector<double> values(a.in_features);
    for (int64_t i = 0; i < a.in_features; ++i) values[i] = weight.Value(o, i);
    for (int64_t m = 0; m < a.num_rows; ++m) {
      double sum = a.bias != nullptr ? bias.Get(o) : 0, error = 0;
      for (int64_t i = 0; i < a.in_features; ++i) {
        sum += x.Get(m * a.in_features + i) * values[i];
        // x is at most 2: in 127 steps of that, or rounded to bfloat16 as the weight is.
        error += std::abs(values[i]) * (2.0 / 254 + 2.0 * 0x1p-7);
      }
      ExpectNear(out.Get(m * a.out_features + o), sum, error * 1.001 + 1e-3 + Rounding(a.out_dtype) * (std::abs(sum) + error),
                 "out", m, o);
    }
  }
}

}  // namespace testing
}  // namespace poptransformer
