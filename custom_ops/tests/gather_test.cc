#include "gather/gather.h"

#include <cstring>
#include <vector>

#include "tests/testing.h"

namespace poptransformer {
namespace testing {

POPTRANSFORMER_TEST(Gather) {
  GatherArgs a;
  const int64_t num_rows = random.Integer(1, 20);
  a.row_bytes = random.OneOf<int64_t>({0, 1, 7, 64, 300});
  a.num_indices = random.Integer(0, 30);
  Memory table(random, num_rows * a.row_bytes), out(random, a.num_indices * a.row_bytes);
  for (int64_t i = 0; i < table.size(); ++i) static_cast<char*>(table.data())[i] = static_cast<char>(random.Integer(0, 127));
  std::vector<int32_t> chosen(a.num_indices);
  for (int32_t& index : chosen) index = static_cast<int32_t>(random.Integer(0, num_rows - 1));
  const IntArray indices(random, chosen);
  a.table = table.data();
  a.indices = indices.data();
  a.out = out.data();
  Gather(a);
  for (int64_t n = 0; a.row_bytes > 0 && n < a.num_indices; ++n) {
    Expect(std::memcmp(static_cast<char*>(out.data()) + n * a.row_bytes,
                       static_cast<char*>(table.data()) + chosen[n] * a.row_bytes, a.row_bytes) == 0,
           "out");
  }
}

}  // namespace testing
}  // namespace poptransformer
