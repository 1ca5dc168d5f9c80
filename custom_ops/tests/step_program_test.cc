#include "step_program/step_program.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <vector>

#include "common/tile_product.h"
#include "step_program/step_program_tiles.h"
#include "tests/testing.h"

namespace poptransformer {
namespace testing {
namespace {

using Numbers2 = std::vector<std::vector<double>>;  // [M, width]

// A block of a decoder as a program: attention and a gated MLP, each on normed rows and added to them.
class Block {
 public:
  explicit Block(Random& random) : random_(random) {
    is_tiled_ = HasTiles() && random.Chance(2);
    batch_size_ = is_tiled_ ? random.OneOf<int64_t>({1, 3, 9}) : random.Integer(1, kMaxProgramRows);
    num_positions_ = is_tiled_ ? random.OneOf<int64_t>({1, 2, 17}) : 1;
    num_rows_ = batch_size_ * num_positions_;
    width_ = random.OneOf<int64_t>({1, 16, 33, 70});
    num_kv_heads_ = random.Integer(1, 2);
    num_heads_ = num_kv_heads_ * random.Integer(1, 3);
    head_dim_ = random.OneOf<int64_t>({1, 8, 19});
    inner_ = random.OneOf<int64_t>({5, 32, 64, 100});
    cache_size_ = num_positions_ + random.Integer(0, 90);
    weight_dtype_ = is_tiled_ ? DType::kBfloat16 : random.AnyDType();
    for (int64_t b = 0; b < batch_size_; ++b) {
      num_tokens_.push_back(static_cast<int32_t>(random.Integer(0, num_positions_)));
      cache_len_.push_back(static_cast<int32_t>(random.Integer(0, cache_size_ - num_tokens_.back())));
    }
  }

  void Run() {
    Array x(random_, random_.AnyDType(), num_rows_ * width_), result(random_, DType::kFloat32, num_rows_ * width_);
    x.FillRandom(random_);
    const int64_t heads = num_heads_ * head_dim_, kv_heads = num_kv_heads_ * head_dim_;
    const Matrix q = Weight(heads, width_), k = Weight(kv_heads, width_), v = Weight(kv_heads, width_), o = Weight(width_, heads);
    const Matrix gate = Weight(inner_, width_), up = Weight(inner_, width_), down = Weight(width_, inner_);
    Norm norm;
    norm.kind = random_.Chance(2) ? NormKind::kRms : NormKind::kLayer;
    norm.eps = 1e-5f;
    norm.weight = {Filled(width_, weight_dtype_).data(), weight_dtype_};
    const IntArray cache_len(random_, cache_len_), num_tokens(random_, num_tokens_);
    const int64_t cache_numbers = batch_size_ * num_kv_heads_ * cache_size_ * head_dim_;
    Array& k_cache = Filled(cache_numbers, DType::kFloat32);
    Array& v_cache = Filled(cache_numbers, DType::kFloat32);
    AttentionArgs attention = {};
    attention.batch_size = batch_size_;
    attention.num_positions = num_positions_;
    attention.cache_size = cache_size_;
    attention.num_heads = num_heads_;
    attention.num_kv_heads = num_kv_heads_;
    attention.head_dim = head_dim_;
    attention.scale = 0.25f;
    attention.dtype = DType::kFloat32;
    attention.cache_type = CacheType::kFloat32;
    attention.cache_len = cache_len.data();
    attention.num_tokens = num_tokens.data();
    const Numbers2 wanted = Wanted(x, norm, {q, k, v, o, gate, up, down}, attention, k_cache, v_cache);

    Step load = Make(StepKind::kLoad, width_);
    load.numbers = {x.data(), x.dtype()};
    load.out = Place(width_);
    Phase({load});
    const Step normed = Input(load.out, width_, norm);
    Step steps[3] = {Product(normed, q, heads), Product(normed, k, kv_heads), Product(normed, v, kv_heads)};
    Phase({steps[0], steps[1], steps[2]});
    Step attend = Make(StepKind::kAttention, heads);
    Rows* const views[3] = {&attend.in, &attend.key, &attend.value};
    std::vector<Step> copies;
    for (int i = 0; i < 3; ++i) {
      *views[i] = steps[i].out;
      if (num_positions_ == 1) continue;
      Step copy = Make(StepKind::kHeads, steps[i].width);
      copy.head_dim = head_dim_;
      copy.in = steps[i].out;
      *views[i] = copy.out = random_.Chance(2) ? steps[i].out : Place(steps[i].width, true);
      if (copy.in.data == copy.out.data && copy.in.stride != copy.width) *views[i] = copy.out = Place(copy.width, true);
      copies.push_back(copy);
    }
    Phase(copies);
    attend.num_heads = num_heads_;
    attend.num_kv_heads = num_kv_heads_;
    attend.head_dim = head_dim_;
    attend.cache_size = cache_size_;
    attend.scale = attention.scale;
    attend.cache_type = attention.cache_type;
    attend.k_cache = k_cache.data();
    attend.v_cache = v_cache.data();
    attend.cache_len = cache_len.data();
    attend.num_tokens = num_tokens.data();
    attend.out = Place(heads, num_positions_ > 1);
    Phase({attend});
    Step project = Product(Input(attend.out, heads, Norm()), o, width_);
    project.other = load.out;
    if (random_.Chance(2)) project.out = project.other;
    Phase({project});
    Step gated = Product(Input(project.out, width_, norm), gate, inner_);
    gated.function = Function::kSilu;
    gated.multiply = up;
    Step last;
    if (is_tiled_ && inner_ % kTileInputs == 0) {  // rounded by the product that makes it
      gated.out = {};
      gated.out_tiles = Tiles(inner_);
      Phase({gated});
      last = Make(StepKind::kProduct, width_);
      last.tiles = gated.out_tiles;
      last.matrix = down;
      last.out = Place(width_);
    } else {
      Phase({gated});
      last = Product(Input(gated.out, inner_, Norm()), down, width_);
    }
    last.other = project.out;
    Phase({last});
    Step store = Make(StepKind::kStore, width_);
    store.in = last.out;
    store.result = result.data();
    Phase({store});
    program_.num_rows = num_rows_;
    program_.num_positions = num_positions_;
    program_.is_tiled = is_tiled_;
    program_.phase_begin.push_back(static_cast<int64_t>(program_.steps.size()));
    RunProgram(program_);

    for (int64_t m = 0; m < num_rows_; ++m) {
      double most = 1;
      for (double y : wanted[m]) most = std::max(most, std::abs(y));
      for (int64_t i = 0; i < width_; ++i) {
        ExpectNear(result.Get(m * width_ + i), wanted[m][i], most * (is_tiled_ ? 0.06 : 1e-4), "result", m, i);
      }
    }
  }

