// One pass of chosen graphs with one feature through the branches, forward and backward: see piecewise_linear.inl.
//
// The intervals are found layer by layer: on those of one layer the units of the next are affine before their
// LeakyReLU. Each interval is cut at the kinks, where a unit changes its sign.
#pragma once

#include <cmath>
#include <limits>

#include "branch_pass.h"

namespace spin_fast {

template <class T>
class PiecewiseLinearPass : public PassBase<T> {
  using Base = PassBase<T>;
  using Base::begin_, Base::end_, Base::packed_, Base::total_;
  using Base::workspace_, Base::arguments_, Base::model_, Base::seg_, Base::x_, Base::backward_, Base::threads_;

 public:
  // Whether the entries are so many that the search for intervals, usually about as many as units, pays.
  static bool pays(const Arguments& arguments) {
    const Model& model = arguments.model;
    if (model.features != 1 || arguments.parts.given || arguments.rows.row_begin) return false;
    int64_t units = 1, entries = 0;
    for (const int64_t width : model.widths) units += width;
    for (int64_t i = 0; i < arguments.graphs; ++i) entries += num_entries(arguments, i);
    return entries > units * model.branches;
  }

  PiecewiseLinearPass(Workspace& workspace, const Arguments& arguments, const T* x, const T* parameters, bool backward)
      : Base(workspace, arguments, x, parameters, backward, false) {
    branches_.resize(model_.branches);
    workspace.branch_arenas.resize(model_.branches);
    int64_t chunks = 0;
    for (; take(); ++chunks)
      for (BranchState& state : branches_)
        for (const Range& range : state.ranges) state.range.widen(range);
    for (const BranchState& state : branches_) usable_ &= state.range.finite();
    taken_ = chunks == 1;
    begin_ = 0;
    if (!taken_) end_ = 0;
    if (!usable_) return;
    parallel_branches(model_.branches, 1, threads_, [&](int64_t b, int64_t) { find_intervals(b); });
    for (const BranchState& state : branches_) usable_ = usable_ && state.usable;
  }

  // False if a spread, an offset or a slope might not be finite, since the backward pass of the MLP, over all
  // intervals, would carry it from graph to graph, and if there are so many intervals that BranchPass is faster.
  bool usable() const { return usable_; }

  bool next() {
    if (!std::exchange(taken_, false) && !take()) return false;
    prepare();
    return true;
  }

  void take_to(int64_t end) {
    if (std::exchange(taken_, false)) {
      if (end == end_) return prepare();
      end_ = 0;
    }
    begin_ = end_;
    end_ = end;
    gather();
    prepare();
  }

  void forward(T* readout, int64_t stride) {
    const auto kernels = isa_kernels<BranchKernels<T>>();
    for (int64_t b = 0; b < model_.branches; ++b) {
      branches_[b].chunk.readout = readout + b * model_.width();
      branches_[b].chunk.readout_stride = stride;
    }
    for_each_task([&](int64_t b, int64_t begin, int64_t end) {
      const PiecewiseLinearChunk<T>& chunk = branches_[b].chunk;
      const int64_t sums = 7 * padded_to(column_multiple, chunk.intervals), entries = chunk.ptr[end] - chunk.ptr[begin];
      auto* sum = reinterpret_cast<double*>(thread_scratch(sums * 8 + entries * (4 + sizeof(T))));
      T* weight = reinterpret_cast<T*>(sum + sums);
      kernels.piecewise_linear_readout(chunk, sum, reinterpret_cast<int32_t*>(weight + entries), weight, begin, end);
    });
  }

  void backward(const T* grad) {
    parallel_branches(model_.branches, 1, threads_, [&](int64_t b, int64_t) { add_gradients(b, grad); });
  }

 private:
  static constexpr int64_t kinks_per_unit = 4;                       // at most: one or less is usual
  static constexpr int64_t task_graphs = 16;                         // graphs of one task
  static constexpr int64_t entry_cost = 700, branch_cost = 1 << 20;  // in all loops
  static constexpr int64_t most_graphs = 256, most_entries = 1 << 18;

