// Work in phases inside one parallel region: all tasks of a phase are done before one of the next begins.
//
// What a barrier between two kernels costs is mostly the way of a cache line between cores. Here it is one: each thread has a
// range of the phase's tasks, which it claims without asking the others; who runs out takes tasks from the ends of their ranges;
// who finishes the last one opens the next phase, and all others, who wait for that one word, see it. Nobody waits for a
// thread that is not there (parked, held up, lost in a fork): its range is taken by the others.
#ifndef POPTRANSFORMER_CUSTOM_OPS_COMMON_PHASES_H_
#define POPTRANSFORMER_CUSTOM_OPS_COMMON_PHASES_H_

#include <cstdint>

namespace poptransformer {

constexpr int64_t kMaxPhaseTasks = 65535;

using PhaseFunction = void (*)(void* context, int64_t member, int64_t phase, int64_t task);
void RunPhasesParallel(int64_t num_phases, const int32_t* num_tasks, PhaseFunction function, void* context);

// Calls work(member, phase, task) once for each task in 0 .. num_tasks[phase] - 1 of each phase, from this thread and the
// pool's, and returns when all are done. `member` numbers the threads, from 0 to NumThreads() - 1; calls with one member come
// one after the other. What the tasks of a phase wrote is visible to those of the next. At most kMaxPhaseTasks a phase; phases
// may be empty. Like ParallelFor, it runs on the calling thread alone while another one uses the pool.
template <typename Work>
void RunPhases(int64_t num_phases, const int32_t* num_tasks, const Work& work) {
  RunPhasesParallel(
      num_phases, num_tasks,
      [](void* context, int64_t member, int64_t phase, int64_t task) {
        (*static_cast<const Work*>(context))(member, phase, task);
      },
      const_cast<Work*>(&work));
}

}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_COMMON_PHASES_H_
