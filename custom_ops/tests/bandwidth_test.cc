#include <cstdint>

#include "tests/testing.h"

extern "C" double poptransformer_read_bandwidth_gb_per_s(int64_t num_bytes, int num_repetitions);

namespace poptransformer {
namespace testing {

POPTRANSFORMER_TEST_ALONE(ReadBandwidth) {
  Expect(poptransformer_read_bandwidth_gb_per_s(8 << 20, 2) > 0, "measured");
}

}  // namespace testing
}  // namespace poptransformer
