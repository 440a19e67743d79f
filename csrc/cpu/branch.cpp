// branch_readout, its gradients and the training step: from tensors to the kernels in branch.inl.
//
// Graphs are taken in chunks whose activations stay in the caches. The rows of a chunk that several of its graphs, or
// nodes, share go through the MLP once. What a chunk is depends on the input alone, as do the groups of rows whose
// gradients are summed up apart, so results do not depend on the number of threads.

#include <atomic>
#include <cmath>
#include <cstring>
#include <iterator>
#include <tuple>
#include <utility>

#include "segments.h"

namespace spin_fast {
namespace {

constexpr int64_t chunk_bytes = 4 << 20;  // of activations and their gradients
constexpr int64_t group_rows = 16 * mlp_block_rows;
constexpr int64_t line = 64;

// Memory of one call, kept by the thread for its next one.
class Arena {
 public:
  template <class T>
  T* take(int64_t n) {
    const int64_t bytes = padded_to(line, n * static_cast<int64_t>(sizeof(T))) + line;
    if (blocks_.empty() || used_ + bytes > blocks_.back().second) {
      const int64_t size = std::max<int64_t>(bytes, blocks_.empty() ? 1 << 16 : 2 * blocks_.back().second);
      blocks_.emplace_back(static_cast<char*>(std::aligned_alloc(line, padded_to(line, size))), size);
      if (!blocks_.back().first) throw std::bad_alloc();
      used_ = 0;
    }
    char* at = blocks_.back().first.get() + used_;
    used_ += bytes;
    return reinterpret_cast<T*>(poisoned(at, bytes));
  }
  // Forgets what was taken; the largest block alone is kept for the next call.
  void clear() {
    if (blocks_.size() > 1) blocks_.erase(blocks_.begin(), blocks_.end() - 1);
    used_ = 0;
  }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::vector<std::pair<std::unique_ptr<char, Free>, int64_t>> blocks_;
  int64_t used_ = 0;
};

// Runs f(i) for i in [0, n): the next free thread takes the next.
template <class F>
void parallel_tasks(int64_t n, bool tiny, F f) {
  if (tiny || n <= 1) {
    for (int64_t i = 0; i < n; ++i) f(i);
    return;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, n, 1, [&](int64_t, int64_t) {
    for (int64_t i = next.fetch_add(1); i < n; i = next.fetch_add(1)) f(i);
  });
}

// An MLP packed for the kernels, where its parameters stand in the flat vector of all, and how gradients are laid out.
template <class T>
struct Packed {
  struct Place {
    int64_t weight, bias;       // in the flat vector
    int64_t in_step, out_step;  // from one input (output) to the next
    int64_t gradient;           // in a buffer of gradients
  };

  std::vector<Layer<T>> layers;
  std::vector<Place> places;
  int64_t gradient_size = 0;
  int64_t widest = 0;

  Mlp<T> mlp() const { return {static_cast<int64_t>(layers.size()), layers.data()}; }

  // `slope` of the LeakyReLU after the layer; `with_transposed` where a gradient goes further down.
  void add(Arena& arena, const T* parameters, Place place, int64_t in, int64_t out, double slope,
           bool with_transposed) {
    Layer<T> layer{in,      out,     padded_to(column_multiple, in), padded_to(column_multiple, out), nullptr,
                   nullptr, nullptr, static_cast<T>(slope)};
    const T* from = parameters + place.weight;
    T* weight = arena.take<T>(in * layer.stride);
    T* bias = arena.take<T>(layer.stride);
    for (int64_t i = 0; i < in; ++i) {
      if (place.out_step == 1)
        std::copy_n(from + i * place.in_step, out, weight + i * layer.stride);
      else
        for (int64_t j = 0; j < out; ++j) weight[i * layer.stride + j] = from[i * place.in_step + j * place.out_step];
      for (int64_t j = out; j < layer.stride; ++j) weight[i * layer.stride + j] = 0;
    }
    for (int64_t j = 0; j < layer.stride; ++j) bias[j] = j < out ? parameters[place.bias + j] : 0;
    if (with_transposed) {
      T* transposed = arena.take<T>(out * layer.below);
      for (int64_t j = 0; j < out; ++j) {
        for (int64_t i = 0; i < in; ++i) transposed[j * layer.below + i] = weight[i * layer.stride + j];
        for (int64_t i = in; i < layer.below; ++i) transposed[j * layer.below + i] = 0;
      }
      layer.transposed = transposed;
    }
    layer.weight = weight;
    layer.bias = bias;
    place.gradient = gradient_size;
    gradient_size += (padded_to(row_multiple, in) + 1) * layer.stride;
    widest = std::max(widest, layer.stride);
    layers.push_back(layer);
    places.push_back(place);
  }

