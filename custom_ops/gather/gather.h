// Rows of a table, for embeddings: out[n] = table[indices[n]]. Copies bytes and knows no dtype.
//
// Here because XLA:CPU widens a whole bfloat16 table to float32 before it takes a row of it: 39 million numbers a run for the
// vocabulary of GPT-2.
#ifndef POPTRANSFORMER_CUSTOM_OPS_GATHER_GATHER_H_
#define POPTRANSFORMER_CUSTOM_OPS_GATHER_GATHER_H_

#include <cstdint>

namespace poptransformer {

// Buffers are dense. The caller has checked that all indices are in 0 .. rows of the table - 1.
struct GatherArgs {
  int64_t row_bytes;
  int64_t num_indices;
  const void* table;
  const int32_t* indices;  // [num_indices]
  void* out;               // num_indices rows
};

void Gather(const GatherArgs& args);

}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_GATHER_GATHER_H_
