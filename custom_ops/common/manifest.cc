#include "common/manifest.h"

#include <string>

#include "xla/ffi/api/c_api.h"

namespace poptransformer {
namespace {

// A plain pointer, because the entries of other files may be constructed before anything in this one.
const OpEntry* first_entry = nullptr;

}  // namespace

OpEntry::OpEntry(const char* name, int version) : name(name), version(version), next(first_entry) {
  first_entry = this;
}

}  // namespace poptransformer

// Lines of words: `ffi MAJOR MINOR` (the XLA headers it was compiled with), then `op NAME VERSION` for each handler.
extern "C" __attribute__((visibility("default"))) const char* poptransformer_manifest() {
  static const std::string text = [] {
    std::string lines =
        "ffi " + std::to_string(XLA_FFI_API_MAJOR) + " " + std::to_string(XLA_FFI_API_MINOR) + "\n";
    for (const auto* entry = poptransformer::first_entry; entry != nullptr; entry = entry->next) {
      lines += std::string("op ") + entry->name + " " + std::to_string(entry->version) + "\n";
    }
    return lines;
  }();
  return text.c_str();
}