  // Adds a buffer of gradients to the flat vector.
  template <class From>
  void unpack(const From* gradient, T* parameters) const {
    for (size_t l = 0; l < layers.size(); ++l) {
      const Layer<T>& layer = layers[l];
      const Place& place = places[l];
      const From* from = gradient + place.gradient;
      for (int64_t i = 0; i < layer.in && place.out_step == 1; ++i)
        std::copy_n(from + i * layer.stride, layer.out, parameters + place.weight + i * place.in_step);
      for (int64_t i = 0; i < layer.in && place.out_step != 1; ++i)
        for (int64_t j = 0; j < layer.out; ++j)
          parameters[place.weight + i * place.in_step + j * place.out_step] =
              static_cast<T>(from[i * layer.stride + j]);
      from += padded_to(row_multiple, layer.in) * layer.stride;
      for (int64_t j = 0; j < layer.out; ++j) parameters[place.bias + j] = static_cast<T>(from[j]);
    }
  }
};

// What the ops are told about the model.
struct Model {
  int64_t features, branches;
  std::vector<int64_t> widths;
  bool attention;
  double slope;

  int64_t width() const { return widths.back(); }
  int64_t readout_width() const { return branches * width(); }
  int64_t below(size_t l) const { return l ? widths[l - 1] : features; }
  // Of the branches, which come first in the flat vector: w, then weight and bias of each layer, all branches of each.
  int64_t parameters() const {
    int64_t size = attention ? width() : 0;
    for (size_t l = 0; l < widths.size(); ++l) size += (below(l) + 1) * widths[l];
    return branches * size;
  }
};

// The packed MLP of one branch and its w.
template <class T>
struct PackedBranch {
  Packed<T> mlp;
  T* w = nullptr;
  int64_t w_gradient = 0;

  PackedBranch(Arena& arena, const Model& model, int64_t branch, const T* parameters, bool input_gradient) {
    int64_t at = model.attention ? model.readout_width() : 0;
    for (size_t l = 0; l < model.widths.size(); ++l) {
      const int64_t in = model.below(l), out = model.widths[l];
      const int64_t weight = at + branch * in * out, bias = at + model.branches * in * out + branch * out;
      mlp.add(arena, parameters, {weight, bias, out, 1, 0}, in, out, model.slope, l > 0 || input_gradient);
      at += model.branches * (in + 1) * out;
    }
    if (!model.attention) return;
    const int64_t stride = mlp.layers.back().stride;
    w = arena.take<T>(stride);
    for (int64_t j = 0; j < stride; ++j) w[j] = j < model.width() ? parameters[branch * model.width() + j] : 0;
    w_gradient = mlp.gradient_size;
    mlp.gradient_size += stride;
  }
};

// What one branch of a chunk refers to, as in Branch. The vectors only grow: `rows` and `entries` of them count.
struct Part {
  int64_t rows = 0, entries = 0;
  std::vector<int64_t> source, ptr;
  std::vector<int32_t> last, row, before, graph, count;

