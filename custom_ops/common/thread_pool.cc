#include "common/thread_pool.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif

namespace poptransformer {
namespace {

// Long enough to bridge the gap between two kernels of one layer, short enough that a spinning worker takes next to nothing
// from XLA's own threads, which share the cores.
constexpr int64_t kSpinWaitNs = 20'000;

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

class ThreadPool {
 public:
  explicit ThreadPool(int num_threads) {
    for (int i = 1; i < num_threads; ++i) {
      try {
        std::thread([this] { Work(); }).detach();
      } catch (const std::system_error&) {
        break;  // the process may start no more threads: fewer workers are slower, not wrong
      }
      ++num_workers_;
    }
  }

  int num_threads() const { return num_workers_ + 1; }

  // In a forked process, which has none of the workers: nobody may be waited for or woken. A condition variable that others
  // waited on when the process was forked waits for them for ever.
  void ForgetWorkers() { num_workers_ = 0; }

  void Run(int64_t num_tasks, TaskFunction function, void* context) {
    if (num_tasks <= 1 || num_workers_ == 0 || busy_.exchange(true, std::memory_order_acquire)) {
      for (int64_t i = 0; i < num_tasks; ++i) function(context, i);
      return;
    }
    completed_.store(0, std::memory_order_relaxed);
    function_.store(function, std::memory_order_release);
    context_.store(context, std::memory_order_release);
    num_tasks_.store(static_cast<uint32_t>(num_tasks), std::memory_order_release);
    const uint32_t epoch = Epoch(ticket_.load(std::memory_order_relaxed)) + 1;
    ticket_.store(Ticket(epoch, 0), std::memory_order_seq_cst);
    WakeUpTo(num_tasks - 1);

    ClaimTasks(epoch);
    for (int spins = 0; completed_.load(std::memory_order_acquire) != num_tasks; ++spins) {
      if (spins < 4096) {
        Pause();
      } else {
        std::this_thread::yield();  // the OS holds up a worker with a claimed task
      }
    }
    ticket_.store(Ticket(epoch, kClosed), std::memory_order_release);
    busy_.store(false, std::memory_order_release);
  }

 private:
  // A ticket is the job's number and the next task to claim, in one word: a claim made by compare-and-swap can then only
  // succeed for the job that the claimer has looked at. A closed ticket has no tasks, so that while the fields of the next
  // job are being written nobody can claim with half of them.
  static constexpr uint32_t kClosed = 0xffffffff;
  static uint64_t Ticket(uint32_t epoch, uint32_t task) { return uint64_t{epoch} << 32 | task; }
  static uint32_t Epoch(uint64_t ticket) { return static_cast<uint32_t>(ticket >> 32); }
  static uint32_t Task(uint64_t ticket) { return static_cast<uint32_t>(ticket); }

  void ClaimTasks(uint32_t epoch) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    const TaskFunction function = function_.load(std::memory_order_acquire);
    void* const context = context_.load(std::memory_order_acquire);
    const uint32_t num_tasks = num_tasks_.load(std::memory_order_acquire);
    while (Epoch(ticket) == epoch && Task(ticket) < num_tasks) {
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
        continue;
      }
      function(context, Task(ticket));
      completed_.fetch_add(1, std::memory_order_release);
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  void Work() {
    uint32_t seen = 0;
    for (;;) {
      const uint32_t epoch = WaitForJobAfter(seen);
      seen = epoch;
      ClaimTasks(epoch);
    }
  }

  uint32_t WaitForJobAfter(uint32_t seen) {
    const int64_t deadline_ns = NowNs() + kSpinWaitNs;
    do {
      for (int i = 0; i < 32; ++i) {
        const uint32_t epoch = Epoch(ticket_.load(std::memory_order_acquire));
        if (epoch != seen) return epoch;
        Pause();
      }
    } while (NowNs() < deadline_ns);

    std::unique_lock<std::mutex> lock(mutex_);
    num_parked_.fetch_add(1, std::memory_order_seq_cst);
    uint32_t epoch;
    while ((epoch = Epoch(ticket_.load(std::memory_order_seq_cst))) == seen) job_published_.wait(lock);
    num_parked_.fetch_sub(1, std::memory_order_relaxed);
    return epoch;
  }

  void WakeUpTo(int64_t num_wanted) {
    int num_parked = num_parked_.load(std::memory_order_seq_cst);
    if (num_parked == 0) return;
    // A worker that has counted itself but does not wait yet still holds the mutex.
    { std::lock_guard<std::mutex> lock(mutex_); }
    if (num_wanted >= num_parked) {
      job_published_.notify_all();
    } else {
      while (num_wanted-- > 0) job_published_.notify_one();
    }
  }

