// Compiled once per instruction set, see simd.h. Features lie across lanes, and the tokens of a row pass one after the other
// with the state in registers: each number is read or written once. Two of the four weights of a token are always 1, so that a
// token costs two e^x.
#include "wkv/wkv_kernel.h"

#include "common/simd.h"

namespace poptransformer {
namespace POPTRANSFORMER_ISA_NAMESPACE {
namespace {

constexpr float kEmpty = -0x1.fffffep127f;  // maximum of a state without a token: the least that is finite
constexpr float kLargestExponent = 88;      // that Exp takes; a decay of e^88 takes any weight away, as a greater one would

// Weights of two sums with the exponents a and b, relative to the greater one.
struct Weights {
  Vec greater, of_a, of_b;
};

POPTRANSFORMER_INLINE Weights Weigh(Vec a, Vec b) {
  const Vec one = Broadcast(1.0f);
  const Vec greater = Max(a, b), less = SelectLess(a, b, a, b);  // a NaN in b stays one
  const Vec smaller = Exp(Sub(less, greater));
  return {greater, SelectLess(a, b, smaller, one), SelectLess(a, b, one, smaller)};
}

// kVectors vectors of features, the last of `lanes` lanes.
template <typename T, int kVectors>
POPTRANSFORMER_INLINE void Features(const WkvArgs& a, int64_t row, int64_t begin, int lanes) {
  const int64_t count = a.num_tokens[row], width = a.width;
  const int64_t first = row * a.num_positions * width + begin;
  const T* key = static_cast<const T*>(a.key) + first;
  const T* value = static_cast<const T*>(a.value) + first;
  T* out = static_cast<T*>(a.out) + first;
  const auto lanes_of = [&](int v) { return v == kVectors - 1 ? lanes : kLanes; };

  if (count > 0) {
    float* const state = a.state + row * 3 * width + begin;
    const bool is_empty = a.cache_len[row] == 0;
    Vec decay[kVectors], bonus[kVectors], numerator[kVectors], denominator[kVectors], maximum[kVectors];
    POPTRANSFORMER_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = v * kLanes;
      const Vec exponent = LoadPartial(a.time_decay + begin + at, lanes_of(v)), limit = Broadcast(kLargestExponent);
      decay[v] = Sub(Zero(), Exp(SelectLess(limit, exponent, limit, exponent)));
      bonus[v] = LoadPartial(a.time_first + begin + at, lanes_of(v));
      numerator[v] = is_empty ? Zero() : LoadPartial(state + at, lanes_of(v));
      denominator[v] = is_empty ? Zero() : LoadPartial(state + width + at, lanes_of(v));
      maximum[v] = is_empty ? Broadcast(kEmpty) : LoadPartial(state + 2 * width + at, lanes_of(v));
    }
    for (int64_t t = 0; t < count; ++t, key += width, value += width, out += width) {
      POPTRANSFORMER_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        const Vec k = LoadPartial(key + v * kLanes, lanes_of(v)), x = LoadPartial(value + v * kLanes, lanes_of(v));
        const Weights now = Weigh(maximum[v], Add(k, bonus[v]));
        const Vec sum = MultiplyAdd(now.of_b, x, Mul(now.of_a, numerator[v]));
        const Vec weight = MultiplyAdd(now.of_a, denominator[v], now.of_b);
        StorePartial(out + v * kLanes, Div(sum, weight), lanes_of(v));
        const Weights next = Weigh(Add(maximum[v], decay[v]), k);
        numerator[v] = MultiplyAdd(next.of_b, x, Mul(next.of_a, numerator[v]));
        denominator[v] = MultiplyAdd(next.of_a, denominator[v], next.of_b);
        maximum[v] = next.greater;
      }
    }
    POPTRANSFORMER_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = v * kLanes;
      StorePartial(state + at, numerator[v], lanes_of(v));
      StorePartial(state + width + at, denominator[v], lanes_of(v));
      StorePartial(state + 2 * width + at, maximum[v], lanes_of(v));
    }
  }
  for (int64_t t = count; t < a.num_positions; ++t, out += width) {
    for (int v = 0; v < kVectors; ++v) StorePartial(out + v * kLanes, Zero(), lanes_of(v));
  }
}

template <typename T>
void RowOf(const WkvArgs& a, int64_t row, int64_t begin, int64_t end) {
  constexpr int kVectors = kLanes == 16 ? 4 : 2;  // what fits the registers
  int64_t at = begin;
  for (; at + kVectors * kLanes <= end; at += kVectors * kLanes) Features<T, kVectors>(a, row, at, kLanes);
  for (; at + kLanes <= end; at += kLanes) Features<T, 1>(a, row, at, kLanes);
  if (at < end) Features<T, 1>(a, row, at, static_cast<int>(end - at));
}

void Row(const WkvArgs& a, int64_t row, int64_t begin, int64_t end) {
  switch (a.dtype) {
    case DType::kFloat32:
      return RowOf<float>(a, row, begin, end);
    case DType::kBfloat16:
      return RowOf<Bfloat16>(a, row, begin, end);
    case DType::kFloat16:
      return RowOf<Float16>(a, row, begin, end);
  }
}

}  // namespace

WkvFunction Wkv() { return Row; }

}  // namespace POPTRANSFORMER_ISA_NAMESPACE
}  // namespace poptransformer
