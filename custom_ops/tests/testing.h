// What the tests of the kernels share: random numbers, memory whose ends are watched, comparison, and the list of tests.
//
// The kernels' C++ functions are called directly, without XLA, so that the whole program can be built with a sanitizer; see
// testing.cc for how it is run. What results should be is computed in double here, by the formula in each op's header.
#ifndef POPTRANSFORMER_CUSTOM_OPS_TESTS_TESTING_H_
#define POPTRANSFORMER_CUSTOM_OPS_TESTS_TESTING_H_

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "common/dtype.h"

namespace poptransformer {
namespace testing {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  // Between the two, both included; of the bias that a remainder has nobody here takes notice.
  int64_t Integer(int64_t least, int64_t most) {
    return least + static_cast<int64_t>(Bits() % static_cast<uint64_t>(most - least + 1));
  }
  bool Chance(int one_in) { return Integer(1, one_in) == 1; }
  template <typename T>
  T OneOf(std::initializer_list<T> choices) {
    return choices.begin()[Integer(0, static_cast<int64_t>(choices.size()) - 1)];
  }
  DType AnyDType() { return OneOf({DType::kFloat32, DType::kBfloat16, DType::kFloat16}); }
  // A multiple of 1/64 in -2 .. 2: every dtype holds it exactly.
  float Value() { return static_cast<float>(Integer(-128, 128)) / 64; }

 private:
  // SplitMix64: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
  uint64_t Bits() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }

  uint64_t state_;
};

// Bytes of exactly the size asked for. Some come from the heap, where AddressSanitizer watches the ends; others end at a page
// that may not be touched, since masked vector loads and stores are invisible to it.
class Memory {
 public:
  Memory(Random& random, int64_t num_bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void* data() const { return data_; }
  int64_t size() const { return num_bytes_; }

 private:
  int64_t num_bytes_;
  void* data_;
  void* mapped_ = nullptr;
  int64_t mapped_bytes_ = 0;
};

// Element i of a buffer. PutNumber is exact for what Random::Value gives, infinities and NaN.
double GetNumber(DType dtype, const void* buffer, int64_t i);
void PutNumber(DType dtype, float x, void* buffer, int64_t i);

// Numbers of a dtype in such memory.
class Array {
 public:
  Array(Random& random, DType dtype, int64_t size);

  DType dtype() const { return dtype_; }
  int64_t size() const { return size_; }
  void* data() const { return memory_.data(); }
  const float* floats() const { return static_cast<const float*>(memory_.data()); }  // of float32
  double Get(int64_t i) const { return GetNumber(dtype_, data(), i); }
  void Set(int64_t i, float x) { PutNumber(dtype_, x, data(), i); }
  void FillRandom(Random& random);
  void Fill(float x);

 private:
  DType dtype_;
  int64_t size_;
  Memory memory_;
};

// int32 in such memory.
class IntArray {
 public:
  IntArray(Random& random, const std::vector<int32_t>& values);
  const int32_t* data() const { return static_cast<const int32_t*>(memory_.data()); }

 private:
  Memory memory_;
};

// The number that the bits of an e4m3 float stand for.
double Float8Value(uint8_t bits);

// How far a number that was rounded to a dtype may be from what it stands for, relative.
double Rounding(DType dtype);

// Stops the program unless |actual - wanted| <= error, or both are the same infinity or NaN. `row` and `column` say where.
void ExpectNear(double actual, double wanted, double error, const char* what, int64_t row = 0, int64_t column = 0);
void Expect(bool is_so, const char* what);

// One test: a random problem, thread-safe. `POPTRANSFORMER_TEST(name) { ... uses random ... }` defines and lists it.
using TestFunction = void (*)(Random& random);
struct Test {
  Test(const char* name, TestFunction function, bool is_alone);
  const char* name;
  TestFunction function;
  bool is_alone;  // not from several threads at once, and once only
  Test* next;
};
Test* FirstTest();

#define POPTRANSFORMER_DEFINE_TEST(name, is_alone)                                                       \
  static void Test##name(::poptransformer::testing::Random& random);                                    \
  static ::poptransformer::testing::Test name##_test(#name, Test##name, is_alone);                      \
  static void Test##name([[maybe_unused]] ::poptransformer::testing::Random& random)
#define POPTRANSFORMER_TEST(name) POPTRANSFORMER_DEFINE_TEST(name, false)
#define POPTRANSFORMER_TEST_ALONE(name) POPTRANSFORMER_DEFINE_TEST(name, true)

}  // namespace testing
}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_TESTS_TESTING_H_