  void clear() {
    rows = entries = 0;
    ptr.assign(1, 0);
  }
  // The entries [begin, end) of the next graph. `mark` tells which row of x is which here, or -1.
  void add(const Segments& seg, int64_t begin, int64_t end, int32_t* mark) {
    const int64_t n = end - begin, at = entries;
    if (at + n > static_cast<int64_t>(row.size()))
      for (std::vector<int32_t>* of : {&row, &before, &graph, &count}) of->resize(2 * (at + n));
    if (rows + n >= static_cast<int64_t>(source.size())) {  // one more than there can be is written, in vain
      source.resize(2 * (rows + n) + 1);
      last.resize(2 * (rows + n) + 1);
    }
    const auto number = static_cast<int32_t>(ptr.size() - 1);
    auto next = static_cast<int32_t>(rows);
    const auto add_all = [&](auto index) {
      for (int64_t i = 0; i < n; ++i) {
        const int64_t u = index[begin + i];
        const int32_t known = mark[u], here = known < 0 ? next : known;  // no branch: nobody could foresee it
        mark[u] = here;
        source[next] = u;
        before[at + i] = known < 0 ? -1 : last[here];
        last[here] = static_cast<int32_t>(at + i);
        row[at + i] = here;
        graph[at + i] = number;
        next += known < 0;
      }
    };
    if (seg.narrow_index)
      add_all(seg.narrow_index);
    else if (seg.wide_index)
      add_all(seg.wide_index);
    else
      for (int64_t i = 0; i < n; ++i, ++next) {
        source[next] = begin + i;
        last[next] = row[at + i] = static_cast<int32_t>(at + i);
        before[at + i] = -1;
        graph[at + i] = number;
      }
    if (seg.count) std::copy(seg.count + begin, seg.count + end, count.begin() + at);
    rows = next;
    entries = at + n;
    ptr.push_back(entries);
  }
};

// What a thread keeps from call to call.
struct Workspace {
  Arena arena;
  std::vector<int32_t> marks;  // row in the chunk of each row of x, or -1: always that outside of a call
  std::vector<Part> parts;
};

Workspace& workspace() {
  thread_local Workspace workspace;
  workspace.arena.clear();
  return workspace;
}

// One call: chunk after chunk of the chosen graphs, forward and, if asked, backward.
template <class T>
class Pass {
 public:
  Pass(Workspace& workspace, const Model& model, const T* x, const T* parameters, const Segments& seg,
       const int64_t* ids, int64_t graphs, bool backward, T* dx)
      : workspace_(workspace),
        parts_(workspace.parts),
        model_(model),
        seg_(seg),
        ids_(ids),
        graphs_(graphs),
        backward_(backward),
        dx_(dx) {
    int64_t bytes_per_row = 0;
    for (int64_t b = 0; b < model.branches; ++b) {
      packed_.emplace_back(workspace.arena, model, b, parameters, dx != nullptr);
    }
    if (static_cast<int64_t>(parts_.size()) < model.branches) parts_.resize(model.branches);
    for (Part& part : parts_) part.clear();
    const Packed<T>& mlp = packed_[0].mlp;
    for (const Layer<T>& layer : mlp.layers) bytes_per_row += layer.stride;
    const int64_t stride = mlp.layers.back().stride;
    bytes_per_row = (backward ? bytes_per_row + stride : stride) * static_cast<int64_t>(sizeof(T));
    chunk_rows_ = std::max<int64_t>(chunk_bytes / bytes_per_row, 4 * mlp_block_rows);
    if (backward) total_.resize(model.branches * mlp.gradient_size);
    if (shares_rows() && static_cast<int64_t>(workspace.marks.size()) < seg.rows) workspace.marks.assign(seg.rows, -1);
    x_ = x;
  }
  ~Pass() { unmark(); }
  Pass(const Pass&) = delete;
  Pass& operator=(const Pass&) = delete;

  int64_t begin() const { return begin_; }
  int64_t end() const { return end_; }

  // Selects the next graphs, up to some thousand distinct rows; false where there are none left.
  bool next() {
    unmark();
    begin_ = end_;
    if (begin_ == graphs_) return false;
    const int64_t most_entries = 16 * chunk_rows_;
    int64_t rows = 0, entries = entries_of(end_);
    long_ = entries > 4 * chunk_rows_;
    if (long_) {
      ++end_;
      return true;
    }
    do {
      fetch(end_ + 4);
      for (int64_t b = 0; b < model_.branches; ++b) {
        const int64_t first = first_entry(seg_, b, graph_of(end_)), last = first_entry(seg_, b, graph_of(end_) + 1);
        rows -= parts_[b].rows;
        parts_[b].add(seg_, first, last, workspace_.marks.data());
        rows += parts_[b].rows;
      }
      if (++end_ == graphs_) break;
      entries += entries_of(end_);
    } while (rows + entries_of(end_) <= chunk_rows_ && entries <= most_entries);
    prepare();
    return true;
  }

  // The chunk's readouts, (R + 1) * h in rows of `stride`.
  void forward(T* readout, int64_t stride) {
    if (!long_) {
      for (int64_t b = 0; b < model_.branches; ++b) {
        branches_[b].readout = readout + b * model_.width();
        branches_[b].readout_stride = stride;
      }
      evaluate();
      return;
    }
    long_readout_ = readout;
    sums_.assign(model_.branches * (model_.width() + 2), 0);
    for_each_piece([&] {
      evaluate();
      for (int64_t b = 0; b < model_.branches; ++b) add_piece(b);
    });
    for (int64_t b = 0; b < model_.branches; ++b) {
      const double* sum = sums_.data() + b * (model_.width() + 2);
      for (int64_t j = 0; j < model_.width(); ++j)
        readout[b * model_.width() + j] = static_cast<T>(sum[1] > 0 ? sum[2 + j] / sum[1] : 0);
    }
  }

