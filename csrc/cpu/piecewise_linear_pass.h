// A pass of chosen graphs with one feature through the branches, forward and backward: Pass for what
// piecewise_linear.inl explains.
//
// The intervals are found layer by layer: on those of one layer the units of the next are affine, and each is cut where
// a unit changes its sign, at a kink.
#pragma once

#include <cmath>
#include <limits>

#include "branch_pass.h"

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
          usable_ &= std::abs(of.x[e]) <= std::numeric_limits<T>::max();
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

  // False if a feature, an offset or a slope is not finite, since the products over all intervals would carry it from
  // graph to graph, and if there are so many intervals that Pass is faster.
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
        line.weight = arena.take<T>(of.prepared);
      }
      if (!line.moments) {
        line.scale = arena.take<T>(graphs);
        line.moments = arena.take<T>(graphs * 2 * line.intervals);
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
      kernels.line_readout(line, reinterpret_cast<double*>(thread_scratch(2 * line.intervals * 8)), begin, end);
    });
  }

  void backward(const T* grad) {
    const auto kernels = isa_kernels<BranchKernels<T>>();
    const int64_t groups = (end_ - begin_ + group - 1) / group;
    for (Of& of : branches_) of.dlogit.resize(model_.attention ? groups * 2 * of.line.intervals : 0);
    for_each_group([&](int64_t b, int64_t i, int64_t begin, int64_t end) {
      Of& of = branches_[b];
      const int64_t size = 2 * of.line.intervals;
      T* products = reinterpret_cast<T*>(thread_scratch(group * size * static_cast<int64_t>(sizeof(T))));
      kernels.line_readout_backward(of.line, grad + b * model_.width(), products, of.dlogit.data() + i * size, begin,
                                    end);
    });
    parallel_tasks(model_.branches, tiny_, [&](int64_t b) { add_gradients(b, groups); });
  }

  void write_gradient(T* gradient) const {
    for (int64_t b = 0; b < model_.branches; ++b)
      packed_[b].unpack(model_, b, total_.data() + b * packed_[0].mlp.gradient_size, gradient);
  }

 private:
  static constexpr int64_t entries_per_unit = 4;
  static constexpr int64_t kinks_per_unit = 4;  // at most: one or less is usual
  static constexpr int64_t group = 16;          // graphs that are one task
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
    // Of x itself, then of the units of each layer: [2 * intervals, stride] as in Line::z, and [intervals, stride].
    T *values[most_layers + 1] = {}, *middles[most_layers + 1] = {};
    std::vector<double> dlogit;
  };

  // Ascending intervals on which some units are affine functions of x.
  struct Units {
    int64_t stride = 0;
    std::vector<T> left{}, right{};                            // of each interval
    std::vector<int64_t> below{};                              // the interval of the units below that it is part of
    T *offset = nullptr, *slope = nullptr, *middle = nullptr;  // [padded intervals, stride]; the values in the middles

    int64_t size() const { return static_cast<int64_t>(left.size()); }
    void add(T from, T to, int64_t part_of) {
      left.push_back(from);
      right.push_back(to);
      below.push_back(part_of);
    }
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

  // The feature itself, from the lowest to the highest. 0 is an interval of one point, for units without a bias have
  // their kink exactly there, where the gates of neither neighbour hold.
  Units feature(Arena& arena, T low, T high) const {
    Units x{row_multiple};
    if (low > high) low = high = 0;
    if (low < 0) x.add(low, std::min<T>(high, 0), 0);
    if (low <= 0 && high >= 0) x.add(0, 0, 0);
    if (high > 0) x.add(std::max<T>(low, 0), high, 0);
    constexpr int64_t size = row_multiple * row_multiple;
    x.offset = std::fill_n(arena.take<T>(size), size, T{0}) - size;
    x.slope = std::fill_n(arena.take<T>(size), size, T{1}) - size;
    return x;
  }

  // Units after their LeakyReLU, from their offsets and slopes before it on the intervals of those below: each interval
  // is cut where a unit changes its sign.
  Units cut(Arena& arena, const Units& below, const T* offset, const T* slope, int64_t width, int64_t stride,
            T negative_slope) const {
    Units units{stride};
    std::vector<T> kinks;
    for (int64_t i = 0; i < below.size(); ++i) {
      const T left = below.left[i], right = below.right[i];
      kinks.assign(1, left);
      for (int64_t j = i * stride; j < i * stride + width; ++j) {
        const T at_left = offset[j] + left * slope[j], at_right = offset[j] + right * slope[j];
        if (!((at_left < 0 && at_right > 0) || (at_left > 0 && at_right < 0))) continue;
        const T kink = -offset[j] / slope[j];
        if (kink > left && kink < right) kinks.push_back(kink);
      }
      std::sort(kinks.begin(), kinks.end());
      kinks.erase(std::unique(kinks.begin(), kinks.end()), kinks.end());
      for (size_t k = 0; k < kinks.size(); ++k) units.add(kinks[k], k + 1 < kinks.size() ? kinks[k + 1] : right, i);
    }
    const int64_t size = padded_to(row_multiple, units.size()) * stride;
    for (T** array : {&units.offset, &units.slope, &units.middle}) *array = arena.take<T>(size);
    for (int64_t i = 0; i < units.size(); ++i) {
      const T *from = offset + units.below[i] * stride, *rise = slope + units.below[i] * stride;
      const T x = units.left[i] / 2 + units.right[i] / 2;
      for (int64_t j = 0; j < stride; ++j) {
        const T middle = from[j] + x * rise[j], factor = middle > 0 ? 1 : negative_slope;
        units.middle[i * stride + j] = middle;
        units.offset[i * stride + j] = factor * from[j];
        units.slope[i * stride + j] = factor * rise[j];
      }
    }
    return units;
  }

  void find_intervals(int64_t b) {
    const auto kernels = isa_kernels<BranchKernels<T>>();
    Of& of = branches_[b];
    Line<T>& line = of.line;
    Arena& arena = workspace_.branch_arenas[b];
    arena.clear();
    line.mlp = packed_[b].mlp.mlp();
    line.w = packed_[b].w;
    std::vector<Units> layers = {feature(arena, of.low, of.high)};
    int64_t most = kinks_per_unit;
    for (int64_t l = 0; l < line.mlp.depth; ++l) {
      const Units& below = layers.back();
      Layer<T> layer = line.mlp.layers[l];
      const int64_t size = padded_to(row_multiple, below.size()) * layer.stride;
      T *offset = arena.take<T>(size), *slope = arena.take<T>(size);
      layer.slope = 1;
      kernels.mlp_forward({1, &layer}, below.offset, below.stride, below.size(), &offset, nullptr);
      layer.bias = nullptr;
      kernels.mlp_forward({1, &layer}, below.slope, below.stride, below.size(), &slope, nullptr);
      layers.push_back(cut(arena, below, offset, slope, layer.out, layer.stride, line.mlp.layers[l].slope));
      most += kinks_per_unit * layer.out;
      of.usable = layers.back().size() <= most;
      if (!of.usable) return;
    }
    if (line.w) {
      const Units& z = layers.back();
      std::vector<T> offset(z.size()), slope(z.size());
      for (int64_t i = 0; i < z.size(); ++i)
        for (int64_t j = 0; j < z.stride; ++j) {
          offset[i] += line.w[j] * z.offset[i * z.stride + j];
          slope[i] += line.w[j] * z.slope[i * z.stride + j];
        }
      layers.push_back(cut(arena, z, offset.data(), slope.data(), 1, 1, 0));
    }
    lay_out(arena, of, layers);
  }

  // The arrays of the kernels on the intervals of the last units. Positive denormals count as 0.
  void lay_out(Arena& arena, Of& of, const std::vector<Units>& layers) const {
    constexpr T infinity = std::numeric_limits<T>::infinity();
    Line<T>& line = of.line;
    const Units& last = layers.back();
    const int64_t number = last.size(), depth = line.mlp.depth, intervals = padded_to(column_multiple, number);
    line.intervals = intervals;
    line.blocks = padded_to(column_multiple, intervals / column_multiple);
    T *start = arena.take<T>(intervals), *coarse = arena.take<T>(line.blocks);
    Affine<T>* beta = arena.take<Affine<T>>(intervals);
    std::fill_n(start, intervals, infinity);
    std::fill_n(coarse, line.blocks, infinity);
    std::fill_n(beta, intervals, Affine<T>{});
    std::vector<int64_t> row(number);
    for (int64_t i = 0; i < number; ++i) {
      const bool after_zero = last.left[i] == 0 && last.right[i] > 0;
      start[i] = i == 0 ? -infinity : after_zero ? std::numeric_limits<T>::min() : last.left[i];
      if (i % column_multiple == 0) coarse[i / column_multiple] = start[i];
      if (line.w) beta[i] = {last.offset[i], last.slope[i]};
      of.usable = of.usable && std::isfinite(beta[i].offset) && std::isfinite(beta[i].slope);
      row[i] = line.w ? last.below[i] : i;
    }
    for (int64_t l = depth; l >= (backward_ ? 0 : depth); --l) {
      const Units& units = layers[l];
      const int64_t stride = units.stride, size = intervals * stride;
      of.values[l] = arena.take<T>(2 * size);
      of.middles[l] = arena.take<T>(size);
      const auto copy = [&](const T* from, T* to) {
        std::fill_n(to, size, T{0});
        for (int64_t i = 0; from && i < number; ++i) std::copy_n(from + row[i] * stride, stride, to + i * stride);
      };
      copy(units.offset, of.values[l]);
      copy(units.slope, of.values[l] + size);
      copy(units.middle, of.middles[l]);
      for (int64_t& i : row) i = units.below[i];
    }
    const int64_t stride = layers[depth].stride;
    line.start = start;
    line.coarse = coarse;
    line.beta = beta;
    line.z = of.values[depth];
    line.gate = of.middles[depth];
    for (int64_t i = 0; i < 2 * intervals * stride; ++i) of.usable = of.usable && std::isfinite(line.z[i]);
    if (!backward_ || !line.w) return;
    T* transposed = arena.take<T>(stride * 2 * intervals);
    for (int64_t i = 0; i < 2 * intervals; ++i)
      for (int64_t j = 0; j < stride; ++j) transposed[j * 2 * intervals + i] = line.z[i * stride + j];
    line.transposed = transposed;
  }

  void add_gradients(int64_t b, int64_t groups) {
    const auto kernels = isa_kernels<BranchKernels<T>>();
    Of& of = branches_[b];
    Line<T>& line = of.line;
    const Packed<T>& packed = packed_[b].mlp;
    const int64_t size = packed.gradient_size, depth = line.mlp.depth, intervals = line.intervals;
    for (int64_t i = 1; i < (line.w ? groups : 0); ++i)
      for (int64_t k = 0; k < 2 * intervals; ++k) of.dlogit[k] += of.dlogit[i * 2 * intervals + k];
    const int64_t tile = intervals * packed.widest;
    T* memory = reinterpret_cast<T*>(thread_scratch((size + 4 * tile) * static_cast<int64_t>(sizeof(T))));
    T *dz = memory, *first = dz + 2 * tile, *second = first + tile, *gradients = second + tile;
    std::memset(gradients, 0, size * sizeof(T));
    T* gradient[most_layers];
    for (int64_t l = 0; l < depth; ++l) gradient[l] = gradients + packed.places[l].gradient;
    kernels.line_backward(line, of.dlogit.data(), dz, gradients + packed_[b].w_gradient);
    for (const int64_t side : {1, 0}) {
      const T* values[most_layers];
      for (int64_t l = 0; l < depth; ++l) values[l] = of.values[l + 1] + side * intervals * line.mlp.layers[l].stride;
      kernels.mlp_backward(line.mlp, of.values[0] + side * intervals * row_multiple, row_multiple, intervals, values,
                           of.middles + 1, dz + side * intervals * line.mlp.layers[depth - 1].stride, first, second,
                           gradient, nullptr);
      for (int64_t l = 0; side == 1 && l < depth; ++l)  // no bias enters a slope
        std::fill_n(gradient[l] + padded_to(row_multiple, line.mlp.layers[l].in) * line.mlp.layers[l].stride,
                    line.mlp.layers[l].stride, T{0});
    }
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