  int num_workers_ = 0;
  alignas(64) std::atomic<uint64_t> ticket_{Ticket(0, kClosed)};
  alignas(64) std::atomic<int64_t> completed_{0};
  alignas(64) std::atomic<TaskFunction> function_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<uint32_t> num_tasks_{0};
  alignas(64) std::atomic<bool> busy_{false};
  alignas(64) std::atomic<int> num_parked_{0};
  std::mutex mutex_;
  std::condition_variable job_published_;
};

int CeilDivide(double quota_us, double period_us) {
  return quota_us > 0 && period_us > 0 ? static_cast<int>((quota_us + period_us - 1) / period_us) : 0;
}

// cgroup v2: "max 100000" or "150000 100000".
int LimitV2(const std::string& folder) {
  std::ifstream file(folder + "/cpu.max");
  std::string quota;
  double period_us = 0;
  if (!(file >> quota >> period_us) || quota == "max") return 0;
  return CeilDivide(std::atof(quota.c_str()), period_us);
}

// cgroup v1: a quota of -1 is no limit.
int LimitV1(const std::string& folder) {
  double quota_us = 0, period_us = 0;
  std::ifstream(folder + "/cpu.cfs_quota_us") >> quota_us;
  std::ifstream(folder + "/cpu.cfs_period_us") >> period_us;
  return CeilDivide(quota_us, period_us);
}

// The tightest limit from the process's group up to the root. A container often sees its own group as the root while
// /proc/self/cgroup still gives the host's path; the missing folders in between then say nothing.
template <typename ReadLimit>
int TightestLimit(const std::string& mount, std::string group, const ReadLimit& read_limit) {
  int tightest = 0;
  for (;;) {
    const int limit = read_limit(mount + group);
    if (limit > 0 && (tightest == 0 || limit < tightest)) tightest = limit;
    const size_t slash = group.rfind('/');
    if (slash == std::string::npos) return tightest;
    group.resize(slash);
  }
}

int AffinityCpus() {
#if defined(__linux__)
  for (int num_cpus = 1024; num_cpus <= 1 << 16; num_cpus *= 4) {
    cpu_set_t* set = CPU_ALLOC(num_cpus);
    const size_t size = CPU_ALLOC_SIZE(num_cpus);
    const int count = sched_getaffinity(0, size, set) == 0 ? CPU_COUNT_S(size, set) : 0;
    CPU_FREE(set);
    if (count > 0) return count;
  }
#endif
  const int count = static_cast<int>(std::thread::hardware_concurrency());
  return count > 0 ? count : 1;
}

int ChooseNumThreads() {
  if (const char* text = std::getenv("POPTRANSFORMER_NUM_THREADS")) {
    char* end = nullptr;
    const long wanted = std::strtol(text, &end, 10);
    if (end != text && *end == '\0' && wanted >= 1 && wanted <= 1024) return static_cast<int>(wanted);
  }
  const int cpus = AffinityCpus();
  const int limit = CgroupCpuLimit("");
  return limit > 0 && limit < cpus ? limit : cpus;
}

ThreadPool& Pool() {
  static ThreadPool* const pool = [] {
    pthread_atfork(nullptr, nullptr, [] { Pool().ForgetWorkers(); });
    return new ThreadPool(ChooseNumThreads());
  }();
  return *pool;
}

}  // namespace

int NumThreads() { return Pool().num_threads(); }

int CgroupCpuLimit(const char* root) {
  const std::string prefix(root);
  const std::string mount = prefix + "/sys/fs/cgroup";
  std::ifstream groups(prefix + "/proc/self/cgroup");
  int tightest = 0;
  const auto tighten = [&](int limit) {
    if (limit > 0 && (tightest == 0 || limit < tightest)) tightest = limit;
  };
  for (std::string line; std::getline(groups, line);) {  // id:controllers:/path
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string group = line.substr(second + 1);
    if (group == "/") group.clear();
    if (controllers.empty()) {
      tighten(TightestLimit(mount, group, LimitV2));
      continue;
    }
    std::istringstream names(controllers);
    for (std::string name; std::getline(names, name, ',');) {
      if (name != "cpu") continue;
      tighten(TightestLimit(mount + "/" + controllers, group, LimitV1));
      tighten(TightestLimit(mount + "/cpu", group, LimitV1));
    }
  }
  return tightest;
}

void RunParallel(int64_t num_tasks, TaskFunction function, void* context) {
  Pool().Run(num_tasks, function, context);
}

}  // namespace poptransformer

extern "C" {
__attribute__((visibility("default"))) int poptransformer_num_threads() { return poptransformer::NumThreads(); }

__attribute__((visibility("default"))) int poptransformer_cgroup_cpu_limit(const char* root) {
  return poptransformer::CgroupCpuLimit(root);
}
}