  // From the gradient of the chunk's readouts, in rows of the same stride: adds to the gradients of the parameters, and
  // to dx.
  void backward(const T* grad) {
    const auto kernels = isa_kernels<BranchKernels<T>>();
    if (!long_) {
      for (int64_t b = 0; b < model_.branches; ++b)
        kernels.readout_backward(branches_[b], grad + b * model_.width(), 0, end_ - begin_);
      add_gradients();
      return;
    }
    for_each_piece([&] {
      evaluate();
      for (int64_t b = 0; b < model_.branches; ++b) {  // the weights are those in the whole graph
        const double* sum = sums_.data() + b * (model_.width() + 2);
        Branch<T>& branch = branches_[b];
        branch.readout = long_readout_ + b * model_.width();
        kernels.readout_backward(branch, grad + b * model_.width(), 0, 1);
        branch.top[0] = static_cast<T>(sum[0]);
        branch.scale[0] = static_cast<T>(1 / sum[1]);
      }
      add_gradients();
    });
  }

  // The gradients of all chunks, into the flat vector.
  void write_gradient(T* gradient) const {
    for (int64_t b = 0; b < model_.branches; ++b) {
      const double* total = total_.data() + b * packed_[0].mlp.gradient_size;
      packed_[b].mlp.unpack(total, gradient);
      if (model_.attention)
        for (int64_t j = 0; j < model_.width(); ++j)
          gradient[b * model_.width() + j] = static_cast<T>(total[packed_[b].w_gradient + j]);
    }
  }

 private:
  // A graph of more rows than a chunk may have is taken piece by piece, each as if it were a graph: forward and,
  // because nothing of a piece is kept, once more backward.
  template <class F>
  void for_each_piece(F f) {
    const int64_t graph = graph_of(begin_), most = chunk_rows_ / model_.branches;
    piece_readout_.resize(model_.readout_width());
    for (int64_t at = 0, more = 1; more; at += most) {
      more = 0;
      unmark();
      for (int64_t b = 0; b < model_.branches; ++b) {
        const int64_t first = first_entry(seg_, b, graph), last = first_entry(seg_, b, graph + 1);
        parts_[b].add(seg_, std::min(first + at, last), std::min(first + at + most, last), workspace_.marks.data());
        more |= first + at + most < last;
      }
      prepare();
      for (int64_t b = 0; b < model_.branches; ++b) {
        branches_[b].readout = piece_readout_.data() + b * model_.width();
        branches_[b].readout_stride = model_.readout_width();
      }
      f();
    }
  }

  // Adds the readout of a piece to the largest logit, the denominator and the sum so far; without attention the
  // denominator is 1.
  void add_piece(int64_t b) {
    const Branch<T>& branch = branches_[b];
    double* sum = sums_.data() + b * (model_.width() + 2);
    double weight = 1, keep = 1;
    if (model_.attention) {
      if (branch.ptr[1] == 0) return;
      const double top = std::max(sum[0], static_cast<double>(branch.top[0]));
      keep = std::exp(sum[0] - top);
      weight = std::exp(branch.top[0] - top) / static_cast<double>(branch.scale[0]);
      sum[0] = top;
      sum[1] = keep * sum[1] + weight;
    } else {
      sum[1] = 1;
    }
    for (int64_t j = 0; j < model_.width(); ++j)
      sum[2 + j] = keep * sum[2 + j] + weight * static_cast<double>(branch.readout[j]);
  }

  // The rows of the chunk through the MLPs, then the readouts of its graphs.
  void evaluate() {
    const auto kernels = isa_kernels<BranchKernels<T>>();
    constexpr int64_t step = 4 * mlp_block_rows, graphs = 16;
    std::vector<std::pair<int64_t, int64_t>> tasks;
    for (int64_t b = model_.branches; b-- > 0;)
      for (int64_t i = 0; i < branches_[b].rows; i += step) tasks.emplace_back(b, i);
    parallel_tasks(static_cast<int64_t>(tasks.size()), tiny_, [&](int64_t task) {
      const auto [b, first] = tasks[task];
      const BlockScratch<T> scratch = block_scratch(b);
      const int64_t end = std::min(branches_[b].rows, first + step);
      for (int64_t i = first; i < end; i += mlp_block_rows)
        kernels.forward(branches_[b], scratch, i, std::min(mlp_block_rows, end - i));
    });
    const int64_t number = end_ - begin_;
    parallel_tasks((number + graphs - 1) / graphs, tiny_, [&](int64_t task) {
      for (int64_t b = 0; b < model_.branches; ++b)
        kernels.readout(branches_[b], reinterpret_cast<double*>(thread_scratch(padded_width() * 8)), task * graphs,
                        std::min(number, (task + 1) * graphs));
    });
  }

