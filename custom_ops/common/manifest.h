// What the library says about itself, so that Python can refuse one that is stale or not ours.
#ifndef POPTRANSFORMER_CUSTOM_OPS_COMMON_MANIFEST_H_
#define POPTRANSFORMER_CUSTOM_OPS_COMMON_MANIFEST_H_

namespace poptransformer {

struct OpEntry {
  OpEntry(const char* name, int version);
  const char* name;
  int version;
  const OpEntry* next;
};

// In an op's binding: lists the handler symbol `name`. The version goes up whenever arguments, results or attributes change;
// poptransformer/backends/xla/custom_ops.py states the one it calls.
#define POPTRANSFORMER_LIST_OP(name, version) \
  static const ::poptransformer::OpEntry name##_entry(#name, version)

}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_COMMON_MANIFEST_H_
