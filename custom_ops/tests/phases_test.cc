#include "common/phases.h"

#include <cstddef>
#include <vector>

#include "tests/testing.h"

namespace poptransformer {
namespace testing {
namespace {

// Each task counts itself, and looks whether all tasks of the phase before it are done.
struct Counting {
  const std::vector<int32_t>& num_tasks;
  std::vector<std::vector<int>>& counts;

  void operator()(int64_t, int64_t phase, int64_t task) const {
    if (phase > 0) {
      for (const int count : counts[phase - 1]) Expect(count == 1, "a phase begins when the one before it is done");
    }
    ++counts[phase][task];
  }
};

}  // namespace

POPTRANSFORMER_TEST(Phases) {
  std::vector<int32_t> num_tasks(random.Integer(0, 12));
  std::vector<std::vector<int>> counts(num_tasks.size());
  for (std::size_t p = 0; p < num_tasks.size(); ++p) {
    num_tasks[p] = static_cast<int32_t>(random.OneOf<int64_t>({0, 1, 2, 3, 7, 40}));
    counts[p].resize(num_tasks[p]);
  }
  RunPhases(static_cast<int64_t>(num_tasks.size()), num_tasks.data(), Counting{num_tasks, counts});
  for (const auto& phase : counts) {
    for (const int count : phase) Expect(count == 1, "each task runs once");
  }
}

}  // namespace testing
}  // namespace poptransformer