  // What the rows of the chunk add to the gradients, group by group.
  void add_gradients() {
    const auto kernels = isa_kernels<BranchKernels<T>>();
    std::vector<std::pair<int64_t, int64_t>> groups;
    for (int64_t b = model_.branches; b-- > 0;)
      for (int64_t i = 0; i < branches_[b].rows; i += group_rows) groups.emplace_back(b, i);
    const int64_t size = packed_[0].mlp.gradient_size, number = static_cast<int64_t>(groups.size());
    if (static_cast<int64_t>(partial_.size()) < number * size) partial_.resize(number * size);
    parallel_tasks(number, tiny_, [&](int64_t task) {
      const auto [b, first] = groups[task];
      T* partial = partial_.data() + task * size;
      std::memset(partial, 0, size * sizeof(T));
      T* gradient[most_layers + 1];
      for (size_t l = 0; l < model_.widths.size(); ++l) gradient[l] = partial + packed_[b].mlp.places[l].gradient;
      gradient[model_.widths.size()] = partial + packed_[b].w_gradient;
      const BlockScratch<T> scratch = block_scratch(b);
      const int64_t end = std::min(branches_[b].rows, first + group_rows);
      for (int64_t i = first; i < end; i += mlp_block_rows)
        kernels.backward(branches_[b], scratch, i, std::min(mlp_block_rows, end - i), gradient);
    });
    for (int64_t task = 0; task < number; ++task) {
      const T* partial = partial_.data() + task * size;
      double* total = total_.data() + groups[task].first * size;
      for (int64_t i = 0; i < size; ++i) total[i] += static_cast<double>(partial[i]);
    }
  }

  bool shares_rows() const { return seg_.narrow_index || seg_.wide_index; }

  void unmark() {
    for (Part& part : parts_) {
      for (int64_t u = 0; shares_rows() && u < part.rows; ++u) workspace_.marks[part.source[u]] = -1;
      part.clear();
    }
  }

  // Asks for what is read of a graph that is to come: it may stand anywhere.
  void fetch(int64_t i) const {
    constexpr int64_t further = 4;
    for (int64_t b = 0; b < model_.branches; ++b) {
      if (i + further < graphs_) __builtin_prefetch(seg_.ptr + b * seg_.ptr_stride + graph_of(i + further));
      if (i >= graphs_) continue;
      const int64_t first = first_entry(seg_, b, graph_of(i)), last = first_entry(seg_, b, graph_of(i) + 1);
      for (int64_t e = first; e < last; e += line / static_cast<int64_t>(sizeof(int32_t))) {
        if (seg_.narrow_index) __builtin_prefetch(seg_.narrow_index + e);
        if (seg_.wide_index) __builtin_prefetch(seg_.wide_index + e);
        if (seg_.count) __builtin_prefetch(seg_.count + e);
      }
    }
  }

  int64_t graph_of(int64_t i) const { return ids_ ? ids_[i] : i; }
  int64_t padded_width() const { return packed_[0].mlp.layers.back().stride; }

  int64_t entries_of(int64_t i) const {
    int64_t entries = 0;
    for (int64_t b = 0; b < model_.branches; ++b)
      entries += first_entry(seg_, b, graph_of(i) + 1) - first_entry(seg_, b, graph_of(i));
    return entries;
  }

  // Memory for a chunk that has been selected.
  void prepare() {
    const int64_t graphs = end_ - begin_, depth = model_.widths.size();
    branches_.resize(model_.branches);
    activations_.assign(model_.branches * most_layers, nullptr);
    // The same walk twice: how much is needed, then where it is.
    for (const bool measured : {false, true}) {
      int64_t used = 0, cost = 0;
      const auto take = [&](int64_t n) {
        T* at = measured ? memory_ + used : nullptr;
        used += padded_to(column_multiple, n);
        return at;
      };
      for (int64_t b = 0; b < model_.branches; ++b) {
        const Part& part = parts_[b];
        const Mlp<T> mlp = packed_[b].mlp.mlp();
        const int64_t rows = part.rows, padded = padded_to(column_multiple, rows);
        T** activations = activations_.data() + b * most_layers;
        for (int64_t l = 0; l < depth; ++l) {
          cost += rows * mlp.layers[l].in * mlp.layers[l].out;
          if (backward_ || l + 1 == depth) activations[l] = take(padded * mlp.layers[l].stride);
        }
        Branch<T>& branch = branches_[b];
        branch = {};
        branch.mlp = mlp;
        branch.w = packed_[b].w;
        branch.x = x_;
        branch.rows = rows;
        branch.graphs = graphs;
        branch.source = part.source.data();
        branch.last = part.last.data();
        branch.row = part.row.data();
        branch.before = part.before.data();
        branch.graph = part.graph.data();
        branch.ptr = part.ptr.data();
        branch.count = seg_.count ? part.count.data() : nullptr;
        branch.activations = activations;
        if (backward_) {
          branch.inputs = take(padded * padded_to(row_multiple, model_.features));
          branch.columns = reinterpret_cast<int32_t*>(take((rows / mlp_block_rows + 1) * (model_.features + 1)));
        }
        branch.beta = take(padded);
        branch.mass = take(padded);
        branch.top = take(graphs);
        branch.scale = take(graphs);
        branch.ds = take(backward_ ? graphs * padded_width() : 0);
        branch.t = take(graphs);
        branch.dx = dx_;
      }
      tiny_ = cost < 4 * piece_cost;
      if (used > capacity_) {
        capacity_ = used + used / 4;
        memory_ = workspace_.arena.take<T>(capacity_);
      }
    }
  }

