// One pass of chosen graphs through the branches, forward and backward.
//
// Graphs are taken in chunks whose activations stay in the caches. The rows of a chunk that several of its graphs, or
// nodes, share go through the MLP once. What a chunk is depends on the input alone, as do the tasks, ranges of rows
// whose gradients are summed up apart, so results do not depend on the number of threads.
#pragma once

#include <cmath>
#include <cstring>
#include <utility>

#include "entries.h"
#include "packed.h"

namespace spin_fast {

inline constexpr int64_t branch_chunk_bytes = 4 << 20;    // of activations and their gradients
inline constexpr int64_t task_rows = 16 * mlp_tile_rows;  // at most
inline constexpr int64_t add_cost = 512;                  // of adding an entry to a chunk, in multiply-adds
inline constexpr int64_t ahead = 4;  // graphs between prefetching the entries of one and reading them

// The rows and entries of one branch of a chunk, as in BranchChunk. The vectors only grow; `rows` and `entries` are the
// numbers in use.
struct BranchEntries {
  int64_t rows = 0, entries = 0;
  std::vector<int64_t> source, parts, ptr;  // of joint rows, `source` are these, and `parts` the rows of x
  std::vector<int32_t> row, count;
  // [rows of x] Lower half: the row of the chunk; upper half: the stamp of the chunk that this holds for. Pages without
  // a row of the branch are never touched.
  std::unique_ptr<uint64_t[], Free> marks;
  int64_t marked = 0;
  uint32_t stamp = 0;

