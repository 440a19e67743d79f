// EvaluatedRows: a table of the rows of each branch that have been met, and what the MLP has made of them; and
// class_scores, the classifier on the readouts.
//
// Rows are equal if their bits are, -0 read as +0. A branch whose rows hardly repeat goes without the table for some
// chunks. Neither that nor the number of threads changes a result: with finite weights a row's activations do not
// depend on the rows that go through the MLP beside it, and a graph's nodes are summed up in their order.

#include "evaluated.h"

#include <array>
#include <type_traits>
#include <utility>
#include <vector>

#include "branch_pass.h"
#include "distinct.h"

namespace spin_fast {
namespace {

constexpr int64_t rows_at_once = 1024;  // after which it is seen whether the table pays
constexpr int64_t rows_without = 64 * rows_at_once;
constexpr uint64_t first_slots = 4 * rows_at_once;
constexpr size_t most_spare = 4;  // arenas that a thread keeps

template <class T>
class TypedEvaluatedRows final : public EvaluatedRows {
  using W = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  static constexpr ScalarType dtype = sizeof(T) == 4 ? ScalarType::Float : ScalarType::Double;

 public:
  TypedEvaluatedRows(const Model& of, const T* parameters, int64_t room, const std::vector<Operator>& operators)
      : EvaluatedRows(of, room, sizeof(T)), operators_(operators), keys_(hash_keys(model.features)) {
    if (std::vector<Arena>& of_thread = spare(); !of_thread.empty()) {
      arena_ = std::move(of_thread.back());
      of_thread.pop_back();
    }
    arena_.clear();
    if (!operators.empty() && Patterns<T, T>::pay_for(model.features, room))
      patterns_.emplace(arena_, model.features, operators, num_hops(), room);
    for (int64_t b = 0; b < model.branches; ++b)
      branches_.emplace_back(arena_, PackedBranch<T>(arena_, model, b, parameters, false), room, keys_);
    for (size_t l = 0; l < model.widths.size(); ++l) row_cost_ += model.below(l) * model.widths[l];
  }

  ~TypedEvaluatedRows() override {
    if (spare().size() < most_spare) spare().push_back(std::move(arena_));
  }

  void readout(const void* powers, const int64_t* ptr, int64_t graphs, void* out) override {
    const int64_t size = ptr[graphs] * model.features;
    columns_.clear();
    make_room(ptr[graphs]);
    readout_of_nodes([&](int64_t b) { return static_cast<const T*>(powers) + b * size; }, 0, ptr, graphs, out);
  }

  void readout(const GraphRange& graphs, void* out) override {
    require(!operators_.empty(), "rows must have operators, to take graphs");
    const int64_t nodes = graphs.nodes();
    const T* x = static_cast<const T*>(graphs.x) + graphs.ptr[0] * model.features;
    if (!hops_) hops_ = arena_.take<T>((model.branches - 1) * room * model.features);
    make_room(nodes);
    choose_columns(x, nodes, search(0, x, nodes, number_.data(), false));
    const auto width = static_cast<int64_t>(columns_.empty() ? model.features : columns_.size());
    GraphRange of_columns = graphs;
    if (!columns_.empty()) of_columns.x = narrow_.get() - graphs.ptr[0] * width;
    write_hops(of_columns, operators_, num_hops(), width, model.features, dtype, hops_);
    readout_of_nodes([&](int64_t b) { return b ? hops_ + (b - 1) * nodes * width : x; }, 1, ptr_of(graphs).data(),
                     graphs.graphs, out);
  }

  bool readout_by_patterns(const GraphRange& graphs, void* out) override {
    const int64_t nodes = graphs.nodes();
    if (!patterns_) return false;
    columns_.clear();
    make_room(nodes);
    if (!patterns_->add(graphs)) {
      is_whole_ = true;
      return false;
    }
    const int64_t threads = threads_for_nodes(nodes);
    const auto rows = [&](int64_t b) { return patterns_->rows(b); };
    parallel_branches(model.branches, 1, threads, [&](int64_t b, int64_t) {
      const int64_t hop = patterns_->hop_of(b);
      int32_t* const of_pattern = branches_[b].row_of_pattern;
      search(b, rows(b), patterns_->fresh(hop), of_pattern + patterns_->first_fresh(hop), true);
      const int32_t* pattern = patterns_->of_nodes(hop);
      for (int64_t v = 0; v < nodes; ++v) number_[b * nodes + v] = of_pattern[pattern[v]];
    });
    readout_of_rows(rows, ptr_of(graphs).data(), graphs.graphs, threads, out);
    return true;
  }