  BlockScratch<T> block_scratch(int64_t b) const {
    const Packed<T>& mlp = packed_[b].mlp;
    const int64_t features = padded_to(column_multiple, model_.features) + column_multiple;
    const int64_t first = features * mlp.layers[0].stride, block = mlp_block_rows * mlp.widest;
    const int64_t sizes[] = {mlp_block_rows * features,          features, first, first, block, block, block,
                             dx_ ? mlp_block_rows * features : 0};
    int64_t total = line;
    for (const int64_t size : sizes) total += padded_to(line, size * static_cast<int64_t>(sizeof(T)));
    char* memory = thread_scratch(total);
    T* at[std::size(sizes)];
    for (size_t i = 0; i < std::size(sizes); ++i) {
      at[i] = reinterpret_cast<T*>(memory);
      memory += padded_to(line, sizes[i] * static_cast<int64_t>(sizeof(T)));
    }
    return {at[0], reinterpret_cast<int32_t*>(at[1]), at[2], at[3], at[4], at[5], at[6], at[7]};
  }

  Workspace& workspace_;
  std::vector<Part>& parts_;
  const Model& model_;
  const Segments& seg_;
  const int64_t* ids_;
  int64_t graphs_;
  bool backward_;
  T* dx_;
  const T* x_;
  int64_t chunk_rows_;
  int64_t begin_ = 0, end_ = 0;
  bool tiny_ = true;
  bool long_ = false;             // the chunk is one graph that is taken piece by piece
  std::vector<double> sums_;      // of its branches: the largest logit, the denominator, [h] sums
  std::vector<T> piece_readout_;  // of a piece, [(R + 1) * h]
  T* long_readout_ = nullptr;
  std::vector<PackedBranch<T>> packed_;
  std::vector<Branch<T>> branches_;
  std::vector<T*> activations_;
  T* memory_ = nullptr;
  int64_t capacity_ = 0;
  std::vector<T> partial_;
  std::vector<double> total_;
};

// Calls f(Tag<T>) for the types that the MLPs compute in.
template <class F>
void dispatch_compute(ScalarType value, F f) {
  if (value == ScalarType::Float) return f(Tag<float>{});
  STD_TORCH_CHECK(value == ScalarType::Double, "rows must be float32 or float64");
  f(Tag<double>{});
}

// The arguments that the three ops share, checked.
struct Arguments {
  Model model;
  Segments seg;
  const int64_t* ids;
  int64_t graphs;
};

Arguments arguments_of(const Tensor& rows, const Tensor& parameters, const Tensor& ptr, const OptionalTensor& index,
                       const OptionalTensor& count, const OptionalTensor& ids, int64_t num_branches,
                       const std::vector<int64_t>& widths, bool attention, double slope, bool shared, bool checked,
                       int64_t classifier_parameters = 0) {
  expect("rows", rows, {-1, -1}, rows.scalar_type());
  STD_TORCH_CHECK(!widths.empty() && widths.size() <= most_layers, "widths must have 1 to ", most_layers, " layers");
  for (const int64_t width : widths) STD_TORCH_CHECK(width >= 1, "widths must be positive");
  STD_TORCH_CHECK(slope >= 0, "negative_slope must not be negative");
  const Form form = form_of(rows.size(0), widths.back(), ptr, index, count, num_branches, shared, checked);
  Arguments of{{rows.size(1), num_branches, widths, attention, slope},
               segments_of(form, ptr, index, count, shared),
               nullptr,
               form.graphs};
  expect("parameters", parameters, {of.model.parameters() + classifier_parameters}, rows.scalar_type());
  if (ids) {
    expect("ids", *ids, {-1}, ScalarType::Long);
    of.ids = ids->const_data_ptr<int64_t>();
    of.graphs = ids->numel();
    for (int64_t i = 0; i < of.graphs; ++i)
      STD_TORCH_CHECK(of.ids[i] >= 0 && of.ids[i] < form.graphs, "ids must be in [0, ", form.graphs, ")");
  }
  return of;
}

Tensor branch_readout(const Tensor& rows, const Tensor& parameters, const Tensor& ptr, OptionalTensor index,
                      OptionalTensor count, OptionalTensor ids, int64_t num_branches, std::vector<int64_t> widths,
                      bool attention, double negative_slope, bool shared, bool checked) {
  const Arguments of = arguments_of(rows, parameters, ptr, index, count, ids, num_branches, widths, attention,
                                    negative_slope, shared, checked);
  Tensor readout = empty({of.graphs, of.model.readout_width()}, rows.scalar_type());
  dispatch_compute(rows.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* out = readout.mutable_data_ptr<T>();
    Pass<T> pass(workspace(), of.model, rows.const_data_ptr<T>(), parameters.const_data_ptr<T>(), of.seg, of.ids,
                 of.graphs, false, nullptr);
    while (pass.next()) pass.forward(out + pass.begin() * of.model.readout_width(), of.model.readout_width());
  });
  return readout;
}

std::tuple<Tensor, Tensor> branch_readout_backward(const Tensor& grad, const Tensor& rows, const Tensor& parameters,
                                                   const Tensor& ptr, OptionalTensor index, OptionalTensor count,
                                                   OptionalTensor ids, int64_t num_branches,
                                                   std::vector<int64_t> widths, bool attention, double negative_slope,
                                                   bool shared, bool checked, bool with_rows) {
  const Arguments of = arguments_of(rows, parameters, ptr, index, count, ids, num_branches, widths, attention,
                                    negative_slope, shared, checked);
  const ScalarType value = rows.scalar_type();
  expect("grad", grad, {of.graphs, of.model.readout_width()}, value);
  Tensor gradient = empty({parameters.numel()}, value);
  Tensor dx = empty({with_rows ? rows.size(0) : 0, rows.size(1)}, value);
  dispatch_compute(value, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (with_rows) std::memset(dx.mutable_data_ptr<T>(), 0, dx.numel() * sizeof(T));
    Workspace& memory = workspace();
    Pass<T> pass(memory, of.model, rows.const_data_ptr<T>(), parameters.const_data_ptr<T>(), of.seg, of.ids, of.graphs,
                 true, with_rows ? dx.mutable_data_ptr<T>() : nullptr);
    std::vector<T> readout;
    while (pass.next()) {
      readout.resize((pass.end() - pass.begin()) * of.model.readout_width());
      pass.forward(readout.data(), of.model.readout_width());
      pass.backward(grad.const_data_ptr<T>() + pass.begin() * of.model.readout_width());
    }
    pass.write_gradient(gradient.mutable_data_ptr<T>());
  });
  return {gradient, dx};
}