  void clear(const Segments& seg) {
    rows = entries = 0;
    ptr.assign(1, 0);
    const int64_t most = seg.narrow_index || seg.wide_index ? seg.rows : 0;
    if (most > marked || ++stamp == 0) {  // wrapped around: old marks would seem new
      marked = std::max(marked, most);
      marks.reset(static_cast<uint64_t*>(std::calloc(marked + 1, sizeof(uint64_t))));
      if (!marks) {
        marked = 0;
        throw std::bad_alloc();
      }
      stamp = 1;
    }
  }
  // Adds the entries [begin, end) of the next graph.
  void add(const Segments& seg, int64_t begin, int64_t end) {
    const int64_t n = end - begin, at = entries;
    if (at + n > static_cast<int64_t>(row.size()))
      for (std::vector<int32_t>* of : {&count, &row}) of->resize(2 * (at + n));  // row last: it tells the room
    if (rows + n >= static_cast<int64_t>(source.size()))  // the loop writes up to one past the last row
      source.resize(2 * (rows + n) + 1);
    auto next = static_cast<uint32_t>(rows);
    const auto add_all = [&](auto index) {
      for (int64_t i = 0; i < n; ++i) {  // no conditional jumps, which would be mispredicted
        const int64_t u = index[begin + i];
        const bool known = marks[u] >> 32 == stamp;
        const uint32_t here = known ? static_cast<uint32_t>(marks[u]) : next;
        marks[u] = uint64_t{stamp} << 32 | here;
        source[next] = u;
        row[at + i] = static_cast<int32_t>(here);
        next += !known;
      }
    };
    if (seg.narrow_index)
      add_all(seg.narrow_index);
    else if (seg.wide_index)
      add_all(seg.wide_index);
    else
      for (int64_t i = 0; i < n; ++i, ++next) {
        source[next] = begin + i;
        row[at + i] = static_cast<int32_t>(next);
      }
    if (seg.count) std::copy(seg.count + begin, seg.count + end, count.begin() + at);
    rows = next;
    entries = at + n;
    ptr.push_back(entries);
  }
};

// Ranges of `step` rows of each branch: its number and the first row, the last branch first, which has the most.
template <class T>
std::vector<std::pair<int64_t, int64_t>> tasks_of(const std::vector<BranchChunk<T>>& branches, int64_t step) {
  std::vector<std::pair<int64_t, int64_t>> tasks;
  for (int64_t b = branches.size(); b-- > 0;)
    for (int64_t i = branches[b].known; i < branches[b].rows; i += step) tasks.emplace_back(b, i);
  return tasks;
}

// The rows of a branch through its MLP, and the readouts of its graphs: where these hardly share rows, each as soon as
// its rows are there and in the caches.
template <class T>
void evaluate_branch(const BranchChunk<T>& branch, const Packed<T>& packed) {
  const auto kernels = isa_kernels<BranchKernels<T>>();
  const TileScratch<T> scratch = tile_scratch(packed);
  auto* sum = reinterpret_cast<double*>(scratch.first);  // [stride] values of at most 8 bytes
  const int64_t* ptr = branch.ptr;
  int64_t done = branch.known, g = 0;
  const auto forward_to = [&](int64_t end) {
    for (; done < end; done = std::min(done + mlp_tile_rows, branch.rows))
      kernels.forward(branch, scratch, done, std::min(mlp_tile_rows, branch.rows - done));
  };
  if (2 * (branch.rows - done) > ptr[branch.graphs])
    for (; done < branch.rows && g < branch.graphs; ++g) {
      for (int64_t e = ptr[g]; e < ptr[g + 1]; ++e) forward_to(branch.row[e] + 1);
      kernels.readout(branch, sum, g, g + 1);
    }
  forward_to(branch.rows);
  kernels.readout(branch, sum, g, branch.graphs);
}

// The rows of all branches through the MLPs packed(branch), `step` of them in a task, then the readouts of all graphs.
template <class T, class P>
void evaluate_branches(const std::vector<BranchChunk<T>>& branches, P packed, int64_t step, int64_t threads) {
  if (threads == 1) {
    for (size_t b = 0; b < branches.size(); ++b) evaluate_branch(branches[b], packed(b));
    return;
  }
  const auto kernels = isa_kernels<BranchKernels<T>>();
  const std::vector<std::pair<int64_t, int64_t>> tasks = tasks_of(branches, step);
  parallel_tasks(static_cast<int64_t>(tasks.size()), threads, [&](int64_t task) {
    const auto [b, first] = tasks[task];
    const TileScratch<T> scratch = tile_scratch(packed(b));
    const int64_t end = std::min(branches[b].rows, first + step);
    for (int64_t i = first; i < end; i += mlp_tile_rows)
      kernels.forward(branches[b], scratch, i, std::min(mlp_tile_rows, end - i));
  });
  constexpr int64_t graphs_of_task = 16;
  const int64_t graphs = branches[0].graphs;
  parallel_branches(
      branches.size(), (graphs + graphs_of_task - 1) / graphs_of_task, threads, [&](int64_t b, int64_t i) {
        const int64_t stride = branches[b].mlp.layers[branches[b].mlp.depth - 1].stride;
        auto* sum = reinterpret_cast<double*>(thread_scratch(stride * static_cast<int64_t>(sizeof(double))));
        kernels.readout(branches[b], sum, i * graphs_of_task, std::min(graphs, (i + 1) * graphs_of_task));
      });
}

// The graph at position i of the chosen ones, and the number of its entries in all branches.
inline int64_t graph_of(const Arguments& of, int64_t i) { return of.ids ? of.ids[i] : i; }
inline int64_t num_entries(const Arguments& of, int64_t i) {
  int64_t entries = 0;
  for (int64_t b = 0; b < of.model.branches; ++b)
    entries += first_entry(of.seg, b, graph_of(of, i) + 1) - first_entry(of.seg, b, graph_of(of, i));
  return entries;
}

// Adds the graphs at positions [begin, end) of the chosen ones to the entries of a branch.
inline void add_range(const Arguments& of, int64_t branch, int64_t begin, int64_t end, BranchEntries& entries) {
  for (int64_t i = begin; i < end; ++i) {
    if (i + 2 * ahead < of.graphs)
      __builtin_prefetch(of.seg.ptr + branch * of.seg.ptr_stride + graph_of(of, i + 2 * ahead));
    if (i + ahead < of.graphs) prefetch_entries(of.seg, branch, graph_of(of, i + ahead));
    const int64_t graph = graph_of(of, i);
    entries.add(of.seg, first_entry(of.seg, branch, graph), first_entry(of.seg, branch, graph + 1));
  }
}

// The rows of a chunk, and a sixteenth of its entries, at most.
template <class T>
int64_t most_rows(const Model& model, bool backward) {
  int64_t width = padded_to(column_multiple, model.width());  // of the activations that are kept, and of a gradient
  for (const int64_t of_layer : model.widths) width += backward ? padded_to(column_multiple, of_layer) : 0;
  // The backward pass keeps the inputs, too, of which most are zeros where they are wide.
  const int64_t inputs = backward ? padded_to(row_multiple, model.features) / 16 : 0;
  return std::max<int64_t>(branch_chunk_bytes / (std::max(width, inputs) * sizeof(T)), 4 * mlp_tile_rows);
}

// Whether graphs of so many entries are one chunk, too small to be chosen by several threads.
template <class T>
bool is_small(const Model& model, int64_t entries) {
  return entries <= most_rows<T>(model, true) && threads_for(add_cost * entries) == 1;
}

// The entries of the chunk of a pass.
struct Choice {
  std::vector<BranchEntries> branches;
  bool is_whole = false;  // they are those of all graphs of the next pass already

