// A pass of chosen graphs with one feature through the branches, forward and backward: Pass for what line.inl explains.
//
// The intervals are found from kink to kink: with those of one layer known, the units of the next are affine between
// two neighbours, where a change of sign is one more kink.
#pragma once

#include <cmath>
#include <limits>

#include "pass.h"

namespace spin_fast {

template <class T>
class LinePass {
 public:
  // Whether so many entries are worth the search for intervals, of which there are usually about as many as units.
  static bool pays(const Model& model, const Segments& seg, const int64_t* ids, int64_t graphs) {
    if (model.features != 1) return false;
    int64_t units = 1, entries = 0;
    for (const int64_t width : model.widths) units += width;
    for (int64_t i = 0; i < graphs; ++i)
      for (int64_t b = 0; b < model.branches; ++b) {
        const int64_t g = ids ? ids[i] : i;
        entries += first_entry(seg, b, g + 1) - first_entry(seg, b, g);
      }
    return entries > entries_per_unit * units * model.branches;
  }

  LinePass(Workspace& workspace, const Model& model, const T* x, const T* parameters, const Segments& seg,
           const int64_t* ids, int64_t graphs, bool backward)
      : workspace_(workspace), model_(model), seg_(seg), ids_(ids), graphs_(graphs), backward_(backward), x_(x) {
    for (int64_t b = 0; b < model.branches; ++b) packed_.emplace_back(workspace.arena, model, b, parameters, false);
    if (backward) total_.resize(model.branches * packed_[0].mlp.gradient_size);
    branches_.resize(model.branches);
    workspace.branch_arenas.resize(model.branches);
    int64_t chunks = 0;
    for (; take(); ++chunks)
      for (Of& of : branches_)
        for (int64_t e = 0; e < of.ptr.back(); ++e) {
          usable_ &= std::abs(of.x[e]) <= 1 / std::numeric_limits<T>::min();  // of whose inverse nothing is lost
          of.low = std::min(of.low, of.x[e]);
          of.high = std::max(of.high, of.x[e]);
        }
    taken_ = chunks == 1;
    begin_ = 0;
    if (!taken_) end_ = 0;
    if (!usable_) return;
    parallel_tasks(model.branches, tiny_, [&](int64_t b) { find_intervals(b); });
    for (const Of& of : branches_) usable_ = usable_ && of.usable;
  }
  LinePass(const LinePass&) = delete;
  LinePass& operator=(const LinePass&) = delete;

  // False where a product of all ends would carry what is not finite from graph to graph, be it a feature, z or a
  // logit, and where there are so many intervals that Pass is faster.
  bool usable() const { return usable_; }

  int64_t begin() const { return begin_; }
  int64_t end() const { return end_; }

  bool next() {
    if (!std::exchange(taken_, false) && !take()) return false;
    Arena& arena = workspace_.arena;
    const int64_t stride = packed_[0].mlp.layers.back().stride;
    const int64_t graphs = padded_to(row_multiple, std::min(graphs_, most_graphs));
    for (Of& of : branches_) {
      Line<T>& line = of.line;
      const int64_t entries = of.ptr.back();
      if (entries > of.prepared) {
        of.prepared = entries + entries / 4;
        line.interval = arena.take<int32_t>(of.prepared);
        line.t = arena.take<T>(of.prepared);
        line.weight = arena.take<T>(of.prepared);
      }
      if (!line.share) {
        line.scale = arena.take<T>(graphs);
        line.share = arena.take<T>(graphs * 2 * line.ends);
        line.ds = arena.take<T>(backward_ ? graphs * stride : 0);
      }
      line.graphs = end_ - begin_;
      line.ptr = of.ptr.data();
      line.count = of.count;
      line.x = of.x;
    }
    return true;
  }

