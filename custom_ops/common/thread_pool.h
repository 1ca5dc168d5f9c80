// One pool of threads for all kernels of the process.
//
// It is made at the first use and never destroyed: idle workers sleep and end with the process. A worker that runs out of
// tasks spins for kSpinWaitNs, so that kernels which follow each other closely find it awake, then parks on a condition
// variable. Tasks are claimed one by one from an atomic counter, so a worker that the OS holds up delays only the task it
// has. A forked process has no workers: there the caller does the work itself.
//
// Size: the least of the CPUs in the scheduler affinity mask and the cgroup CPU quota (v1 or v2, rounded up), counting the
// calling thread. POPTRANSFORMER_NUM_THREADS=n overrides it (1 to 1024); any other value is ignored without a message.
#ifndef POPTRANSFORMER_CUSTOM_OPS_COMMON_THREAD_POOL_H_
#define POPTRANSFORMER_CUSTOM_OPS_COMMON_THREAD_POOL_H_

#include <cstdint>

namespace poptransformer {

// Threads that take part in a ParallelFor, the caller among them.
int NumThreads();

// CPUs that the cgroup quota allows, rounded up, or 0 where there is no limit. Reads ROOT/proc/self/cgroup and the files
// under ROOT/sys/fs/cgroup; root is "" outside tests.
int CgroupCpuLimit(const char* root);

using TaskFunction = void (*)(void* context, int64_t task);
void RunParallel(int64_t num_tasks, TaskFunction function, void* context);

// Calls task(i) once for every i in [0, num_tasks), from this thread and the pool's, and returns when all are done; what
// the tasks wrote is then visible here. Low i start first. When another thread is inside a ParallelFor already, or a task
// calls it, the work runs on the calling thread alone. A task must not throw. num_tasks < 2^32 - 1.
template <typename Task>
void ParallelFor(int64_t num_tasks, const Task& task) {
  RunParallel(
      num_tasks, [](void* context, int64_t i) { (*static_cast<const Task*>(context))(i); },
      const_cast<Task*>(&task));
}

}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_COMMON_THREAD_POOL_H_