  // Chooses all graphs of the next pass, if they are few.
  template <class T>
  void take_all(const Arguments& of) {
    int64_t entries = 0;
    for (int64_t i = 0; i < of.graphs; ++i) entries += num_entries(of, i);
    is_whole = is_small<T>(of.model, entries);
    if (!is_whole) return;
    branches.resize(std::max<size_t>(branches.size(), of.model.branches));
    for (int64_t b = of.model.branches; b-- > 0;) {
      branches[b].clear(of.seg);
      add_range(of, b, 0, of.graphs, branches[b]);
    }
  }
};

// What a thread keeps from call to call.
struct Workspace {
  Arena arena;
  std::vector<Arena> branch_arenas;
  Choice hops, joint;
};

inline Workspace& workspace() {
  thread_local Workspace workspace;
  workspace.arena.clear();
  workspace.hops.is_whole = workspace.joint.is_whole = false;
  return workspace;
}

// What both passes are made of. A pass goes through the chosen graphs of one call, chunk after chunk: next() selects
// one, or take_to(end) the graphs up to `end`; forward(readout, stride) writes its readouts, (R + 1) * h in rows of
// `stride`, backward(grad) adds to the gradients from that of the readouts, in rows of the same stride.
template <class T>
class PassBase {
 public:
  PassBase(const PassBase&) = delete;
  PassBase& operator=(const PassBase&) = delete;

  int64_t begin() const { return begin_; }
  int64_t end() const { return end_; }
  // That the chunk is worth: the same in all loops over it, so that what a thread has in its caches serves the next.
  int64_t threads() const { return threads_; }

  void write_gradient(T* gradient) const {
    for (int64_t b = 0; b < model_.branches; ++b)
      packed_[b].unpack(model_, b, total_.data() + b * packed_[0].mlp.gradient_size, gradient);
  }

 protected:
  PassBase(Workspace& workspace, const Arguments& arguments, const T* x, const T* parameters, bool backward,
           bool input_gradient)
      : workspace_(workspace),
        arguments_(arguments),
        model_(arguments.model),
        seg_(arguments.seg),
        x_(x),
        backward_(backward) {
    for (int64_t b = 0; b < model_.branches; ++b)
      packed_.emplace_back(workspace.arena, model_, b, parameters, input_gradient);
    if (backward) total_.resize(model_.branches * packed_[0].mlp.gradient_size);
  }

  Workspace& workspace_;
  const Arguments& arguments_;
  const Model& model_;
  const Segments& seg_;
  const T* x_;
  bool backward_;
  int64_t threads_ = 1;
  int64_t begin_ = 0, end_ = 0;
  std::vector<PackedBranch<T>> packed_;
  std::vector<double> total_;  // the gradients so far, [branches, gradient_size]
};

template <class T>
class BranchPass : public PassBase<T> {
  using Base = PassBase<T>;
  using Base::begin_, Base::end_, Base::packed_, Base::total_;
  using Base::workspace_, Base::arguments_, Base::model_, Base::seg_, Base::x_, Base::backward_, Base::threads_;