 private:
  // Memory that the thread keeps for its next ones: page faults would cost as much as the readouts of some chunks.
  static std::vector<Arena>& spare() {
    thread_local std::vector<Arena> arenas;
    return arenas;
  }

  int64_t num_hops() const { return (model.branches - 1) / static_cast<int64_t>(operators_.size()); }

  static std::vector<int64_t> ptr_of(const GraphRange& graphs) {
    std::vector<int64_t> ptr(graphs.ptr, graphs.ptr + graphs.graphs + 1);
    for (int64_t& node : ptr) node -= graphs.ptr[0];
    return ptr;
  }

  int64_t threads_for_nodes(int64_t nodes) const { return threads_for(model.branches * nodes * row_cost_); }

  // A column that is 0 in all nodes of a chunk is 0 in its hops, too. Where these rows are not compared, and half of
  // the columns or more are such, the hops are made of the other ones, columns_, of x. One alone is not taken: its sums
  // may be rounded otherwise. `known`: rows of x lie in the table, too, of which few are read again and again.
  void choose_columns(const T* x, int64_t nodes, bool known) {
    const int64_t width = model.features;
    columns_.clear();
    const bool compared = std::any_of(branches_.begin() + 1, branches_.end(), [](auto& of) { return of.without == 0; });
    if (compared || width <= column_multiple) return;
    columns_.resize(width);
    used_.resize(width);
    const auto kernels = isa_kernels<BranchKernels<T>>();
    std::vector<int64_t> of_nodes, met;  // numbers of rows of x, of which few are met
    if (known) {
      of_nodes.assign(number_.begin(), number_.begin() + nodes);
      std::vector<char> is_met(branches_[0].num_known);
      for (const int64_t u : of_nodes)
        if (!std::exchange(is_met[u], 1)) met.push_back(u);
      x = reinterpret_cast<const T*>(branches_[0].known.rows);
    }
    const auto rows = static_cast<int64_t>(known ? met.size() : nodes);
    const int64_t number =
        kernels.nonzero_columns(x, known ? met.data() : nullptr, rows, width, used_.data(), columns_.data());
    columns_.resize(number < 2 || 2 * number > width ? 0 : number);
    if (!columns_.empty())
      kernels.narrow_rows(x, known ? of_nodes.data() : nullptr, nodes, width, columns_.data(), number,
                          narrow_.of(nodes * number));
  }

  // The readouts of nodes, whose rows(branch) are one after the other. Those of the first `searched` have numbers.
  template <class Rows>
  void readout_of_nodes(Rows rows, int64_t searched, const int64_t* ptr, int64_t graphs, void* out) {
    const int64_t nodes = ptr[graphs], threads = threads_for_nodes(nodes);
    parallel_branches(model.branches - searched, 1, threads, [&](int64_t b, int64_t) {
      search(b + searched, rows(b + searched), nodes, number_.data() + (b + searched) * nodes, false);
    });
    readout_of_rows(rows, ptr, graphs, threads, out);
  }

  // The readouts of the nodes, whose rows have numbers; those that are new go through the MLP of their branch.
  template <class Rows>
  void readout_of_rows(Rows rows, const int64_t* ptr, int64_t graphs, int64_t threads, void* out) {
    graph_values_.resize(2 * model.branches * graphs);
    std::vector<BranchChunk<T>> chunks;
    std::vector<std::array<T*, most_layers>> activations(model.branches);
    for (int64_t b = 0; b < model.branches; ++b) {
      BranchChunk<T> chunk = chunk_of(b, rows(b), activations[b].data());
      chunk.ptr = ptr;
      chunk.graphs = graphs;
      chunk.top = graph_values_.data() + 2 * b * graphs;
      chunk.scale = chunk.top + graphs;
      chunk.readout = static_cast<T*>(out) + b * model.width();
      chunk.readout_stride = model.readout_width();
      chunks.push_back(chunk);
    }
    evaluate_branches(
        chunks, [&](int64_t b) -> const Packed<T>& { return branches_[b].packed.mlp; }, task_rows, threads);
    for (Branch& of : branches_) of.known.size = of.num_known;
    is_whole_ = true;
  }

  struct Branch {
    Branch(Arena& arena, PackedBranch<T>&& its, int64_t room, const std::vector<uint32_t>& keys)
        : packed(std::move(its)) {
      const int64_t rows = room + column_multiple;  // the last are read by whole registers of rows
      z = arena.take<T>(rows * packed.mlp.layers.back().stride);
      beta = arena.take<T>(rows);
      mass = arena.take<T>(rows);
      row_of_pattern = arena.take<int32_t>(room);
      known = memory_for_rows<W>(arena, keys, room);
      known.hashes = arena.take<uint32_t>(room);
      most_slots = known.slot_mask + 1;
      known.slot_mask = std::min(most_slots, first_slots) - 1;
      forget();
    }