  // Of values of the feature.
  struct Range {
    T low = std::numeric_limits<T>::infinity(), high = -low;
    T zero = 0;  // unless a value is not finite

    void widen(const Range& other) {
      low = std::min(low, other.low);
      high = std::max(high, other.high);
      zero += other.zero;
    }
    // Whether the squares are, too, by the weight that the entries of a graph have at most. float32 has them in
    // float64.
    bool finite() const {
      constexpr T most_weight = sizeof(T) == 4 ? 1 : 1e40;
      const T most = low > high ? 0 : std::max(-low, high);
      return zero == 0 && std::isfinite(most_weight * most * most);
    }
  };

  // Ascending intervals on which some units are affine functions of x.
  struct Units {
    int64_t stride = 0;
    std::vector<T> left{}, right{};                            // of each interval
    std::vector<int64_t> below{};                              // the interval of the units below that contains it
    T *offset = nullptr, *slope = nullptr, *middle = nullptr;  // [padded intervals, stride]; the values in the middles

    int64_t size() const { return static_cast<int64_t>(left.size()); }
    void reserve(int64_t intervals) {
      left.reserve(intervals);
      right.reserve(intervals);
      below.reserve(intervals);
    }
    void add(T from, T to, int64_t part_of) {
      left.push_back(from);
      right.push_back(to);
      below.push_back(part_of);
    }
  };

  // The state of a branch.
  struct BranchState {
    PiecewiseLinearChunk<T> chunk{};
    Range range;
    std::vector<Range> ranges;  // of the tasks of the chunk
    bool usable = true;
    std::vector<int64_t> ptr;
    T *x = nullptr, *count = nullptr;
    int64_t room = 0, prepared = 0;  // capacities in entries: of x and count, and of the moments
    int64_t graphs = 0;              // capacity in graphs
    std::vector<Units> units;        // of x, of each layer, and with attention of the logit
  };

  // Of some values. Lanes side by side, since each comparison would wait for the one before.
  static Range range_of(const T* x, int64_t n) {
    constexpr int64_t lanes = 16;
    T low[lanes], high[lanes], zero[lanes] = {};
    std::fill_n(low, lanes, Range{}.low);
    std::fill_n(high, lanes, Range{}.high);
    const auto add = [&](T value, int64_t k) {
      low[k] = value < low[k] ? value : low[k];
      high[k] = value > high[k] ? value : high[k];
      zero[k] += value - value;
    };
    int64_t e = 0;
    for (; e + lanes <= n; e += lanes)
      for (int64_t k = 0; k < lanes; ++k) add(x[e + k], k);
    for (; e < n; ++e) add(x[e], 0);
    return {*std::min_element(low, low + lanes), *std::max_element(high, high + lanes),
            std::accumulate(zero, zero + lanes, T{0})};
  }

  // Memory for the selected chunk.
  void prepare() {
    Arena& arena = workspace_.arena;
    for (BranchState& state : branches_) {
      PiecewiseLinearChunk<T>& chunk = state.chunk;
      const int64_t entries = state.ptr.back();
      if (entries > state.prepared) {
        state.prepared = entries + entries / 4;
        chunk.moments = arena.take<Moments<T>>(state.prepared);
      }
      chunk.graphs = end_ - begin_;
      if (chunk.graphs > state.graphs) {
        state.graphs = chunk.graphs;
        chunk.used = arena.take<int32_t>(state.graphs);
      }
      chunk.ptr = state.ptr.data();
      chunk.count = state.count;
      chunk.x = state.x;
    }
  }

