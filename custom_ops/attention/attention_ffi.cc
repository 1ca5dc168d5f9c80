// XLA binding of attention: checks, then plain pointers. attention.h has the meaning.
#include "attention/attention.h"
#include "attention/cache_type_ffi.h"

#include <cstring>
#include <initializer_list>
#include <optional>
#include <string>

#include "common/ffi_checks.h"
#include "common/manifest.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace poptransformer {
namespace {


ffi::Error Invalid(const std::string& message) { return ffi::Error::InvalidArgument("attention: " + message); }

ffi::Error AttentionFfi(ffi::AnyBuffer query, ffi::AnyBuffer key, ffi::AnyBuffer value, ffi::AnyBuffer k_cache,
                        ffi::AnyBuffer v_cache, ffi::Buffer<ffi::S32> cache_len, ffi::Buffer<ffi::S32> num_tokens,
                        ffi::Buffer<ffi::S32> context_len, ffi::Buffer<ffi::F32> alibi_slopes,
                        ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> new_k_cache,
                        ffi::Result<ffi::AnyBuffer> new_v_cache, float scale, int64_t window,
                        bool allow_bfloat16) {
  const Shape q = query.dimensions(), k = key.dimensions(), c = k_cache.dimensions();
  if (q.size() != 4 || k.size() != 4 || c.size() != 4) {
    return Invalid("query [B, T, N, H], key [B, T, K, H] and k_cache [B, K, S, H] (H + 4 for int8) have 4 axes each; got " + ShapeText(q) +
                   ", " + ShapeText(k) + ", " + ShapeText(c));
  }
  const std::optional<DType> dtype = FloatType(query.element_type());
  const std::optional<CacheType> cache_type = CacheTypeOf(k_cache.element_type());
  if (!dtype || !cache_type) {
    return Invalid("query must be float32, bfloat16 or float16, caches one of them, float8_e4m3fn or int8");
  }
  AttentionArgs a;
  a.batch_size = q[0];
  a.num_positions = q[1];
  a.num_heads = q[2];
  a.head_dim = q[3];
  a.num_kv_heads = k[2];
  a.cache_size = c[2];
  const int64_t width = CacheRow(*cache_type, a.head_dim);
  const struct {
    const char* name;
    Shape shape;
    std::initializer_list<int64_t> wanted;
  } shapes[] = {
      {"key", k, {a.batch_size, a.num_positions, a.num_kv_heads, a.head_dim}},
      {"value", value.dimensions(), {a.batch_size, a.num_positions, a.num_kv_heads, a.head_dim}},
      {"k_cache", c, {a.batch_size, a.num_kv_heads, a.cache_size, width}},
      {"v_cache", v_cache.dimensions(), {a.batch_size, a.num_kv_heads, a.cache_size, width}},
      {"cache_len", cache_len.dimensions(), {a.batch_size}},
      {"num_tokens", num_tokens.dimensions(), {a.batch_size}},
      {"out", out->dimensions(), {a.batch_size, a.num_positions, a.num_heads, a.head_dim}},
      {"result k_cache", new_k_cache->dimensions(), {a.batch_size, a.num_kv_heads, a.cache_size, width}},
      {"result v_cache", new_v_cache->dimensions(), {a.batch_size, a.num_kv_heads, a.cache_size, width}},
  };
  for (const auto& [name, shape, wanted] : shapes) {
    if (!IsShape(shape, wanted)) {
      return Invalid(std::string(name) + " has shape " + ShapeText(shape) + ", which does not fit query " + ShapeText(q) +
                     ", key " + ShapeText(k) + " and k_cache " + ShapeText(c));
    }
  }
  if (a.num_kv_heads == 0 || a.num_heads % a.num_kv_heads != 0) {
    return Invalid("N = " + std::to_string(a.num_heads) + " query heads is not a multiple of K = " +
                   std::to_string(a.num_kv_heads) + " key/value heads");
  }

  const bool has_context = context_len.element_count() > 0, has_slopes = alibi_slopes.element_count() > 0;
  if (has_context && !IsShape(context_len.dimensions(), {a.batch_size})) {
    return Invalid("context_len has shape " + ShapeText(context_len.dimensions()) + ", not [" + std::to_string(a.batch_size) +
                   "] or [0]");
  }
  if (has_slopes && !IsShape(alibi_slopes.dimensions(), {a.num_heads})) {
    return Invalid("alibi_slopes has shape " + ShapeText(alibi_slopes.dimensions()) + ", not [" + std::to_string(a.num_heads) +
                   "] or [0]");
  }
  if (window < 0) return Invalid("window is " + std::to_string(window) + ", not positive, or 0 for none");

  if (key.element_type() != query.element_type() || value.element_type() != query.element_type() ||
      out->element_type() != query.element_type()) {
    return Invalid("query, key, value and out must have one dtype");
  }
  if (v_cache.element_type() != k_cache.element_type() || new_k_cache->element_type() != k_cache.element_type() ||
      new_v_cache->element_type() != k_cache.element_type()) {
    return Invalid("k_cache and v_cache must have one dtype");
  }
  a.dtype = *dtype;
  a.cache_type = *cache_type;

  a.cache_len = cache_len.typed_data();
  a.num_tokens = num_tokens.typed_data();
  for (int64_t b = 0; b < a.batch_size; ++b) {
    const int64_t cached = a.cache_len[b], tokens = a.num_tokens[b];
    if (cached < 0 || tokens < 0 || tokens > a.num_positions || cached + tokens > a.cache_size) {
      return Invalid("row " + std::to_string(b) + ": cache_len " + std::to_string(cached) + " and num_tokens " +
                     std::to_string(tokens) + " do not fit " + std::to_string(a.cache_size) + " cached positions and " +
                     std::to_string(a.num_positions) + " new ones");
    }
  }

  // XLA aliases the results to the arguments; where it could not, the old contents are copied.
  if (new_k_cache->untyped_data() != k_cache.untyped_data()) {
    std::memcpy(new_k_cache->untyped_data(), k_cache.untyped_data(), k_cache.size_bytes());
  }
  if (new_v_cache->untyped_data() != v_cache.untyped_data()) {
    std::memcpy(new_v_cache->untyped_data(), v_cache.untyped_data(), v_cache.size_bytes());
  }
  a.scale = scale;
  a.window = window;
  a.allow_bfloat16 = allow_bfloat16;
  a.context_len = has_context ? context_len.typed_data() : nullptr;
  a.alibi_slopes = has_slopes ? alibi_slopes.typed_data() : nullptr;
  a.query = query.untyped_data();
  a.key = key.untyped_data();
  a.value = value.untyped_data();
  a.k_cache = new_k_cache->untyped_data();
  a.v_cache = new_v_cache->untyped_data();
  a.out = out->untyped_data();
  Attention(a);
  return ffi::Error::Success();
}

}  // namespace