 public:
  BranchPass(Workspace& workspace, const Arguments& arguments, const T* x, const T* parameters, bool backward, T* dx)
      : Base(workspace, arguments, x, parameters, backward, dx != nullptr),
        entries_(choice_of(workspace).branches),
        dx_(dx),
        chunk_rows_(most_rows<T>(model_, backward)),
        chosen_(std::exchange(choice_of(workspace).is_whole, false)) {
    if (static_cast<int64_t>(entries_.size()) < model_.branches) entries_.resize(model_.branches);
  }

  // Selects graphs of some thousand distinct rows at most, or a single one.
  bool next() {
    if (take_chosen(arguments_.graphs)) return true;
    if (!begin_chunk()) return false;
    int64_t rows = 0, entries = 0, more = num_entries(arguments_, end_);
    const auto fit = [&](int64_t n) { return rows + n <= chunk_rows_ && entries + n <= 16 * chunk_rows_; };
    for (bool room = !long_; room; room = end_ < arguments_.graphs && fit(more)) {
      int64_t end = end_, added = 0;
      do {  // graphs that fit whatever rows they share
        added += more;
        more = ++end < arguments_.graphs ? num_entries(arguments_, end) : 0;
      } while (end < arguments_.graphs && fit(added + more));
      rows = add_graphs(end, added);
      entries += added;
    }
    end_chunk();
    return true;
  }

