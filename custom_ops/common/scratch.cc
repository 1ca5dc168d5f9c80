#include "common/scratch.h"

#include <cstddef>
#include <new>

namespace poptransformer {
namespace {

constexpr std::align_val_t kAlignment{64};

struct Buffer {
  float* data = nullptr;
  int64_t num_floats = 0;

  ~Buffer() { ::operator delete(data, kAlignment); }

  void Grow(int64_t wanted) {
    ::operator delete(data, kAlignment);
    data = nullptr;
    num_floats = 0;
    const int64_t rounded = wanted + wanted / 2;
    data = static_cast<float*>(::operator new(static_cast<size_t>(rounded) * sizeof(float), kAlignment));
    num_floats = rounded;
  }
};

}  // namespace

float* ThreadScratch(int64_t num_floats) {
  thread_local Buffer buffer;
  if (buffer.num_floats < num_floats) buffer.Grow(num_floats);
  return buffer.data;
}

}  // namespace poptransformer