 private:
  Array& Filled(int64_t size, DType dtype) {
    arrays_.emplace_back(random_, dtype, size);
    arrays_.back().FillRandom(random_);
    return arrays_.back();
  }

  Matrix Weight(int64_t out_features, int64_t in_features) {
    Matrix w;
    w.in_features = in_features;
    w.out_features = out_features;
    w.dtype = weight_dtype_;
    Array& values = Filled(out_features * in_features, weight_dtype_);
    for (int64_t i = 0; i < values.size(); ++i) values.Set(i, random_.Value() / 16);
    w.data = values.data();
    if (random_.Chance(2)) w.bias = {Filled(out_features, weight_dtype_).data(), weight_dtype_};
    return w;
  }

  // Memory of its own for what a step writes, of whose contents nothing is known.
  Rows Place(int64_t width, bool is_dense = false) {
    const int64_t stride = width + (is_dense ? 0 : random_.Integer(0, 3));
    arrays_.emplace_back(random_, DType::kFloat32, num_rows_ * stride);
    arrays_.back().Fill(NAN);
    return {static_cast<float*>(arrays_.back().data()), stride};
  }

  Bfloat16* Tiles(int64_t width) {
    arrays_.emplace_back(random_, DType::kFloat32, TileFloats(num_rows_, width));
    arrays_.back().Fill(NAN);
    return static_cast<Bfloat16*>(arrays_.back().data());
  }

  static Step Make(StepKind kind, int64_t width) {
    Step step;
    step.kind = kind;
    step.width = width;
    return step;
  }

  // A product's input: as it is and to be normed, or rounded in a phase of its own.
  Step Input(Rows x, int64_t width, const Norm& norm) {
    Step step = Make(StepKind::kRound, width);
    step.in = x;
    step.norm = norm;
    if (is_tiled_) {
      step.tiles = Tiles(width);
      Phase({step});
    }
    ++num_inputs_;
    return step;
  }

  Step Product(const Step& input, const Matrix& matrix, int64_t width) {
    Step step = Make(StepKind::kProduct, width);
    if (is_tiled_) {
      step.tiles = input.tiles;
    } else {
      step.in = input.in;
      step.norm = input.norm;
    }
    step.prepared = num_inputs_;
    step.matrix = matrix;
    step.out = Place(width);
    return step;
  }