  void forward(T* readout, int64_t stride) {
    const auto kernels = isa_kernels<BranchKernels<T>>();
    for (int64_t b = 0; b < model_.branches; ++b) {
      branches_[b].line.readout = readout + b * model_.width();
      branches_[b].line.readout_stride = stride;
    }
    for_each_group([&](int64_t b, int64_t, int64_t begin, int64_t end) {
      const Line<T>& line = branches_[b].line;
      kernels.line_readout(line, reinterpret_cast<double*>(thread_scratch(2 * line.ends * 8)), begin, end);
    });
  }

  void backward(const T* grad) {
    const auto kernels = isa_kernels<BranchKernels<T>>();
    const int64_t groups = (end_ - begin_ + group - 1) / group;
    for (Of& of : branches_) of.dlogit.resize(model_.attention ? groups * 2 * of.line.ends : 0);
    for_each_group([&](int64_t b, int64_t i, int64_t begin, int64_t end) {
      Of& of = branches_[b];
      T* at_ends = reinterpret_cast<T*>(thread_scratch(group * 2 * of.line.ends * static_cast<int64_t>(sizeof(T))));
      kernels.line_readout_backward(of.line, grad + b * model_.width(), at_ends,
                                    of.dlogit.data() + i * 2 * of.line.ends, begin, end);
    });
    parallel_tasks(model_.branches, tiny_, [&](int64_t b) { add_gradients(b, groups); });
  }

  void write_gradient(T* gradient) const {
    for (int64_t b = 0; b < model_.branches; ++b)
      packed_[b].unpack(model_, b, total_.data() + b * packed_[0].mlp.gradient_size, gradient);
  }

 private:
  static constexpr int64_t entries_per_unit = 4;
  static constexpr size_t kinks_per_unit = 4;  // at most: one or less is usual
  static constexpr int64_t group = 16;         // graphs that are one task
  static constexpr int64_t tiny_entries = 1 << 13;
  static constexpr int64_t most_graphs = 256, most_entries = 1 << 18;

  // What is kept of a branch.
  struct Of {
    Line<T> line{};
    T low = std::numeric_limits<T>::infinity(), high = -low;
    bool usable = true;
    std::vector<int64_t> ptr;
    T *x = nullptr, *count = nullptr;
    int64_t room = 0, prepared = 0;  // entries: of x and count, and of what comes from them
    std::vector<T> kinks;
    T* ends_x = nullptr;                  // [2 * ends, row_multiple]
    T* activations[3][most_layers] = {};  // in the middles, at the left and at the right ends
    std::vector<double> dlogit;
  };

  // Takes the next graphs and gathers their features; false where there are none left.
  bool take() {
    begin_ = end_;
    if (begin_ == graphs_) return false;
    int64_t entries = 0;
    do {
      entries += entries_of(end_);
      ++end_;
    } while (end_ < graphs_ && end_ - begin_ < most_graphs && entries + entries_of(end_) <= most_entries);
    tiny_ = entries < tiny_entries;
    for (int64_t b = 0; b < model_.branches; ++b) {
      Of& of = branches_[b];
      of.ptr.assign(1, 0);
      for (int64_t i = begin_; i < end_; ++i) {
        const int64_t first = first_entry(seg_, b, graph_of(i));
        of.ptr.push_back(of.ptr.back() + first_entry(seg_, b, graph_of(i) + 1) - first);
      }
      if (of.ptr.back() > of.room) {
        of.room = of.ptr.back() + of.ptr.back() / 4;
        of.x = workspace_.arena.take<T>(of.room);
        if (seg_.count) of.count = workspace_.arena.take<T>(of.room);
      }
    }
    for_each_group([&](int64_t b, int64_t, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (i + ahead < end) prefetch_entries(seg_, b, graph_of(begin_ + i + ahead));
        const int64_t first = first_entry(seg_, b, graph_of(begin_ + i));
        T* to = branches_[b].x + branches_[b].ptr[i];
        const int64_t n = branches_[b].ptr[i + 1] - branches_[b].ptr[i];
        if (seg_.narrow_index)
          for (int64_t e = 0; e < n; ++e) to[e] = x_[seg_.narrow_index[first + e]];
        else if (seg_.wide_index)
          for (int64_t e = 0; e < n; ++e) to[e] = x_[seg_.wide_index[first + e]];
        else
          std::copy_n(x_ + first, n, to);
        T* count = branches_[b].count + branches_[b].ptr[i];
        for (int64_t e = 0; e < (seg_.count ? n : 0); ++e) count[e] = static_cast<T>(seg_.count[first + e]);
      }
    });
    return true;
  }