// Softmax cross-entropy of one graph, over the number of graphs; the scores become their gradient.
template <class T>
double cross_entropy(T* scores, int64_t classes, int64_t label, int64_t graphs) {
  double top = scores[0], total = 0;
  for (int64_t c = 1; c < classes; ++c) top = std::max<double>(top, scores[c]);
  for (int64_t c = 0; c < classes; ++c) total += std::exp(scores[c] - top);
  const double loss = std::log(total) + top - scores[label];
  for (int64_t c = 0; c < classes; ++c)
    scores[c] = static_cast<T>((std::exp(scores[c] - top) / total - (c == label)) / static_cast<double>(graphs));
  return loss / static_cast<double>(graphs);
}

// The classifier on the readouts of a chunk, with its loss and gradients.
template <class T>
class Classifier {
 public:
  Classifier(Arena& arena, const Model& model, const std::vector<int64_t>& widths, const T* parameters)
      : arena_(arena) {
    int64_t at = model.parameters(), in = model.readout_width();
    for (size_t l = 0; l < widths.size(); ++l) {
      const int64_t out = widths[l];
      packed_.add(arena, parameters, {at, at + in * out, 1, in, 0}, in, out, l + 1 < widths.size() ? model.slope : 1.0,
                  true);
      at += (in + 1) * out;
      in = out;
    }
    gradient_.resize(packed_.gradient_size);
  }

  // Memory for the readouts of so many graphs, and for their gradient.
  std::pair<T*, T*> reserve(int64_t graphs) {
    if (graphs > capacity_) {
      capacity_ = padded_to(column_multiple, graphs);
      const int64_t wide = packed_.layers[0].below;
      readout_ = arena_.take<T>(capacity_ * wide);
      std::memset(readout_, 0, capacity_ * wide * sizeof(T));
      grad_ = arena_.take<T>(capacity_ * wide);
      for (T*& spare : spare_) spare = arena_.take<T>(capacity_ * packed_.widest);
      activations_.clear();
      for (const Layer<T>& layer : packed_.layers) activations_.push_back(arena_.take<T>(capacity_ * layer.stride));
    }
    return {readout_, grad_};
  }

