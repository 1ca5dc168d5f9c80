// Which of the compiled instruction sets this process runs.
#ifndef POPTRANSFORMER_CUSTOM_OPS_COMMON_CPU_FEATURES_H_
#define POPTRANSFORMER_CUSTOM_OPS_COMMON_CPU_FEATURES_H_

namespace poptransformer {

// Ordered: a higher one implies the lower ones.
enum class Isa {
  kPortable,  // whatever the compiler targets by default
  kAvx2,      // AVX2, FMA, F16C
  kAvx512,    // AVX-512 F, BW, DQ, VL, and all of the above
};

// The highest set that the CPU has and the OS saves registers for, found once. The environment variable
// POPTRANSFORMER_ISA = portable | avx2 | avx512 lowers it (never raises it; another value is ignored).
Isa ActiveIsa();

const char* IsaName(Isa isa);

// Whether the CPU has AVX-512's dot products of 8-bit integers. A question apart from ActiveIsa, which may have been lowered.
bool HasAvx512Vnni();

// Picks a kernel table. Only the portable one exists outside x86-64.
#if defined(__x86_64__)
#define POPTRANSFORMER_SELECT_ISA(function)                                              \
  (::poptransformer::ActiveIsa() == ::poptransformer::Isa::kAvx512 ? avx512::function()  \
   : ::poptransformer::ActiveIsa() == ::poptransformer::Isa::kAvx2 ? avx2::function()    \
                                                                   : portable::function())
#else
#define POPTRANSFORMER_SELECT_ISA(function) (portable::function())
#endif

}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_COMMON_CPU_FEATURES_H_
