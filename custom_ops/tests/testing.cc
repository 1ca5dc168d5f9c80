// usage: kernel_tests [ROUNDS [SEED [NAME]]]
//
// Every test ROUNDS times with other random problems, first from one thread, then from three at once, of which the pool serves
// one at a time. The environment chooses the instruction set (POPTRANSFORMER_ISA) and the pool's size
// (POPTRANSFORMER_NUM_THREADS). Ends with 0, or says what is wrong and with which seed, and aborts.
#include "tests/testing.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "common/cpu_features.h"
#include "common/thread_pool.h"
#include "common/tile_product.h"

namespace poptransformer {
namespace testing {
namespace {

Test* first_test = nullptr;
thread_local uint64_t current_seed = 0;
thread_local const char* current_test = "";

[[noreturn]] void Fail(const char* what) {
  std::fprintf(stderr, "%s, seed %llu: %s\n", current_test, static_cast<unsigned long long>(current_seed), what);
  std::abort();
}

void RunTest(const Test& test, uint64_t seed) {
  current_test = test.name;
  current_seed = seed;
  Random random(seed);
  test.function(random);
}

}  // namespace

Memory::Memory(Random& random, int64_t num_bytes) : num_bytes_(num_bytes) {
  if (random.Chance(2)) {
    data_ = std::malloc(num_bytes);
    Expect(data_ != nullptr || num_bytes == 0, "out of memory");
  } else {
    const int64_t page = sysconf(_SC_PAGESIZE), pages = (num_bytes + page - 1) / page;
    mapped_bytes_ = (pages + 1) * page;
    mapped_ = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    Expect(mapped_ != MAP_FAILED, "out of memory");
    char* const end = static_cast<char*>(mapped_) + pages * page;
    Expect(mprotect(end, page, PROT_NONE) == 0, "mprotect");
    data_ = end - num_bytes;
  }
}

Memory::~Memory() {
  if (mapped_ != nullptr) {
    munmap(mapped_, mapped_bytes_);
  } else {
    std::free(data_);
  }
}

Array::Array(Random& random, DType dtype, int64_t size)
    : dtype_(dtype), size_(size), memory_(random, size * ByteWidth(dtype)) {
  Fill(std::nanf(""));
}

double GetNumber(DType dtype, const void* buffer, int64_t i) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(buffer)[i];
  const uint32_t bits = static_cast<const uint16_t*>(buffer)[i];
  if (dtype == DType::kBfloat16) {
    const uint32_t wide = bits << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    return x;
  }
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double magnitude = exponent == 31  ? (fraction != 0 ? std::nan("") : INFINITY)
                           : exponent == 0 ? std::ldexp(fraction, -24)
                                           : std::ldexp(1024 + fraction, exponent - 25);
  return bits >> 15 ? -magnitude : magnitude;
}

void PutNumber(DType dtype, float x, void* buffer, int64_t i) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(buffer)[i] = x;
    return;
  }
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint16_t* const to = static_cast<uint16_t*>(buffer) + i;
  if (dtype == DType::kBfloat16) {
    *to = static_cast<uint16_t>(bits >> 16);
  } else if (std::isnan(x)) {
    *to = 0x7e00;
  } else if (std::isinf(x)) {
    *to = x > 0 ? 0x7c00 : 0xfc00;
  } else if (x == 0) {
    *to = 0;
  } else {
    *to = static_cast<uint16_t>(bits >> 16 & 0x8000) | static_cast<uint16_t>(((bits >> 13) & 0x3ffff) - (112 << 10));
  }
}

void Array::FillRandom(Random& random) {
  for (int64_t i = 0; i < size_; ++i) Set(i, random.Value());
}

void Array::Fill(float x) {
  for (int64_t i = 0; i < size_; ++i) Set(i, x);
}

IntArray::IntArray(Random& random, const std::vector<int32_t>& values)
    : memory_(random, static_cast<int64_t>(values.size() * sizeof(int32_t))) {
  if (!values.empty()) std::memcpy(memory_.data(), values.data(), values.size() * sizeof(int32_t));
}

double Float8Value(uint8_t bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  if ((bits & 0x7f) == 0x7f) return std::nan("");
  const double magnitude = exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
  return bits >> 7 ? -magnitude : magnitude;
}

double Rounding(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 0x1p-24;
    case DType::kBfloat16:
      return 0x1p-8;
    case DType::kFloat16:
      return 0x1p-11;
  }
  return 0;
}

void ExpectNear(double actual, double wanted, double error, const char* what, int64_t row, int64_t column) {
  if (actual == wanted || (std::isnan(actual) && std::isnan(wanted))) return;
  if (std::abs(actual - wanted) <= error) return;
  char text[200];
  std::snprintf(text, sizeof(text), "%s [%lld, %lld]: %.9g, wanted %.9g within %.3g", what, static_cast<long long>(row),
                static_cast<long long>(column), actual, wanted, error);
  Fail(text);
}

void Expect(bool is_so, const char* what) {
  if (!is_so) Fail(what);
}

Test::Test(const char* name, TestFunction function, bool is_alone)
    : name(name), function(function), is_alone(is_alone), next(first_test) {
  first_test = this;
}

Test* FirstTest() { return first_test; }

}  // namespace testing
}  // namespace poptransformer

int main(int argc, char** argv) {
  using namespace poptransformer;
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 20;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  const char* const only = argc > 3 ? argv[3] : nullptr;
  int num_tests = 0;
  const auto run_all = [&](uint64_t first_seed, bool is_alone) {
    for (const testing::Test* test = testing::FirstTest(); test != nullptr; test = test->next) {
      if (only != nullptr && std::strcmp(only, test->name) != 0) continue;
      if (test->is_alone) {
        if (is_alone) testing::RunTest(*test, first_seed);
      } else {
        for (int round = 0; round < rounds; ++round) testing::RunTest(*test, first_seed + round);
      }
      if (is_alone) ++num_tests;
    }
  };
  run_all(seed, true);
  if (num_tests == 0) {
    std::fprintf(stderr, "no test %s\n", only);
    return 1;
  }
  std::thread callers[3];
  for (int i = 0; i < 3; ++i) callers[i] = std::thread(run_all, seed + (i + 1) * 1000003, false);
  for (std::thread& caller : callers) caller.join();
  std::printf("%d tests, %d rounds by one caller and by three at once: %s%s, %d threads\n", num_tests, rounds,
              IsaName(ActiveIsa()), HasTiles() ? " and tiles" : "", NumThreads());
  return 0;
}
