#include "common/phases.h"

#include <atomic>
#include <memory>
#include <thread>

#include "common/thread_pool.h"

namespace poptransformer {
namespace {

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// The tasks of one member that nobody has claimed: its phase in the upper half of the word, then begin and end, 16 bits each.
// A word of an earlier phase stands for the whole range of the current one, so that nobody has to fill the words in.
struct alignas(64) Range {
  std::atomic<uint64_t> word;
};

uint64_t RangeWord(uint32_t phase, uint32_t begin, uint32_t end) { return uint64_t{phase} << 32 | begin << 16 | end; }

class Region {
 public:
  Region(int64_t num_members, Range* ranges, int64_t num_phases, const int32_t* num_tasks, PhaseFunction function,
         void* context)
      : num_members_(num_members), ranges_(ranges), num_phases_(num_phases), num_tasks_(num_tasks), function_(function),
        context_(context) {
    for (int64_t m = 0; m < num_members; ++m) ranges[m].word.store(RangeWord(kBefore, 0, 0), std::memory_order_relaxed);
    progress_.store(static_cast<uint64_t>(NextPhase(0)) << 32, std::memory_order_relaxed);
  }

  void Work(int64_t member) {
    int64_t phase = Phase();
    while (phase < num_phases_) {
      int64_t finished = 0, task;
      while ((task = Claim(member, phase, true)) >= 0) {
        function_(context_, member, phase, task);
        ++finished;
      }
      for (int64_t k = 1; k < num_members_; ++k) {
        const int64_t other = member + k < num_members_ ? member + k : member + k - num_members_;
        while ((task = Claim(other, phase, false)) >= 0) {
          function_(context_, member, phase, task);
          ++finished;
        }
      }
      if (finished > 0) Finish(phase, finished);
      phase = WaitAfter(phase);
    }
  }

 private:
  static constexpr uint32_t kBefore = 0xffffffff;  // of all phases

  int64_t Phase() const { return static_cast<int64_t>(progress_.load(std::memory_order_acquire) >> 32); }

  int64_t NextPhase(int64_t phase) const {
    while (phase < num_phases_ && num_tasks_[phase] == 0) ++phase;
    return phase;
  }

  // The first task of a member's range, or the last one; -1 if there are none, or the phase is over.
  int64_t Claim(int64_t member, int64_t phase, bool is_first) {
    std::atomic<uint64_t>& word = ranges_[member].word;
    uint64_t seen = word.load(std::memory_order_relaxed);
    for (;;) {
      const uint32_t its_phase = static_cast<uint32_t>(seen >> 32);
      int64_t begin = seen >> 16 & 0xffff, end = seen & 0xffff;
      if (its_phase != static_cast<uint32_t>(phase)) {
        if (its_phase != kBefore && its_phase > static_cast<uint32_t>(phase)) return -1;
        begin = (num_tasks_[phase] * member + num_members_ - 1) / num_members_;
        end = (num_tasks_[phase] * (member + 1) + num_members_ - 1) / num_members_;
      }
      if (begin >= end) return -1;
      const int64_t task = is_first ? begin++ : --end;
      const uint64_t left = RangeWord(static_cast<uint32_t>(phase), static_cast<uint32_t>(begin), static_cast<uint32_t>(end));
      if (word.compare_exchange_weak(seen, left, std::memory_order_relaxed)) return task;
    }
  }

  void Finish(int64_t phase, int64_t count) {
    const uint64_t before = progress_.fetch_add(static_cast<uint64_t>(count), std::memory_order_acq_rel);
    if (static_cast<int64_t>(before & 0xffffffff) + count == num_tasks_[phase]) {
      progress_.store(static_cast<uint64_t>(NextPhase(phase + 1)) << 32, std::memory_order_release);
    }
  }

  int64_t WaitAfter(int64_t phase) const {
    for (int spins = 0;; ++spins) {
      const int64_t now = Phase();
      if (now != phase) return now;
      if (spins < 4096) {
        Pause();
      } else {
        std::this_thread::yield();  // the OS holds up a thread with a claimed task
      }
    }
  }

  // The phase, and in the lower half how many of its tasks are finished.
  alignas(64) std::atomic<uint64_t> progress_;
  alignas(64) const int64_t num_members_;
  Range* const ranges_;
  const int64_t num_phases_;
  const int32_t* const num_tasks_;
  const PhaseFunction function_;
  void* const context_;
};

}  // namespace

void RunPhasesParallel(int64_t num_phases, const int32_t* num_tasks, PhaseFunction function, void* context) {
  const int64_t num_members = NumThreads();
  thread_local std::unique_ptr<Range[]> ranges(new Range[num_members]);
  Region region(num_members, ranges.get(), num_phases, num_tasks, function, context);
  ParallelFor(num_members, [&](int64_t member) { region.Work(member); });
}

}  // namespace poptransformer
