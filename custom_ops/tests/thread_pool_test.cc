#include "common/thread_pool.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "common/scratch.h"
#include "tests/testing.h"

namespace poptransformer {
namespace testing {
namespace {

// Each task once, what tasks wrote is seen, tasks within tasks run too.
void RunTasks(int64_t num_tasks, bool is_nested) {
  std::vector<int64_t> squares(num_tasks);
  std::atomic<int64_t> num_inner{0};
  ParallelFor(num_tasks, [&](int64_t i) {
    float* const scratch = ThreadScratch(100 + i);
    scratch[99 + i] = static_cast<float>(i);
    squares[i] += i * i;
    if (is_nested) ParallelFor(3, [&](int64_t) { num_inner.fetch_add(1, std::memory_order_relaxed); });
  });
  for (int64_t i = 0; i < num_tasks; ++i) Expect(squares[i] == i * i, "each task once");
  Expect(num_inner == (is_nested ? 3 * num_tasks : 0), "tasks within tasks");
}

}  // namespace

POPTRANSFORMER_TEST(ThreadPool) {
  RunTasks(random.OneOf<int64_t>({0, 1, 2, 3, 7, 100}), random.Chance(4));
  // Long enough now and then for the workers to park.
  if (random.Chance(10)) std::this_thread::sleep_for(std::chrono::microseconds(random.Integer(1, 200)));
}

POPTRANSFORMER_TEST_ALONE(ThreadPoolFork) {
  RunTasks(20, false);
  for (const int pause_us : {0, 500}) {  // with workers that spin, and with parked ones
    std::this_thread::sleep_for(std::chrono::microseconds(pause_us));
    const pid_t child = fork();
    Expect(child >= 0, "fork");
    if (child == 0) {  // has none of the pool's threads: does everything itself
      RunTasks(50, true);
      _exit(7);
    }
    RunTasks(50, true);
    int status = 0;
    Expect(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 7, "the forked process");
  }
}

}  // namespace testing
}  // namespace poptransformer