  // Selects the next graphs and gathers their features; false if none are left.
  bool take() {
    begin_ = end_;
    if (begin_ == arguments_.graphs) return false;
    int64_t entries = num_entries(arguments_, end_);
    do {
      ++end_;
      entries += end_ < arguments_.graphs ? num_entries(arguments_, end_) : 0;
    } while (end_ < arguments_.graphs && end_ - begin_ < most_graphs && entries <= most_entries);
    gather();
    return true;
  }

  // Gathers the features of the selected graphs.
  void gather() {
    Arena& arena = workspace_.arena;
    int64_t entries = 0;
    for (int64_t b = 0; b < model_.branches; ++b) {
      BranchState& state = branches_[b];
      state.ptr.assign(1, 0);
      for (int64_t i = begin_; i < end_; ++i) {
        const int64_t first = first_entry(seg_, b, graph_of(arguments_, i));
        state.ptr.push_back(state.ptr.back() + first_entry(seg_, b, graph_of(arguments_, i) + 1) - first);
      }
      if (state.ptr.back() > state.room) {
        state.room = state.ptr.back() + state.ptr.back() / 4;
        state.x = arena.take<T>(state.room);
        if (seg_.count) state.count = arena.take<T>(state.room);
      }
      state.ranges.resize((end_ - begin_ + task_graphs - 1) / task_graphs);
      entries += state.ptr.back();
    }
    threads_ = threads_for(entry_cost * entries + branch_cost * model_.branches);
    const auto gather_by = [&](auto index) {
      for_each_task([&](int64_t b, int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) gather(b, i, index);
        BranchState& state = branches_[b];
        state.ranges[begin / task_graphs] = range_of(state.x + state.ptr[begin], state.ptr[end] - state.ptr[begin]);
      });
    };
    if (seg_.narrow_index) return gather_by(seg_.narrow_index);
    if (seg_.wide_index) return gather_by(seg_.wide_index);
    struct Itself {
      int64_t operator[](int64_t entry) const { return entry; }
    };
    gather_by(Itself{});
  }

  // Gathers the features of graph i, while the features of later ones, and before these their entries, are on their
  // way.
  template <class Index>
  void gather(int64_t b, int64_t i, Index index) {
    constexpr int64_t line = cache_line / sizeof(T);
    const int64_t left = end_ - begin_ - i;
    const auto first = [&](int64_t graph) { return first_entry(seg_, b, graph_of(arguments_, begin_ + graph)); };
    const auto entries = [&](int64_t graph) { return branches_[b].ptr[graph + 1] - branches_[b].ptr[graph]; };
    if (left > 2 * ahead) prefetch_entries(seg_, b, graph_of(arguments_, begin_ + i + 2 * ahead));
    if (left > ahead) {  // rows are numbered as they come, so those of a graph are close together
      const int64_t at = first(i + ahead), n = entries(i + ahead);
      for (int64_t e = 0; e < n; e += line) __builtin_prefetch(x_ + index[at + e]);
      if (n) __builtin_prefetch(x_ + index[at + n - 1]);
    }
    const int64_t at = first(i), n = entries(i);
    T* const x = branches_[b].x + branches_[b].ptr[i];
    for (int64_t e = 0; e < n; ++e) x[e] = x_[index[at + e]];
    if (!seg_.count) return;
    T* const count = branches_[b].count + branches_[b].ptr[i];
    for (int64_t e = 0; e < n; ++e) count[e] = static_cast<T>(seg_.count[at + e]);
  }

  // Runs f(branch, first graph, end) over the chunk.
  template <class F>
  void for_each_task(F f) {
    const int64_t graphs = end_ - begin_, tasks = (graphs + task_graphs - 1) / task_graphs;
    parallel_branches(model_.branches, tasks, threads_,
                      [&](int64_t b, int64_t i) { f(b, i * task_graphs, std::min(graphs, (i + 1) * task_graphs)); });
  }

  // The feature itself, from its lowest to its highest value. 0 is an interval of its own, because units without a bias
  // have their kink exactly there, where the gates of neither neighbour hold.
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

