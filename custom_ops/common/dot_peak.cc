// The peak of products of the instructions that the kernels use, for reporting which share of it they reach: all threads of the
// pool repeat one instruction on registers. A multiplication and an addition count as two operations.
//
// In assembly, since compilers spill such loops: with intrinsics GCC 12 gave half of the figure for 8-bit integers.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/cpu_features.h"
#include "common/thread_pool.h"
#include "common/tile_product.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace poptransformer {
namespace {

constexpr int64_t kIterations = 400'000;
constexpr int kRepetitions = 5;

#if defined(__x86_64__)

// Twelve sums in registers 0 to 11, so that none waits for itself; 12 and 13 are multiplied.
#define POPTRANSFORMER_TWELVE(op) \
  op(0) op(1) op(2) op(3) op(4) op(5) op(6) op(7) op(8) op(9) op(10) op(11)
#define POPTRANSFORMER_CLOBBERS                                                                                         \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", \
      "xmm14"
#define POPTRANSFORMER_LOOP(body, end)                                        \
  for (int64_t k = 0; k < kIterations; ++k) {                                 \
    __asm__ volatile(POPTRANSFORMER_TWELVE(body)::: POPTRANSFORMER_CLOBBERS); \
  }                                                                           \
  __asm__ volatile(end)

#define POPTRANSFORMER_FMA512(n) "vfmadd231ps %%zmm12, %%zmm13, %%zmm" #n "\n"
#define POPTRANSFORMER_BF16_512(n) "vdpbf16ps %%zmm12, %%zmm13, %%zmm" #n "\n"
#define POPTRANSFORMER_INT8_512(n) "vpdpbusd %%zmm12, %%zmm13, %%zmm" #n "\n"
#define POPTRANSFORMER_FMA256(n) "vfmadd231ps %%ymm12, %%ymm13, %%ymm" #n "\n"
#define POPTRANSFORMER_INT8_256(n)             \
  "vpmaddubsw %%ymm12, %%ymm13, %%ymm14\n"     \
  "vpmaddwd %%ymm12, %%ymm14, %%ymm14\n"       \
  "vpaddd %%ymm14, %%ymm" #n ", %%ymm" #n "\n"
#define POPTRANSFORMER_SSE(n)                                         \
  "movaps %%xmm12, %%xmm14\nmulps %%xmm13, %%xmm14\naddps %%xmm14, %%xmm" #n "\n"

void ZeroWide() { __asm__ volatile("vzeroall" ::: POPTRANSFORMER_CLOBBERS, "xmm15"); }

bool HasAvx512Bf16() {
  uint32_t a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 5));
}

#endif

// One thread's share of work, and the operations that it does.
struct Work {
  void (*run)() = nullptr;
  double operations = 0;
};

Work Find(const char* kind) {
  const auto is = [&](const char* name) { return std::strcmp(kind, name) == 0; };
#if defined(__x86_64__)
  const Isa isa = ActiveIsa();
  if (is("fp32") && isa == Isa::kAvx512) {
    return {[] { ZeroWide(); POPTRANSFORMER_LOOP(POPTRANSFORMER_FMA512, "vzeroupper"); }, 12.0 * 32};
  }
  if (is("fp32") && isa == Isa::kAvx2) {
    return {[] { ZeroWide(); POPTRANSFORMER_LOOP(POPTRANSFORMER_FMA256, "vzeroupper"); }, 12.0 * 16};
  }
  if (is("fp32")) {
    return {[] {
              __asm__ volatile("xorps %%xmm12, %%xmm12\nxorps %%xmm13, %%xmm13\n" ::: "xmm12", "xmm13");
              POPTRANSFORMER_LOOP(POPTRANSFORMER_SSE, "");
            },
            12.0 * 8};
  }
  if (is("bf16") && isa == Isa::kAvx512 && HasAvx512Bf16()) {
    return {[] { ZeroWide(); POPTRANSFORMER_LOOP(POPTRANSFORMER_BF16_512, "vzeroupper"); }, 12.0 * 64};
  }
  if (is("int8") && isa == Isa::kAvx512 && HasAvx512Vnni()) {
    return {[] { ZeroWide(); POPTRANSFORMER_LOOP(POPTRANSFORMER_INT8_512, "vzeroupper"); }, 12.0 * 128};
  }
  if (is("int8") && isa != Isa::kPortable) {
    return {[] { ZeroWide(); POPTRANSFORMER_LOOP(POPTRANSFORMER_INT8_256, "vzeroupper"); }, 12.0 * 64};
  }
#if defined(POPTRANSFORMER_BUILDS_AMX)
  if (is("bf16 tiles") && HasTiles()) {
    return {[] {
              struct alignas(64) {
                uint8_t palette = 1, start_row = 0, reserved[14] = {};
                uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
                uint8_t num_rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
              } config;
              __asm__ volatile("ldtilecfg %0\n" ::"m"(config));
              __asm__ volatile("tilezero %%tmm6\ntilezero %%tmm7\n" ::);
              for (int64_t k = 0; k < kIterations / 10; ++k) {
                __asm__ volatile(
                    "tdpbf16ps %%tmm6, %%tmm7, %%tmm0\ntdpbf16ps %%tmm6, %%tmm7, %%tmm1\n"
                    "tdpbf16ps %%tmm6, %%tmm7, %%tmm2\ntdpbf16ps %%tmm6, %%tmm7, %%tmm3\n"
                    "tdpbf16ps %%tmm6, %%tmm7, %%tmm4\ntdpbf16ps %%tmm6, %%tmm7, %%tmm5\n" ::);
              }
              __asm__ volatile("tilerelease" ::);
            },
            6.0 * 16384 / 10};
  }
#endif
#endif
  return {};
}

}  // namespace
}  // namespace poptransformer

// Median in Gop/s (1e9) of all threads together, for "fp32", "bf16", "int8" or "bf16 tiles" as the library's instruction set
// multiplies them; 0 where it has no instruction for them.
extern "C" __attribute__((visibility("default"))) double poptransformer_dot_peak_gop_per_s(const char* kind) {
  using namespace poptransformer;
  const Work work = Find(kind);
  if (work.run == nullptr) return 0;
  const int64_t num_tasks = NumThreads();
  std::vector<double> gop_per_s;
  for (int repetition = 0; repetition <= kRepetitions; ++repetition) {
    const auto start = std::chrono::steady_clock::now();
    ParallelFor(num_tasks, [&](int64_t) { work.run(); });
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    const double operations = work.operations * kIterations * static_cast<double>(num_tasks);
    if (repetition > 0) gop_per_s.push_back(operations / elapsed.count() * 1e-9);  // the first one wakes everybody
  }
  std::nth_element(gop_per_s.begin(), gop_per_s.begin() + kRepetitions / 2, gop_per_s.end());
  return gop_per_s[kRepetitions / 2];
}