  // The loss of the reserved readouts; adds to the gradients, and leaves that of the readouts.
  template <class Label>
  double step(int64_t graphs, int64_t of, Label label) {
    const auto kernels = isa_kernels<BranchKernels<T>>();
    const Layer<T>& last = packed_.layers.back();
    const int64_t stride = packed_.layers[0].below;
    kernels.mlp_forward(packed_.mlp(), readout_, stride, graphs, activations_.data());
    double loss = 0;
    for (int64_t i = 0; i < graphs; ++i) {
      T* scores = spare_[0] + i * last.stride;
      std::memcpy(scores, activations_.back() + i * last.stride, last.stride * sizeof(T));
      loss += cross_entropy(scores, last.out, label(i), of);
    }
    T* gradient[most_layers];
    for (size_t l = 0; l < packed_.layers.size(); ++l) gradient[l] = gradient_.data() + packed_.places[l].gradient;
    kernels.mlp_backward(packed_.mlp(), readout_, stride, graphs, activations_.data(), spare_[0], spare_[1], spare_[2],
                         gradient, grad_);
    return loss;
  }

  int64_t stride() const { return packed_.layers[0].below; }

  void write_gradient(T* gradient) const { packed_.unpack(gradient_.data(), gradient); }

 private:
  Arena& arena_;
  Packed<T> packed_;
  std::vector<T> gradient_;
  int64_t capacity_ = 0;
  T *readout_ = nullptr, *grad_ = nullptr, *spare_[3] = {};
  std::vector<T*> activations_;
};

std::tuple<Tensor, Tensor> training_step(const Tensor& rows, const Tensor& parameters, const Tensor& y,
                                         const Tensor& ptr, OptionalTensor index, OptionalTensor count,
                                         OptionalTensor ids, int64_t num_branches, std::vector<int64_t> widths,
                                         std::vector<int64_t> classifier_widths, bool attention, double negative_slope,
                                         bool checked) {
  STD_TORCH_CHECK(!classifier_widths.empty() && classifier_widths.size() <= most_layers,
                  "classifier_widths must have 1 to ", most_layers, " layers");
  STD_TORCH_CHECK(!widths.empty(), "widths must have 1 to ", most_layers, " layers");
  int64_t in = num_branches * widths.back(), more = 0;
  for (const int64_t width : classifier_widths) {
    STD_TORCH_CHECK(width >= 1, "classifier_widths must be positive");
    more += (in + 1) * width;
    in = width;
  }
  const Arguments of = arguments_of(rows, parameters, ptr, index, count, ids, num_branches, widths, attention,
                                    negative_slope, false, checked, more);
  const ScalarType value = rows.scalar_type();
  expect("y", y, {of.seg.graphs}, ScalarType::Long);
  const int64_t* labels = y.const_data_ptr<int64_t>();
  const int64_t classes = classifier_widths.back();
  const auto label_of = [&](int64_t i) { return labels[of.ids ? of.ids[i] : i]; };
  for (int64_t i = 0; i < of.graphs; ++i)
    STD_TORCH_CHECK(label_of(i) >= 0 && label_of(i) < classes, "y must be in [0, ", classes, ")");
  Tensor loss = empty({}, value), gradient = empty({parameters.numel()}, value);
  dispatch_compute(value, [&](auto tag) {
    using T = typename decltype(tag)::type;
    Workspace& memory = workspace();
    Classifier<T> classifier(memory.arena, of.model, classifier_widths, parameters.const_data_ptr<T>());
    Pass<T> pass(memory, of.model, rows.const_data_ptr<T>(), parameters.const_data_ptr<T>(), of.seg, of.ids, of.graphs,
                 true, nullptr);
    double sum = 0;
    while (pass.next()) {
      const int64_t graphs = pass.end() - pass.begin();
      const auto [readout, grad] = classifier.reserve(graphs);
      pass.forward(readout, classifier.stride());
      sum += classifier.step(graphs, of.graphs, [&](int64_t i) { return label_of(pass.begin() + i); });
      pass.backward(grad);
    }
    *loss.mutable_data_ptr<T>() = static_cast<T>(sum);
    pass.write_gradient(gradient.mutable_data_ptr<T>());
    classifier.write_gradient(gradient.mutable_data_ptr<T>());
  });
  return {loss, gradient};
}

}  // namespace
}  // namespace spin_fast

STABLE_TORCH_LIBRARY_IMPL(spin_fast, CPU, m) {
  m.impl("branch_readout", TORCH_BOX(&spin_fast::branch_readout));
  m.impl("branch_readout_backward", TORCH_BOX(&spin_fast::branch_readout_backward));
  m.impl("training_step", TORCH_BOX(&spin_fast::training_step));
}