  // The units of a layer: cuts each interval of the units below where one of its units changes its sign.
  Units cut(Arena& arena, const Units& below, Layer<T> layer) const {
    const auto kernels = isa_kernels<BranchKernels<T>>();
    const int64_t number = below.size(), size = padded_to(row_multiple, number) * layer.stride;
    const T negative_slope = std::exchange(layer.slope, T{1});
    T *before = arena.take<T>(2 * size), *rise = before + size, *kinks = arena.take<T>(number * layer.out);
    int64_t* const found = arena.take<int64_t>(number);
    kernels.mlp_forward({1, &layer}, below.offset, below.stride, number, &before);
    layer.bias = nullptr;
    kernels.mlp_forward({1, &layer}, below.slope, below.stride, number, &rise);
    const AffineUnits<T> affine = {layer.out,          layer.stride, number, below.left.data(),
                                   below.right.data(), before,       rise};
    kernels.find_kinks(affine, kinks, found);
    Units units{layer.stride};
    units.reserve(number + std::accumulate(found, found + number, int64_t{0}));
    for (int64_t i = 0; i < number; ++i, kinks += layer.out) {
      std::sort(kinks, kinks + found[i]);
      units.add(below.left[i], below.right[i], i);
      for (int64_t k = 0; k < found[i]; ++k)
        if (k == 0 || kinks[k] > kinks[k - 1]) {
          units.right.back() = kinks[k];
          units.add(kinks[k], below.right[i], i);
        }
    }
    T* const middle = arena.take<T>(units.size());
    for (int64_t i = 0; i < units.size(); ++i) middle[i] = units.left[i] / 2 + units.right[i] / 2;
    const int64_t cut_size = padded_to(row_multiple, units.size()) * layer.stride;
    for (T** array : {&units.offset, &units.slope, &units.middle}) *array = arena.take<T>(cut_size);
    kernels.bend(affine, middle, units.below.data(), units.size(), negative_slope, units.offset, units.slope,
                 units.middle);
    return units;
  }

  // The layer of the logit, ReLU(<w, z>).
  Layer<T> logit(Arena& arena, const Layer<T>& last, const T* w) const {
    T* const weight = arena.take<T>(last.out * column_multiple);
    std::fill_n(weight, last.out * column_multiple, T{0});
    for (int64_t j = 0; j < last.out; ++j) weight[j * column_multiple] = w[j];
    return {last.out, 1, last.stride, column_multiple, weight, nullptr, nullptr, 0};
  }

  void find_intervals(int64_t b) {
    BranchState& state = branches_[b];
    PiecewiseLinearChunk<T>& chunk = state.chunk;
    Arena& arena = workspace_.branch_arenas[b];
    arena.clear();
    chunk.mlp = packed_[b].mlp.mlp();
    chunk.w = packed_[b].w;
    chunk.with_spread = backward_ && chunk.w;
    std::vector<Units>& units = state.units;
    units.assign(1, feature(arena, state.range.low, state.range.high));
    int64_t most = kinks_per_unit;
    for (int64_t l = 0; l < chunk.mlp.depth; ++l) {
      const Layer<T>& layer = chunk.mlp.layers[l];
      units.push_back(cut(arena, units.back(), layer));
      most += kinks_per_unit * layer.out;
      state.usable = units.back().size() <= most;
      if (!state.usable) return;
    }
    if (chunk.w)
      units.push_back(cut(arena, units.back(), logit(arena, chunk.mlp.layers[chunk.mlp.depth - 1], chunk.w)));
    lay_out(arena, state);
  }

