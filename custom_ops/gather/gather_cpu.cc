// One thread: a decode step copies a few rows, a prefill at most some megabytes.
#include "gather/gather.h"

#include <cstring>

namespace poptransformer {

void Gather(const GatherArgs& a) {
  const char* const table = static_cast<const char*>(a.table);
  char* const out = static_cast<char*>(a.out);
  for (int64_t n = 0; n < a.num_indices; ++n) {
    std::memcpy(out + n * a.row_bytes, table + a.indices[n] * a.row_bytes, a.row_bytes);
  }
}

}  // namespace poptransformer
