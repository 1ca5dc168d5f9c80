#include "common/cpu_features.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace poptransformer {
namespace {

#if defined(__x86_64__)

constexpr uint32_t Bit(int index) { return uint32_t{1} << index; }

// XCR0: which register files the OS saves at a context switch. Needs OSXSAVE.
uint32_t ReadXcr0() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

Isa DetectIsa() {
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return Isa::kPortable;
  constexpr uint32_t kFma = Bit(12), kOsXsave = Bit(27), kAvx = Bit(28), kF16c = Bit(29);
  constexpr uint32_t kLeaf1 = kFma | kOsXsave | kAvx | kF16c;
  if ((c & kLeaf1) != kLeaf1) return Isa::kPortable;

  constexpr uint32_t kXmmYmmState = Bit(1) | Bit(2);
  constexpr uint32_t kZmmState = Bit(5) | Bit(6) | Bit(7);
  const uint32_t xcr0 = ReadXcr0();
  if ((xcr0 & kXmmYmmState) != kXmmYmmState) return Isa::kPortable;

  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return Isa::kPortable;
  constexpr uint32_t kAvx2 = Bit(5);
  constexpr uint32_t kAvx512 = Bit(16) | Bit(17) | Bit(30) | Bit(31);  // F, DQ, BW, VL
  if (!(b & kAvx2)) return Isa::kPortable;
  if ((b & kAvx512) != kAvx512 || (xcr0 & kZmmState) != kZmmState) return Isa::kAvx2;
  return Isa::kAvx512;
}

#else

Isa DetectIsa() { return Isa::kPortable; }

#endif

Isa ChooseIsa() {
  const Isa detected = DetectIsa();
  const char* wanted = std::getenv("POPTRANSFORMER_ISA");
  if (wanted == nullptr) return detected;
  for (Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (isa <= detected && std::strcmp(wanted, IsaName(isa)) == 0) return isa;
  }
  return detected;
}

}  // namespace

Isa ActiveIsa() {
  static const Isa isa = ChooseIsa();
  return isa;
}

bool HasAvx512Vnni() {
#if defined(__x86_64__)
  uint32_t a, b, c, d;
  return DetectIsa() == Isa::kAvx512 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c & Bit(11));
#else
  return false;
#endif
}

const char* IsaName(Isa isa) {
  switch (isa) {
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kPortable:
      break;
  }
  return "portable";
}

}  // namespace poptransformer

extern "C" __attribute__((visibility("default"))) const char* poptransformer_isa() {
  return poptransformer::IsaName(poptransformer::ActiveIsa());
}