  void Phase(const std::vector<Step>& steps) {
    program_.phase_begin.push_back(static_cast<int64_t>(program_.steps.size()));
    program_.steps.insert(program_.steps.end(), steps.begin(), steps.end());
  }

  Numbers2 Multiply(const Numbers2& x, const Matrix& w) const {
    Numbers2 y(x.size(), std::vector<double>(w.out_features));
    for (size_t m = 0; m < x.size(); ++m) {
      for (int64_t o = 0; o < w.out_features; ++o) {
        double sum = w.bias.data ? GetNumber(w.bias.dtype, w.bias.data, o) : 0;
        for (int64_t i = 0; i < w.in_features; ++i) sum += x[m][i] * GetNumber(w.dtype, w.data, o * w.in_features + i);
        y[m][o] = sum;
      }
    }
    return y;
  }

  static Numbers2 Normed(const Numbers2& x, const Norm& norm) {
    Numbers2 y = x;
    for (std::vector<double>& row : y) {
      double mean = 0, square = 0;
      const double count = static_cast<double>(row.size());
      for (double v : row) mean += v / count;
      if (norm.kind == NormKind::kRms) mean = 0;
      for (double v : row) square += (v - mean) * (v - mean) / count;
      for (size_t i = 0; i < row.size(); ++i) {
        row[i] = (row[i] - mean) / std::sqrt(square + norm.eps) * GetNumber(norm.weight.dtype, norm.weight.data, static_cast<int64_t>(i));
      }
    }
    return y;
  }

  // By the ops' formulas; attention by the op of that name, which has a test of its own, with copies of the caches.
  Numbers2 Wanted(const Array& input, const Norm& norm, const std::vector<Matrix>& w, AttentionArgs attention, const Array& k_cache,
                  const Array& v_cache) {
    Numbers2 x(num_rows_, std::vector<double>(width_));
    for (int64_t i = 0; i < num_rows_ * width_; ++i) x[i / width_][i % width_] = input.Get(i);
    const Numbers2 normed = Normed(x, norm);
    std::vector<float> floats[3], caches[2], out(num_rows_ * num_heads_ * head_dim_);
    for (int i = 0; i < 3; ++i) {
      for (const std::vector<double>& row : Multiply(normed, w[i])) floats[i].insert(floats[i].end(), row.begin(), row.end());
    }
    caches[0].assign(k_cache.floats(), k_cache.floats() + k_cache.size());
    caches[1].assign(v_cache.floats(), v_cache.floats() + v_cache.size());
    attention.query = floats[0].data();
    attention.key = floats[1].data();
    attention.value = floats[2].data();
    attention.k_cache = caches[0].data();
    attention.v_cache = caches[1].data();
    attention.out = out.data();
    Attention(attention);
    const int64_t heads = num_heads_ * head_dim_;
    Numbers2 attended(num_rows_, std::vector<double>(heads));
    for (size_t i = 0; i < out.size(); ++i) attended[i / heads][i % heads] = out[i];
    Numbers2 y = Multiply(attended, w[3]);
    for (int64_t m = 0; m < num_rows_; ++m) {
      for (int64_t i = 0; i < width_; ++i) y[m][i] += x[m][i];
    }
    const Numbers2 again = Normed(y, norm), up = Multiply(again, w[5]);
    Numbers2 gated = Multiply(again, w[4]);
    for (int64_t m = 0; m < num_rows_; ++m) {
      for (int64_t i = 0; i < inner_; ++i) gated[m][i] *= up[m][i] / (1 + std::exp(-gated[m][i]));
    }
    const Numbers2 last = Multiply(gated, w[6]);
    for (int64_t m = 0; m < num_rows_; ++m) {
      for (int64_t i = 0; i < width_; ++i) y[m][i] += last[m][i];
    }
    return y;
  }

  Random& random_;
  std::deque<Array> arrays_;  // stay where they are
  Program program_;
  bool is_tiled_;
  int64_t batch_size_, num_positions_, num_rows_, width_, num_kv_heads_, num_heads_, head_dim_, inner_, cache_size_;
  int64_t num_inputs_ = 0;
  DType weight_dtype_;
  std::vector<int32_t> num_tokens_, cache_len_;
};

}  // namespace

POPTRANSFORMER_TEST(StepProgram) { Block(random).Run(); }

}  // namespace testing
}  // namespace poptransformer