    // The layers for rows of these columns.
    const Layer<T>* layers_of(const std::vector<int32_t>& columns) {
      some_columns = packed.mlp.layers;
      Layer<T>& first = some_columns[0];
      first.in = static_cast<int64_t>(columns.size());
      some_weights.clear();
      for (const int32_t k : columns) {
        const T* of = first.weight + k * first.stride;
        some_weights.insert(some_weights.end(), of, of + first.stride);
      }
      first.weight = some_weights.data();
      return some_columns.data();
    }

    void forget() {
      forget_rows(known);
      num_known = 0;
      not_in_table.clear();
    }

    // Makes room for so many rows more than these: clearing slots that are not needed takes longer than to fill anew.
    void grow_table(KnownRows<W>& rows, int64_t more) {
      const uint64_t needed = std::bit_ceil(static_cast<uint64_t>(2 * (rows.size + more)));
      if (needed <= rows.slot_mask + 1) return;
      known.slot_mask = rows.slot_mask = std::min(most_slots, 4 * needed) - 1;
      std::memset(rows.slots, 0, (rows.slot_mask + 1) * sizeof(uint64_t));
      int64_t begin = 0;
      for (const auto& [first, end] : not_in_table) {
        fill_slots(rows.hashes, begin, first, rows.slots, rows.slot_mask);
        begin = end;
      }
      fill_slots(rows.hashes, begin, rows.size, rows.slots, rows.slot_mask);
    }

    PackedBranch<T> packed;
    std::vector<Layer<T>> some_columns;
    std::vector<T> some_weights;
    T *z, *beta, *mass;       // [room, stride], [room], [room]
    int32_t* row_of_pattern;  // [room]
    KnownRows<W> known;
    uint64_t most_slots;
    int64_t num_fresh = 0;                                  // of this chunk
    int64_t num_known = 0;                                  // after it
    int64_t without = 0;                                    // rows to come for which the table is left out
    std::vector<std::pair<int64_t, int64_t>> not_in_table;  // ranges of known rows that came then
  };

  // Makes room for the next chunk, whatever a failure has left.
  void make_room(int64_t nodes) {
    number_.resize(model.branches * nodes);
    fresh_.resize(model.branches * nodes);
    nodes_ = nodes;
    for (int64_t b = 0; b < model.branches; ++b)
      if (Branch& of = branches_[b]; !is_whole_ || of.known.size + nodes > room) {
        of.forget();
        if (patterns_) patterns_->forget(patterns_->hop_of(b));  // which have numbers of rows
      }
    is_whole_ = false;
  }

  // Numbers rows of a branch: by the table, or each anew while that does not pay; returns whether all are in the table.
  // What becomes of the others is kept for later chunks only with `keep`.
  bool search(int64_t b, const T* values, int64_t nodes, int32_t* number, bool keep) {
    Branch& of = branches_[b];
    const W* rows = reinterpret_cast<const W*>(values);
    int64_t* fresh = fresh_.data() + b * nodes_;
    KnownRows<W> known = of.known;
    int64_t v = 0;
    for (; v < nodes && of.without == 0; v = std::min(nodes, v + rows_at_once)) {
      const int64_t n = std::min(rows_at_once, nodes - v);
      of.grow_table(known, n);
      const int64_t found =
          isa_kernels<DistinctKernels<W, int32_t>>().number(known, rows + v * model.features, n, number + v, fresh);
      for (int64_t i = 0; i < found; ++i) fresh[i] += v;
      fresh += found;
      known.size += found;
      if ((n - found) * row_cost_ < n * search_cost(model.features)) of.without = rows_without;
    }
    of.num_known = known.size + (keep ? nodes - v : 0);
    of.num_fresh = known.size - of.known.size + (nodes - v);
    of.without = std::max<int64_t>(of.without - (nodes - v), 0);
    if (of.num_known > known.size) of.not_in_table.emplace_back(known.size, of.num_known);
    std::iota(number + v, number + nodes, static_cast<int32_t>(known.size));
    std::iota(fresh, fresh + (nodes - v), v);
    return v == nodes;
  }