  // Writes the arrays of the kernels, on the intervals of the last units. Positive denormals count as 0.
  void lay_out(Arena& arena, BranchState& state) const {
    constexpr T infinity = std::numeric_limits<T>::infinity();
    PiecewiseLinearChunk<T>& chunk = state.chunk;
    const Units &last = state.units.back(), &units = state.units[chunk.mlp.depth];
    const int64_t number = last.size(), intervals = padded_to(row_multiple, number);
    const int64_t starts = padded_to(column_multiple, number), stride = units.stride, size = intervals * stride;
    chunk.intervals = intervals;
    chunk.spans = padded_to(column_multiple, starts / column_multiple);
    T *start = arena.take<T>(starts), *coarse = arena.take<T>(chunk.spans);
    T *z = arena.take<T>(2 * size), *gate = arena.take<T>(size);
    Affine<T>* beta = arena.take<Affine<T>>(intervals);
    std::fill_n(start, starts, infinity);
    std::fill_n(coarse, chunk.spans, infinity);
    std::fill_n(beta, intervals, Affine<T>{});
    for (int64_t i = 0; i < number; ++i) {
      const bool after_zero = last.left[i] == 0 && last.right[i] > 0;
      start[i] = i == 0 ? -infinity : after_zero ? std::numeric_limits<T>::min() : last.left[i];
      if (i % column_multiple == 0) coarse[i / column_multiple] = start[i];
      if (chunk.w) beta[i] = {last.offset[i * last.stride], last.slope[i * last.stride]};
      state.usable = state.usable && std::isfinite(beta[i].offset) && std::isfinite(beta[i].slope);
    }
    const auto copy = [&](const T* from, T* to) {
      for (int64_t i = 0; i < number; ++i) {
        const T* const row = from + (chunk.w ? last.below[i] : i) * stride;
        for (int64_t j = 0; j < stride; j += column_multiple)
          std::copy_n(row + j, column_multiple, to + i * stride + j);
      }
      std::fill_n(to + number * stride, size - number * stride, T{0});
    };
    copy(units.offset, z);
    copy(units.slope, z + size);
    copy(units.middle, gate);
    chunk.start = start;
    chunk.coarse = coarse;
    chunk.beta = beta;
    chunk.z = z;
    chunk.gate = gate;
    T zero[column_multiple] = {};  // unless a number is not finite
    for (int64_t i = 0; i < 2 * size; i += column_multiple)
      for (int64_t k = 0; k < column_multiple; ++k) zero[k] += z[i + k] - z[i + k];
    state.usable &= std::all_of(zero, zero + column_multiple, [](T value) { return value == 0; });
  }

  void add_gradients(int64_t b, const T* grad) {
    const auto kernels = isa_kernels<BranchKernels<T>>();
    BranchState& state = branches_[b];
    PiecewiseLinearChunk<T>& chunk = state.chunk;
    const Packed<T>& packed = packed_[b].mlp;
    const int64_t size = packed.gradient_size, depth = chunk.mlp.depth;
    const int64_t tile = chunk.intervals * packed.widest;
    T* memory = reinterpret_cast<T*>(thread_scratch((size + 4 * tile) * static_cast<int64_t>(sizeof(T))));
    T *dz = memory, *spare = dz + 2 * tile, *gradients = spare + 2 * tile;
    std::memset(gradients, 0, size * sizeof(T));
    T* gradient[most_layers];
    for (int64_t l = 0; l < depth; ++l) gradient[l] = gradients + packed.places[l].gradient;
    T* const dlogit = spare;
    kernels.piecewise_linear_backward(chunk, grad + b * model_.width(), dz, dlogit, gradients + packed_[b].w_gradient);
    BentUnits<T> units[most_layers + 2];
    for (size_t l = 0; l < state.units.size(); ++l) {
      const Units& of = state.units[l];
      units[l] = {of.stride, of.size(), of.below.data(), of.offset, of.slope, of.middle};
    }
    kernels.bent_backward(chunk.mlp, units, chunk.w != nullptr, dz, spare, tile, gradient);
    kernels.add_partials(gradients, 1, size, total_.data() + b * size);
  }

  bool usable_ = true;
  bool taken_ = false;  // the next chunk is selected already
  std::vector<BranchState> branches_;
};

}  // namespace spin_fast