  // f(branch, number of the group, first graph, end) of the chunk.
  template <class F>
  void for_each_group(F f) {
    const int64_t graphs = end_ - begin_, groups = (graphs + group - 1) / group;
    parallel_tasks(model_.branches * groups, tiny_, [&](int64_t task) {
      const int64_t b = task / groups, i = task % groups;
      f(b, i, i * group, std::min(graphs, (i + 1) * group));
    });
  }

  // Adds to the kinks those of the units [units] whose values at the kinks are given.
  static void refine(std::vector<T>& kinks, const T* values, int64_t stride, int64_t units) {
    std::vector<T> all, here;
    for (size_t i = 0; i + 1 < kinks.size(); ++i) {
      const T *one = values + static_cast<int64_t>(i) * stride, *other = one + stride;
      here.clear();
      for (int64_t j = 0; j < units; ++j) {
        if (!((one[j] < 0 && other[j] > 0) || (one[j] > 0 && other[j] < 0))) continue;
        const double share = one[j] / (static_cast<double>(one[j]) - other[j]);
        const auto kink = static_cast<T>(kinks[i] + share * (static_cast<double>(kinks[i + 1]) - kinks[i]));
        if (kink > kinks[i] && kink < kinks[i + 1]) here.push_back(kink);
      }
      std::sort(here.begin(), here.end());
      all.push_back(kinks[i]);
      for (const T kink : here)
        if (kink > all.back()) all.push_back(kink);
    }
    all.push_back(kinks.back());
    kinks.swap(all);
  }

  // Values of the first layers, the last of them without its LeakyReLU, at the kinks.
  const T* at_kinks(Arena& arena, const Of& of, const Mlp<T>& mlp, int64_t depth) const {
    Layer<T> layers[most_layers];
    std::copy_n(mlp.layers, depth, layers);
    layers[depth - 1].slope = 1;
    const int64_t points = padded_to(row_multiple, static_cast<int64_t>(of.kinks.size()));
    T* x = arena.take<T>(points * row_multiple);
    for (int64_t i = 0; i < points; ++i)
      x[i * row_multiple] = of.kinks[std::min<int64_t>(i, static_cast<int64_t>(of.kinks.size()) - 1)];
    T* activations[most_layers];
    for (int64_t l = 0; l < depth; ++l) activations[l] = arena.take<T>(points * layers[l].stride);
    isa_kernels<BranchKernels<T>>().mlp_forward({depth, layers}, x, row_multiple, points, activations, nullptr);
    return activations[depth - 1];
  }

  T logit(const Of& of, const T* w, const T* z) const {
    T sum = 0;
    for (int64_t j = 0; j < of.line.mlp.layers[of.line.mlp.depth - 1].stride; ++j) sum += w[j] * z[j];
    return sum;
  }

