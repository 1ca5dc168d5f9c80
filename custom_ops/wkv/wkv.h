// RWKV-4's recurrence: the average of a row's values so far, each weighed by e^key and by its age, feature by feature.
//
// With w = -e^time_decay, u = time_first and a state (n, d, m) that stands for the sums n * e^m and d * e^m, for each row b,
// feature c and t < num_tokens[b] in order:
//
//   out[b, t, c] = (n e^m + value e^(u + key)) / (d e^m + e^(u + key))
//   (n e^m, d e^m) = (n e^(m + w) + value e^key, d e^(m + w) + e^key)         with m the greater of m + w and key from now on
//
// and out[b, t] = 0 for t >= num_tokens[b]. A row with cache_len[b] = 0 begins with n = d = 0, whatever its state holds; one
// with num_tokens[b] = 0 keeps its state bit for bit. All arithmetic is float32, relative to the greater exponent.
#ifndef POPTRANSFORMER_CUSTOM_OPS_WKV_WKV_H_
#define POPTRANSFORMER_CUSTOM_OPS_WKV_WKV_H_

#include <cstdint>

#include "common/dtype.h"

namespace poptransformer {

// Buffers are dense and row-major. The caller has checked that 0 <= cache_len[b] and 0 <= num_tokens[b] <= T.
struct WkvArgs {
  int64_t batch_size;         // B
  int64_t num_positions;      // T
  int64_t width;              // D
  DType dtype;                // of key, value and out
  const void* key;            // [B, T, D]
  const void* value;          // [B, T, D]
  const float* time_decay;    // [D]
  const float* time_first;    // [D]
  float* state;               // [B, 3, D]: n, d, m
  const int32_t* cache_len;   // [B]
  const int32_t* num_tokens;  // [B]
  void* out;                  // [B, T, D]
};

void Wkv(const WkvArgs& args);

}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_WKV_WKV_H_