POPTRANSFORMER_LIST_OP(attention, 4);

}  // namespace poptransformer

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(attention, poptransformer::AttentionFfi,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()         // query [B, T, N, H]
                                  .Arg<ffi::AnyBuffer>()         // key [B, T, K, H]
                                  .Arg<ffi::AnyBuffer>()         // value [B, T, K, H]
                                  .Arg<ffi::AnyBuffer>()         // k_cache [B, K, S, CacheRow]
                                  .Arg<ffi::AnyBuffer>()         // v_cache [B, K, S, CacheRow]
                                  .Arg<ffi::Buffer<ffi::S32>>()  // cache_len [B]
                                  .Arg<ffi::Buffer<ffi::S32>>()  // num_tokens [B]
                                  .Arg<ffi::Buffer<ffi::S32>>()  // context_len [B], or [0] for none
                                  .Arg<ffi::Buffer<ffi::F32>>()  // alibi_slopes [N], or [0] for none
                                  .Ret<ffi::AnyBuffer>()         // out [B, T, N, H]
                                  .Ret<ffi::AnyBuffer>()         // k_cache, aliased to the argument
                                  .Ret<ffi::AnyBuffer>()         // v_cache, aliased to the argument
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")  // 0 for none
                                  .Attr<bool>("allow_bfloat16"));
#pragma GCC visibility pop