  void find_intervals(int64_t b) {
    Of& of = branches_[b];
    Line<T>& line = of.line;
    Arena& arena = workspace_.branch_arenas[b];
    arena.clear();
    line.mlp = packed_[b].mlp.mlp();
    line.w = packed_[b].w;
    const Mlp<T>& mlp = line.mlp;
    const int64_t stride = mlp.layers[mlp.depth - 1].stride;
    if (of.low > of.high) of.low = of.high = 0;
    of.kinks = {of.low};
    if (of.low < 0 && of.high > 0) of.kinks.push_back(0);
    if (of.low < of.high) of.kinks.push_back(of.high);
    size_t units = 1;
    for (int64_t depth = 1; depth <= mlp.depth; ++depth) {
      units += mlp.layers[depth - 1].out;
      refine(of.kinks, at_kinks(arena, of, mlp, depth), mlp.layers[depth - 1].stride, mlp.layers[depth - 1].out);
      if (of.kinks.size() > kinks_per_unit * units) of.usable = false;
      if (!of.usable) return;
    }
    if (line.w) {
      const T* z = at_kinks(arena, of, mlp, mlp.depth);
      std::vector<T> logits(of.kinks.size());
      const T slope = mlp.layers[mlp.depth - 1].slope;
      for (size_t i = 0; i < logits.size(); ++i)
        for (int64_t j = 0; j < stride; ++j) {
          const T value = z[i * stride + j];
          logits[i] += line.w[j] * (value > 0 ? value : slope * value);
        }
      refine(of.kinks, logits.data(), 1, 1);
    }
    place_intervals(arena, of);
    evaluate_ends(arena, of);
  }

  // From the kinks. 0 is an interval of one point, for units without a bias have their kink exactly there, where the
  // gates of neither neighbour hold; positive denormals count as 0.
  void place_intervals(Arena& arena, Of& of) {
    Line<T>& line = of.line;
    const int64_t number = static_cast<int64_t>(of.kinks.size()) + 1;
    line.ends = padded_to(column_multiple, number);
    line.blocks = padded_to(column_multiple, line.ends / column_multiple);
    T *start = arena.take<T>(line.ends), *coarse = arena.take<T>(line.blocks);
    T* x = of.ends_x = arena.take<T>(2 * line.ends * row_multiple);
    int64_t n = 0;
    const auto add = [&](T from, T left, T right) {
      start[n] = from;
      x[n * row_multiple] = left;
      x[(line.ends + n) * row_multiple] = right;
      ++n;
    };
    for (size_t i = 0; i < of.kinks.size(); ++i) {
      const T left = of.kinks[i];
      const bool more = i + 1 < of.kinks.size();
      if (left == 0 || !more) add(left, left, left);
      if (more) add(left == 0 ? std::numeric_limits<T>::min() : left, left, of.kinks[i + 1]);
    }
    start[0] = -std::numeric_limits<T>::infinity();
    while (n < line.ends) add(std::numeric_limits<T>::infinity(), of.kinks.back(), of.kinks.back());
    for (int64_t i = 0; i < line.blocks; ++i)
      coarse[i] = i * column_multiple < line.ends ? start[i * column_multiple] : std::numeric_limits<T>::infinity();
    line.start = start;
    line.coarse = coarse;
  }