  // The rows that have been met, and what has become of those before this chunk.
  BranchChunk<T> chunk_of(int64_t b, const T* rows, T** activations) {
    Branch& of = branches_[b];
    BranchChunk<T> chunk = {};
    chunk.mlp = of.packed.mlp.mlp();
    if (b && !columns_.empty()) {
      chunk.mlp.layers = of.layers_of(columns_);
      chunk.all_columns = true;
    }
    std::fill_n(activations, most_layers, nullptr);
    activations[chunk.mlp.depth - 1] = of.z;
    chunk.w = of.packed.w;
    chunk.x = rows;
    chunk.known = of.known.size;
    chunk.rows = of.known.size + of.num_fresh;
    chunk.parts = 1;
    chunk.source = fresh_.data() + b * nodes_;
    chunk.row = number_.data() + b * nodes_;
    chunk.activations = activations;
    chunk.beta = of.beta;
    chunk.mass = of.mass;
    return chunk;
  }

  // Of a row, in multiply-adds of the MLP.
  int64_t row_cost_ = 0;
  Arena arena_;
  T* hops_ = nullptr;             // [branches - 1, room, d], once they are needed
  std::vector<int32_t> columns_;  // of x that the hops of the chunk are made of; none where these are all
  Room<T> narrow_;                // [nodes, columns], those of x
  std::vector<T> used_;           // [d], scratch
  const std::vector<Operator> operators_;
  const std::vector<uint32_t> keys_;
  std::optional<Patterns<T, T>> patterns_;
  std::vector<Branch> branches_;
  bool is_whole_ = true;         // not what a failure has left
  int64_t nodes_ = 0;            // of the chunk
  std::vector<int32_t> number_;  // [branches, nodes] of the chunk: its row in the table
  std::vector<int64_t> fresh_;   // [branches, nodes]: those that go through the MLP
  std::vector<T> graph_values_;  // [branches, 2, graphs]
};

template <class T>
void class_scores(const Packed<T>& classifier, const T* readouts, int64_t graphs, T* scores) {
  const auto kernels = isa_kernels<BranchKernels<T>>();
  const Layer<T>&first = classifier.layers.front(), &last = classifier.layers.back();
  const int64_t wide = mlp_tile_rows * std::max(classifier.widest, first.below);
  int64_t cost = 0;
  for (const Layer<T>& layer : classifier.layers) cost += layer.in * layer.out;
  parallel_tasks((graphs + mlp_tile_rows - 1) / mlp_tile_rows, threads_for(graphs * cost), [&](int64_t tile) {
    const int64_t begin = tile * mlp_tile_rows, n = std::min(mlp_tile_rows, graphs - begin);
    T* const memory = reinterpret_cast<T*>(thread_scratch(3 * wide * static_cast<int64_t>(sizeof(T))));
    T* activations[most_layers];
    for (size_t l = 0; l < classifier.layers.size(); ++l) activations[l] = memory + l % 2 * wide;
    const T* rows = readouts + begin * first.in;
    if (n % row_multiple)  // which is read whole
      rows = static_cast<const T*>(std::memcpy(memory + 2 * wide, rows, n * first.in * sizeof(T)));
    kernels.mlp_forward(classifier.mlp(), rows, first.in, n, activations);
    for (int64_t i = 0; i < n; ++i)
      std::copy_n(activations[classifier.layers.size() - 1] + i * last.stride, last.out,
                  scores + (begin + i) * last.out);
  });
}

}  // namespace

Tensor class_scores(const void* readouts, int64_t graphs, int64_t in, const void* parameters, ScalarType value,
                    const std::vector<int64_t>& widths, double slope) {
  Tensor scores = empty({graphs, widths.back()}, value);
  dispatch_compute(value, [&]<class T>(Tag<T>) {
    Arena arena;
    Packed<T> classifier;
    classifier.add_classifier(arena, static_cast<const T*>(parameters), 0, in, widths, slope, false);
    class_scores(classifier, static_cast<const T*>(readouts), graphs, scores.mutable_data_ptr<T>());
  });
  return scores;
}

std::unique_ptr<EvaluatedRows> make_evaluated_rows(const Model& model, const void* parameters, ScalarType value,
                                                   int64_t room, const std::vector<Operator>& operators) {
  require(room >= 0 && room < int64_t{1} << 31, "room must be at least 0 and below 2^31, got ", room);
  product_of("room", 2 * room, product_of("room", 8, std::max<int64_t>(model.features, 1)));
  product_of("room", 2 * room, product_of("room", 8, padded_to(column_multiple, model.width())));
  std::unique_ptr<EvaluatedRows> rows;
  dispatch_compute(value, [&]<class T>(Tag<T>) {
    rows = std::make_unique<TypedEvaluatedRows<T>>(model, static_cast<const T*>(parameters), room, operators);
  });
  return rows;
}

}  // namespace spin_fast