  void take_to(int64_t end) {
    if (take_chosen(end)) return;
    begin_chunk();
    long_ = long_ && end == begin_ + 1;
    if (!long_) {
      int64_t entries = 0;
      for (int64_t i = end_; i < end; ++i) entries += num_entries(arguments_, i);
      add_graphs(end, entries);
    }
    end_chunk();
  }

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
        readout[b * model_.width() + j] = static_cast<T>(sum[1] != 0 ? sum[2 + j] / sum[1] : 0);
    }
  }

  // Adds to dx, too.
  void backward(const T* grad) {
    const auto kernels = isa_kernels<BranchKernels<T>>();
    const auto add = [&] {
      for (int64_t b = 0; b < model_.branches; ++b) branches_[b].grad = grad + b * model_.width();
      parallel_branches(model_.branches, 1, threads_, [&](int64_t b, int64_t) {
        if (!branches_[b].each_once) kernels.readout_backward(branches_[b]);
      });
      add_gradients();
    };
    if (!long_) return add();
    for_each_piece([&] {
      evaluate();
      for (int64_t b = 0; b < model_.branches; ++b) {  // attention weights are those of the whole graph
        const double* sum = sums_.data() + b * (model_.width() + 2);
        branches_[b].readout = long_readout_ + b * model_.width();
        branches_[b].top[0] = static_cast<T>(sum[0]);
        branches_[b].scale[0] = static_cast<T>(1 / sum[1]);
      }
      add();
    });
  }

 private:
  Choice& choice_of(Workspace& workspace) const { return arguments_.parts.given ? workspace.joint : workspace.hops; }

  // Takes the graphs up to `end`, if these are what was chosen before the pass.
  bool take_chosen(int64_t end) {
    if (!std::exchange(chosen_, false) || end != arguments_.graphs) return false;
    end_ = end;
    prepare();
    return true;
  }

  bool begin_chunk() {
    for (int64_t b = 0; b < model_.branches; ++b) entries_[b].clear(seg_);
    begin_ = end_;
    if (begin_ == arguments_.graphs) return false;
    long_ = num_entries(arguments_, begin_) > 4 * chunk_rows_;
    return true;
  }

  void end_chunk() {
    if (long_)
      ++end_;
    else
      prepare();
  }

  // Adds the graphs up to `end`, of so many entries, to the chunk; returns the number of rows that it has then.
  int64_t add_graphs(int64_t end, int64_t entries) {
    parallel_branches(model_.branches, 1, threads_for(add_cost * entries),
                      [&](int64_t b, int64_t) { add_range(arguments_, b, end_, end, entries_[b]); });
    end_ = end;
    int64_t rows = 0;
    for (int64_t b = 0; b < model_.branches; ++b) rows += entries_[b].rows;
    return rows;
  }

  // Finds the rows of x that the joint rows of the chunk consist of.
  void find_parts(BranchEntries& of) const {
    const Parts& parts = arguments_.parts;
    of.parts.resize(of.rows * parts.number);
    for (int64_t i = 0; i < of.rows; ++i)
      for (int64_t p = 0; p < parts.number; ++p) {
        const int64_t at = of.source[i] * parts.number + p;
        of.parts[i * parts.number + p] = parts.narrow ? parts.narrow[at] : parts.wide[at];
      }
  }

  // Processes a graph of more rows than a chunk may have piece by piece, each as if it were a graph. Nothing of a piece
  // is kept, so the backward pass evaluates it again.
  template <class F>
  void for_each_piece(F f) {
    const int64_t graph = graph_of(arguments_, begin_), most = std::max<int64_t>(1, chunk_rows_ / model_.branches);
    piece_readout_.resize(model_.readout_width());
    for (int64_t at = 0, more = 1; more; at += most) {
      more = 0;
      for (int64_t b = 0; b < model_.branches; ++b) {
        entries_[b].clear(seg_);
        const int64_t first = first_entry(seg_, b, graph), last = first_entry(seg_, b, graph + 1);
        entries_[b].add(seg_, std::min(first + at, last), std::min(first + at + most, last));
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

  // Merges the readout of a piece into the largest logit, denominator (1 without attention) and sum so far.
  void add_piece(int64_t b) {
    const BranchChunk<T>& branch = branches_[b];
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
    const auto packed = [&](int64_t b) -> const Packed<T>& { return packed_[b].mlp; };
    evaluate_branches(branches_, packed, 4 * mlp_tile_rows, threads_);
  }

  // Adds the gradients of the chunk's rows: each task into memory of its own, then all in order. There are some eight
  // tasks or more, of like size: of the three or four of a small chunk one thread would get half as many again.
  void add_gradients() {
    const auto kernels = isa_kernels<BranchKernels<T>>();
    int64_t rows = 0;
    for (const BranchChunk<T>& branch : branches_) rows += branch.rows;
    const int64_t step = std::clamp(padded_to(mlp_tile_rows, rows / 8), 2 * mlp_tile_rows, task_rows);
    const std::vector<std::pair<int64_t, int64_t>> tasks = tasks_of(branches_, step);
    const int64_t size = packed_[0].mlp.gradient_size, number = static_cast<int64_t>(tasks.size());
    if (static_cast<int64_t>(partial_.size()) < number * size) partial_.resize(number * size);
    parallel_tasks(number, threads_, [&](int64_t task) {
      const auto [b, first] = tasks[task];
      T* partial = partial_.data() + task * size;
      std::memset(partial, 0, size * sizeof(T));
      T* gradient[most_layers + 1];
      for (size_t l = 0; l < model_.widths.size(); ++l) gradient[l] = partial + packed_[b].mlp.places[l].gradient;
      gradient[model_.widths.size()] = partial + packed_[b].w_gradient;
      const TileScratch<T> scratch = tile_scratch(packed_[b].mlp);
      const int64_t end = std::min(branches_[b].rows, first + step);
      for (int64_t i = first; i < end; i += mlp_tile_rows)
        kernels.backward(branches_[b], scratch, i, std::min(mlp_tile_rows, end - i), gradient);
    });
    for (int64_t begin = 0, end = 0; begin < number; begin = end) {
      while (end < number && tasks[end].first == tasks[begin].first) ++end;
      kernels.add_partials(partial_.data() + begin * size, end - begin, size,
                           total_.data() + tasks[begin].first * size);
    }
    for (int64_t b = 0; dx_ && b < model_.branches; ++b) add_row_gradients(branches_[b]);
  }

  // Serial, since branches may share rows of x, and a graph that is chosen twice repeats its rows.
  void add_row_gradients(const BranchChunk<T>& branch) {
    const Layer<T>& first = branch.mlp.layers[0];
    const int64_t width = first.in / branch.parts;
    for (int64_t i = 0; i < branch.rows * branch.parts; ++i) {
      const T* from = branch.dx + i / branch.parts * first.below + i % branch.parts * width;
      for (int64_t k = 0; k < width; ++k) dx_[branch.source[i] * width + k] += from[k];
    }
  }

  int64_t padded_width() const { return packed_[0].mlp.layers.back().stride; }

  // Allocates memory for the selected chunk.
  void prepare() {
    Arena& arena = workspace_.arena;
    const int64_t graphs = end_ - begin_, depth = model_.widths.size();
    branches_.resize(model_.branches);
    activations_.assign(model_.branches * most_layers, nullptr);
    const bool joint = arguments_.parts.given;
    for (int64_t b = 0; joint && b < model_.branches; ++b) find_parts(entries_[b]);
    // The same loop twice: the first time measures, the second assigns.
    for (const bool measured : {false, true}) {
      int64_t used = 0, cost = 0, entries = 0;
      const auto take = [&](int64_t n) {
        T* at = measured ? memory_ + used : nullptr;
        used += padded_to(column_multiple, n);
        return at;
      };
      for (int64_t b = 0; b < model_.branches; ++b) {
        const BranchEntries& of = entries_[b];
        const Mlp<T> mlp = packed_[b].mlp.mlp();
        const int64_t rows = of.rows, padded = padded_to(column_multiple, rows);
        entries += of.entries;
        T** activations = activations_.data() + b * most_layers;
        for (int64_t l = 0; l < depth; ++l) {
          cost += rows * mlp.layers[l].in * mlp.layers[l].out;
          if (backward_ || l + 1 == depth) activations[l] = take(padded * mlp.layers[l].stride);
        }
        BranchChunk<T>& branch = branches_[b];
        branch = {};
        branch.mlp = mlp;
        branch.w = packed_[b].w;
        branch.x = x_;
        branch.row_begin = arguments_.rows.row_begin;
        branch.column_of = arguments_.rows.column;
        branch.rows = rows;
        branch.each_once = rows == of.entries;
        branch.graphs = graphs;
        branch.parts = arguments_.parts.number;
        branch.source = joint ? of.parts.data() : of.source.data();
        branch.row = of.row.data();
        branch.ptr = of.ptr.data();
        branch.count = seg_.count ? of.count.data() : nullptr;
        branch.activations = activations;
        if (backward_) {
          branch.inputs = take(padded * padded_to(row_multiple, model_.features));
          branch.columns = reinterpret_cast<int32_t*>(take((rows / mlp_tile_rows + 1) * (model_.features + 1)));
        }
        branch.beta = take(padded);
        branch.mass = take(padded);
        branch.top = take(graphs);
        branch.scale = take(graphs);
        branch.dz = take(backward_ && !branch.each_once ? padded * padded_width() : 0);
        branch.shift = take(backward_ && !branch.each_once ? padded : 0);
        branch.dx = dx_ ? take(padded * mlp.layers[0].below) : nullptr;
      }
      threads_ = threads_for((backward_ ? 3 : 1) * cost + (backward_ ? 8 : 4) * entries * model_.width());
      if (used > capacity_) {
        capacity_ = used + used / 4;
        memory_ = arena.take<T>(capacity_);
      }
    }
  }

  std::vector<BranchEntries>& entries_;
  T* dx_;
  int64_t chunk_rows_;
  bool chosen_;                   // the entries are those of all graphs, a single chunk, already
  bool long_ = false;             // the chunk is one graph, processed piece by piece
  std::vector<double> sums_;      // of its branches: the largest logit, the denominator, [h] sums
  std::vector<T> piece_readout_;  // of a piece, [(R + 1) * h]
  T* long_readout_ = nullptr;
  std::vector<BranchChunk<T>> branches_;
  std::vector<T*> activations_;
  T* memory_ = nullptr;
  int64_t capacity_ = 0;
  std::vector<T> partial_;
};

}  // namespace spin_fast