  void evaluate_ends(Arena& arena, Of& of) {
    const auto kernels = isa_kernels<BranchKernels<T>>();
    Line<T>& line = of.line;
    const Mlp<T>& mlp = line.mlp;
    const int64_t ends = line.ends, stride = mlp.layers[mlp.depth - 1].stride;
    T* middles = arena.take<T>(ends * row_multiple);
    const T *left = of.ends_x, *right = left + ends * row_multiple;
    for (int64_t i = 0; i < ends * row_multiple; i += row_multiple) middles[i] = left[i] + (right[i] - left[i]) / 2;
    for (int64_t l = 0; l < mlp.depth; ++l) {
      const int64_t size = ends * mlp.layers[l].stride;
      of.activations[0][l] = arena.take<T>(size);
      of.activations[1][l] = arena.take<T>(2 * size);
      of.activations[2][l] = of.activations[1][l] + size;
    }
    kernels.mlp_forward(mlp, middles, row_multiple, ends, of.activations[0], nullptr);
    kernels.mlp_forward(mlp, left, row_multiple, ends, of.activations[1], of.activations[0]);
    kernels.mlp_forward(mlp, right, row_multiple, ends, of.activations[2], of.activations[0]);
    line.gate = of.activations[0][mlp.depth - 1];
    line.z = of.activations[1][mlp.depth - 1];
    for (int64_t i = 0; i < 2 * ends * stride; ++i) of.usable = of.usable && std::isfinite(line.z[i]);
    Interval<T>* intervals = arena.take<Interval<T>>(ends);
    for (int64_t i = 0; i < ends; ++i) {
      const T width = right[i * row_multiple] - left[i * row_multiple];
      Interval<T>& interval = intervals[i] = {left[i * row_multiple], 0, 0, 0};
      if (width >= std::numeric_limits<T>::min()) interval.inverse = 1 / width;
      if (!line.w) continue;
      const T middle = logit(of, line.w, line.gate + i * stride), beta = logit(of, line.w, line.z + i * stride);
      const T rise = logit(of, line.w, line.z + (ends + i) * stride) - beta;
      of.usable = of.usable && std::isfinite(middle) && std::isfinite(beta) && std::isfinite(rise);
      if (middle > 0) interval.beta = beta, interval.rise = rise;
    }
    line.intervals = intervals;
    if (!backward_ || !line.w) return;
    T* transposed = arena.take<T>(stride * 2 * ends);
    for (int64_t i = 0; i < 2 * ends; ++i)
      for (int64_t j = 0; j < stride; ++j) transposed[j * 2 * ends + i] = line.z[i * stride + j];
    line.transposed = transposed;
  }

  void add_gradients(int64_t b, int64_t groups) {
    const auto kernels = isa_kernels<BranchKernels<T>>();
    Of& of = branches_[b];
    Line<T>& line = of.line;
    const Packed<T>& packed = packed_[b].mlp;
    const int64_t size = packed.gradient_size, depth = line.mlp.depth, ends = line.ends;
    for (int64_t i = 1; i < (line.w ? groups : 0); ++i)
      for (int64_t k = 0; k < 2 * ends; ++k) of.dlogit[k] += of.dlogit[i * 2 * ends + k];
    const int64_t block = ends * packed.widest;
    T* memory = reinterpret_cast<T*>(thread_scratch((size + 4 * block) * static_cast<int64_t>(sizeof(T))));
    T *dz = memory, *first = dz + 2 * block, *second = first + block, *gradients = second + block;
    std::memset(gradients, 0, size * sizeof(T));
    T* gradient[most_layers];
    for (int64_t l = 0; l < depth; ++l) gradient[l] = gradients + packed.places[l].gradient;
    kernels.line_backward(line, of.dlogit.data(), dz, gradients + packed_[b].w_gradient);
    for (int64_t side = 0; side < 2; ++side)
      kernels.mlp_backward(line.mlp, of.ends_x + side * ends * row_multiple, row_multiple, ends,
                           of.activations[1 + side], of.activations[0],
                           dz + side * ends * line.mlp.layers[depth - 1].stride, first, second, gradient, nullptr);
    double* total = total_.data() + b * size;
    for (int64_t i = 0; i < size; ++i) total[i] += static_cast<double>(gradients[i]);
  }

  int64_t graph_of(int64_t i) const { return ids_ ? ids_[i] : i; }

  int64_t entries_of(int64_t i) const {
    int64_t entries = 0;
    for (int64_t b = 0; b < model_.branches; ++b)
      entries += first_entry(seg_, b, graph_of(i) + 1) - first_entry(seg_, b, graph_of(i));
    return entries;
  }

  Workspace& workspace_;
  const Model& model_;
  const Segments& seg_;
  const int64_t* ids_;
  int64_t graphs_;
  bool backward_;
  const T* x_;
  bool usable_ = true;
  bool tiny_ = true;    // the chunk is not worth a second thread
  bool taken_ = false;  // the features of the next chunk are gathered already
  int64_t begin_ = 0, end_ = 0;
  std::vector<PackedBranch<T>> packed_;
  std::vector<Of> branches_;
  std::vector<double> total_;
};

}  // namespace spin_fast
