// distinct_rows: which rows of a branch are equal, and how often each graph has each.
//
// Rows are equal if their bits are, -0 read as +0. A hash only proposes, but for rows of one word. They are numbered in
// the order of the nodes, by one thread a branch, so neither the number of threads nor that of chunks changes the
// result.

#include "distinct.h"

#include <atomic>
#include <bit>
#include <type_traits>
#include <utility>
#include <vector>

#include "patterns.h"

namespace spin_fast {
namespace {

constexpr int64_t rows_at_once = 1024;       // after which the table may grow
constexpr int64_t dense_bytes = 256;         // of a row that may be sparse
constexpr int64_t pattern_bytes = 64 << 20;  // of patterns that are remembered, and their sources

// An array with room for all that may come; pages that are never written take no memory.
template <class T>
class Filled {
 public:
  explicit Filled(int64_t room) : memory_(empty({room * static_cast<int64_t>(sizeof(T))}, ScalarType::Byte)) {}

  T* begin() const { return begin_; }
  int64_t size() const { return size_; }
  // Returns where `more` elements begin, to be written.
  T* add(int64_t more) {
    size_ += more;
    return begin_ + (size_ - more);
  }
  void free() {
    memory_ = empty({0}, ScalarType::Byte);
    begin_ = nullptr;
    size_ = 0;
  }

 private:
  Tensor memory_;
  T* begin_ = reinterpret_cast<T*>(memory_.mutable_data_ptr<uint8_t>());
  int64_t size_ = 0;
};

// What is found of a branch so far; its rows are numbered from 0.
template <class W, class I>
struct Store {
  Filled<W> rows;                    // [U, d], or of sparse rows the values [nnz]
  Filled<uint32_t> hashes;           // [U], to make a larger table from
  Filled<int64_t> lists;             // [G] entries of each graph
  Filled<I> index;                   // [nnz]
  Filled<int32_t> count;             // [nnz]
  Filled<I> row_of_node;             // [N], if wanted
  Filled<int64_t> row_begin;         // [U + 1], of the values of sparse rows
  Filled<int32_t> column;            // [nnz]
  int64_t size = 0;                  // U
  std::vector<uint64_t> slots = {};  // at most half of them taken
  std::vector<int32_t> row_of_column = {};

  // Makes room for so many rows more.
  void grow_table(int64_t more) {
    const int64_t rows = size + more, slots_of_row = rows < 1 << 13 ? 4 : 2;  // more where that is little memory
    const uint64_t needed = std::bit_ceil(static_cast<uint64_t>(slots_of_row * rows));
    if (needed <= slots.size()) return;
    slots = std::vector<uint64_t>();  // before there is another
    slots = std::vector<uint64_t>(needed);
    fill_slots(hashes.begin(), 0, size, slots.data(), needed - 1);
  }
};

// Writes the rows of n nodes, each once, ascending, and how often; returns how many. Rows from `known` on, which no
// graph before has, are numbered in the order of these nodes.
template <class I>
int64_t list_rows(const I* of_node, int64_t n, I known, I* row, int32_t* count) {
  struct Entry {
    I row;
    int32_t count;
  };
  constexpr int64_t spare = 8;  // counters for the other rows: one alone would be waited for
  const auto slots = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(2 * n)));
  const int shift = 64 - std::countr_zero(static_cast<uint64_t>(slots));
  char* const memory = thread_scratch(n * sizeof(Entry) + (slots + n) * sizeof(I) + (n + spare) * sizeof(int32_t));
  Entry* const entries = reinterpret_cast<Entry*>(memory);
  I *const slot = reinterpret_cast<I*>(entries + n), *const others = slot + slots;  // slot: 1 + the place of an entry
  int32_t* const of_new = reinterpret_cast<int32_t*>(others + n);
  std::memset(of_new, 0, (n + spare) * sizeof(int32_t));
  int64_t num_others = 0, num_new = 0;
  for (int64_t v = 0; v < n; ++v) {  // no conditional jumps, which would be mispredicted
    const int64_t place = of_node[v] - known, is_other = place < 0;
    ++of_new[(place & (is_other - 1)) | ((n + v % spare) & -is_other)];
    num_new = std::max(num_new, place + 1);
    others[num_others] = of_node[v];
    num_others += is_other;
  }
  std::memset(slot, 0, slots * sizeof(I));
  I size = 0;
  for (int64_t v = 0; v < num_others; ++v) {
    uint64_t at = static_cast<uint64_t>(others[v]) * 0x9e3779b97f4a7c15 >> shift;
    while (slot[at] && entries[slot[at] - 1].row != others[v]) at = (at + 1) & (slots - 1);
    if (!slot[at]) {
      entries[size] = {others[v], 0};
      slot[at] = ++size;
    }
    ++entries[slot[at] - 1].count;
  }
  std::sort(entries, entries + size, [](const Entry& a, const Entry& b) { return a.row < b.row; });
  for (I e = 0; e < size; ++e) row[e] = entries[e].row, count[e] = entries[e].count;
  for (int64_t e = 0; e < num_new; ++e) row[size + e] = known + static_cast<I>(e), count[size + e] = of_new[e];
  return size + num_new;
}

template <class W, class I>
class TypedDistinctRows final : public DistinctRows {
 public:
  TypedDistinctRows(int64_t branches, int64_t nodes, int64_t width, int64_t graphs, ScalarType value, bool node_rows,
                    int64_t hash_bits, RowLayout layout, const std::vector<Operator>& operators)
      : DistinctRows(layout, branches, width, sizeof(W)),
        value_(value),
        node_rows_(node_rows),
        nodes_left_(nodes),
        graphs_left_(graphs),
        hash_mask_(lowest_bits(hash_bits)),
        keys_(hash_keys(width)) {
    for (int64_t r = 0; r < branches; ++r)
      stores_.push_back({Filled<W>(nodes * width), Filled<uint32_t>(nodes), Filled<int64_t>(graphs), Filled<I>(nodes),
                         Filled<int32_t>(nodes), Filled<I>(node_rows ? nodes + short_list : 0),
                         Filled<int64_t>(nodes + 1), Filled<int32_t>(layout == RowLayout::dense ? 0 : nodes * width)});
    for (Store<W, I>& store : stores_) {
      *store.row_begin.add(1) = 0;
      if (width < one_hot_columns) store.row_of_column.assign(width, -1);
    }
    if constexpr (has_patterns) {
      if (operators.empty()) return;
      const int64_t bytes = branches * (sizeof(PatternBucket) + padded_to(column_multiple, width) * sizeof(double));
      const int64_t room = std::min(nodes, pattern_bytes / bytes);
      if (!NodePatterns::pay_for(width, room)) return;
      patterns_.emplace(arena_, width, operators, (branches - 1) / static_cast<int64_t>(operators.size()), room);
      row_of_pattern_.resize(branches);
    }
  }

  void add(const void* powers, const int64_t* ptr, int64_t graphs) override {
    const int64_t nodes = ptr[graphs];
    begin_change(nodes, graphs);
    const W* rows = static_cast<const W*>(powers);
    if (layout == RowLayout::chosen && nodes > 0) choose_layout(rows, nodes, ptr);
    for_each_branch(nodes, ptr, graphs, [&](int64_t b, I* row_of_node) {
      return number(stores_[b], rows + b * nodes * width, nodes, row_of_node);
    });
    end_change(nodes, graphs);
  }

  bool add(const GraphRange& graphs) override {
    if constexpr (has_patterns) {
      if (layout == RowLayout::chosen && width * bytes < dense_bytes) layout = RowLayout::dense;
      if (!patterns_ || layout == RowLayout::chosen) return false;  // all rows of the first graph tell the layout
      const int64_t nodes = graphs.nodes();
      begin_change(nodes, graphs.graphs);
      if (!patterns_->add(graphs)) {
        end_change(0, 0);
        return false;
      }
      std::vector<int64_t> ptr(graphs.graphs + 1);
      for (int64_t g = 0; g <= graphs.graphs; ++g) ptr[g] = graphs.ptr[g] - graphs.ptr[0];
      for_each_branch(nodes, ptr.data(), graphs.graphs, [&](int64_t b, I* row_of_node) {
        const int64_t hop = patterns_->hop_of(b), fresh = patterns_->fresh(hop), first = patterns_->first_fresh(hop);
        std::vector<I>& row_of_pattern = row_of_pattern_[b];
        row_of_pattern.resize(first + fresh);
        const W* rows = reinterpret_cast<const W*>(patterns_->rows(b));
        if (!number(stores_[b], rows, fresh, row_of_pattern.data() + first)) return false;
        const int32_t* pattern = patterns_->of_nodes(hop);
        for (int64_t v = 0; v < nodes; ++v) row_of_node[v] = row_of_pattern[pattern[v]];
        return true;
      });
      end_change(nodes, graphs.graphs);
      return true;
    }
    return false;
  }

  int64_t num_rows() const override {
    int64_t sum = 0;
    for (const Store<W, I>& store : stores_) sum += store.size;
    return sum;
  }

  std::optional<std::pair<Tensor, Tensor>> take_indices() override {
    if (!is_sparse()) return std::nullopt;
    begin_change(0, 0);
    const int64_t values = size_of(&Store<W, I>::rows);
    if (values > INT32_MAX || sparse_bytes(values, num_rows()) >= num_rows() * width * bytes) {
      make_dense();
      end_change(0, 0);
      return std::nullopt;
    }
    Tensor crow = empty({num_rows() + 1}, ScalarType::Int), col = empty({values}, ScalarType::Int);
    int32_t* end = crow.mutable_data_ptr<int32_t>();
    int64_t begin = *end = 0;
    for (Store<W, I>& store : stores_) {
      for (int64_t u = 1; u <= store.size; ++u) *++end = static_cast<int32_t>(begin + store.row_begin.begin()[u]);
      begin += store.rows.size();
      store.row_begin.free();
    }
    move_to(col.mutable_data_ptr<int32_t>(), &Store<W, I>::column, [](int64_t, int32_t column) { return column; });
    end_change(0, 0);
    return std::pair(crow, col);
  }

  DistinctTensors take() override {
    begin_change(0, 0);
    Tensor row_ptr = empty({branches + 1}, ScalarType::Long);
    int64_t* first_row = row_ptr.mutable_data_ptr<int64_t>();
    first_row[0] = 0;
    for (int64_t r = 0; r < branches; ++r) {
      first_row[r + 1] = first_row[r] + stores_[r].size;
      stores_[r].size = 0;
      std::vector<uint64_t>().swap(stores_[r].slots);
      stores_[r].hashes.free();
    }
    const auto same = [](int64_t, auto value) { return value; };
    const auto of_all = [&](int64_t branch, I row) { return static_cast<I>(first_row[branch] + row); };
    Tensor rows =
        is_sparse() ? empty({size_of(&Store<W, I>::rows)}, value_) : empty({first_row[branches], width}, value_);
    move_to(static_cast<W*>(rows.mutable_data_ptr()), &Store<W, I>::rows, same);
    Tensor ptr = empty({size_of(&Store<W, I>::lists) + 1}, ScalarType::Long);
    int64_t* ends = ptr.mutable_data_ptr<int64_t>();
    *ends = 0;
    move_to(ends + 1, &Store<W, I>::lists, same);
    std::partial_sum(ends, ends + ptr.numel(), ends);
    Tensor index = empty({size_of(&Store<W, I>::index)}, index_type);
    move_to(index.mutable_data_ptr<I>(), &Store<W, I>::index, of_all);
    Tensor count = empty({index.numel()}, ScalarType::Int);
    move_to(count.mutable_data_ptr<int32_t>(), &Store<W, I>::count, same);
    Tensor row_of_node = empty({branches, stores_[0].row_of_node.size()}, index_type);
    move_to(row_of_node.mutable_data_ptr<I>(), &Store<W, I>::row_of_node, of_all);
    end_change(nodes_left_, graphs_left_);
    return {rows, row_ptr, ptr, index, count, row_of_node};
  }

 private:
  static constexpr bool has_patterns = sizeof(W) >= 4;
  using NodePatterns = Patterns<std::conditional_t<sizeof(W) == 8, double, float>, double>;

  // Runs f(branch, the rows of its nodes, to be written), which returns whether they can be numbered, and then lists
  // the rows of each graph. A thread numbers those of the branches that it had last time, whose tables are in its
  // caches, and then others' that are left; lists are made by whoever has time.
  template <class F>
  void for_each_branch(int64_t nodes, const int64_t* ptr, int64_t graphs, F f) {
    const int64_t room = nodes + short_list;
    if (!node_rows_) rows_of_nodes_.resize(branches * room);
    struct Branch {
      I* row_of_node;
      int64_t known;
      std::atomic<bool> taken = false, numbered = false, listed = false;
    };
    std::vector<Branch> of(branches);
    for (int64_t b = 0; b < branches; ++b) {
      of[b].row_of_node = node_rows_ ? stores_[b].row_of_node.add(nodes) : rows_of_nodes_.data() + b * room;
      of[b].known = stores_[b].size;
    }
    std::atomic<bool> failed = false, fits = true;
    const int64_t threads = std::min(branches, threads_for(nodes * branches * search_cost(width)));
    parallel_ranges(
        threads,
        [&](int64_t first, int64_t) {
          // The last one first, which has the most rows.
          const auto branch = [&](int64_t i) { return branches - 1 - (i + first * branches / threads) % branches; };
          for (int64_t i = 0; i < branches; ++i) {
            const int64_t b = branch(i);
            if (of[b].taken.exchange(true)) continue;
            try {
              of[b].numbered = f(b, of[b].row_of_node);
            } catch (...) {
              failed = true;  // others would wait
              throw;
            }
            if (!of[b].numbered) failed = true, fits = false;
          }
          for (int64_t left = branches; left > 0 && !failed;) {
            left = 0;
            for (int64_t i = 0; i < branches; ++i) {
              const int64_t b = branch(i);
              left += !of[b].listed;
              if (of[b].numbered && !of[b].listed.exchange(true))
                list(stores_[b], of[b].known, ptr, graphs, of[b].row_of_node);
            }
            if (left > 0) wait_briefly();
          }
        },
        threads);
    require(fits, "powers must have fewer than 2^", slot_number_bits, " distinct rows in a branch");
  }

  // Numbers rows of a branch, and keeps those that are new; false if there are too many.
  bool number(Store<W, I>& store, const W* rows, int64_t nodes, I* row_of_node) const {
    const auto kernels = isa_kernels<DistinctKernels<W, I>>();
    for (int64_t v = 0; v < nodes; v += rows_at_once) {
      const int64_t n = std::min(rows_at_once, nodes - v);
      if (store.size + n >= int64_t{1} << slot_number_bits) return false;
      store.grow_table(n);
      const KnownRows<W> known = {keys_.data(),
                                  hash_mask_,
                                  width,
                                  store.rows.begin(),
                                  is_sparse() ? store.row_begin.begin() : nullptr,
                                  store.column.begin(),
                                  store.hashes.begin(),
                                  store.slots.data(),
                                  store.slots.size() - 1,
                                  store.size,
                                  store.row_of_column.empty() ? nullptr : store.row_of_column.data()};
      const int64_t fresh = kernels.number(known, rows + v * width, n, row_of_node + v, nullptr);
      store.size += fresh;
      store.hashes.add(fresh);
      if (!is_sparse()) {
        store.rows.add(fresh * width);
        continue;
      }
      store.row_begin.add(fresh);
      const int64_t values = store.row_begin.begin()[store.size] - store.rows.size();
      store.rows.add(values);
      store.column.add(values);
    }
    return true;
  }

  // Keeps the entries of each graph, in the order of their rows, of which so many were known before these graphs.
  void list(Store<W, I>& store, int64_t known, const int64_t* ptr, int64_t graphs, const I* row_of_node) const {
    const auto kernels = isa_kernels<DistinctKernels<W, I>>();
    int64_t* const sizes = store.lists.add(graphs);
    for (int64_t g = 0; g < graphs; ++g) {
      const int64_t n = ptr[g + 1] - ptr[g];
      I* const row = store.index.begin() + store.index.size();
      int32_t* const count = store.count.begin() + store.count.size();
      sizes[g] = n <= short_list ? kernels.list_rows(row_of_node + ptr[g], n, row, count)
                                 : list_rows(row_of_node + ptr[g], n, static_cast<I>(known), row, count);
      if (sizes[g] > 0) known = std::max<int64_t>(known, row[sizes[g] - 1] + 1);
      store.index.add(sizes[g]);
      store.count.add(sizes[g]);
    }
  }

  // A change that fails in between leaves nothing of use.
  void begin_change(int64_t nodes, int64_t graphs) {
    require(is_whole_, "rows cannot be used after a failure");
    require(nodes <= nodes_left_, "powers must have at most the ", nodes_left_, " nodes that are left, got ", nodes);
    require(graphs <= graphs_left_, "ptr must have at most the ", graphs_left_, " graphs that are left, got ", graphs);
    is_whole_ = false;
  }

  void end_change(int64_t nodes, int64_t graphs) {
    nodes_left_ -= nodes;
    graphs_left_ -= graphs;
    is_whole_ = true;
  }

  int64_t sparse_bytes(int64_t values, int64_t rows) const { return values * (bytes + 4) + rows * 4; }

  void choose_layout(const W* powers, int64_t nodes, const int64_t* ptr) {
    layout = RowLayout::dense;
    if (width * bytes < dense_bytes) return;
    while (ptr[1] == 0) ++ptr;
    const auto kernels = isa_kernels<DistinctKernels<W, I>>();
    int64_t values = 0;
    for (int64_t b = 0; b < branches; ++b)
      for (int64_t v = 0; v < ptr[1]; ++v) values += kernels.nonzeros(powers + (b * nodes + v) * width, width);
    const int64_t rows = branches * ptr[1];
    if (4 * sparse_bytes(values, rows) <= rows * width * bytes) layout = RowLayout::sparse;
  }

  void make_dense() {
    for (Store<W, I>& store : stores_) {
      Filled<W> dense(store.size * width);
      W* const row = dense.add(store.size * width);
      const int64_t* begin = store.row_begin.begin();
      parallel_items(store.size, store.size * width, [&](int64_t from, int64_t to) {
        std::fill(row + from * width, row + to * width, W{0});
        for (int64_t u = from; u < to; ++u)
          for (int64_t e = begin[u]; e < begin[u + 1]; ++e)
            row[u * width + store.column.begin()[e]] = store.rows.begin()[e];
      });
      store.rows = std::move(dense);
      store.row_begin.free();
      store.column.free();
    }
    layout = RowLayout::dense;
  }

  static constexpr ScalarType index_type = std::is_same_v<I, int32_t> ? ScalarType::Int : ScalarType::Long;

  template <class T>
  int64_t size_of(Filled<T> Store<W, I>::* array) const {
    int64_t sum = 0;
    for (const Store<W, I>& store : stores_) sum += (store.*array).size();
    return sum;
  }

  // Writes the arrays of all branches one after the other, each freed before the next is touched.
  template <class T, class F>
  void move_to(T* to, Filled<T> Store<W, I>::* array, F change) {
    for (size_t r = 0; r < stores_.size(); ++r) {
      Filled<T>& from = stores_[r].*array;
      const T* values = from.begin();
      parallel_items(from.size(), from.size(), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) to[i] = change(r, values[i]);
      });
      to += from.size();
      from.free();
    }
  }

  std::vector<Store<W, I>> stores_;
  ScalarType value_;
  bool node_rows_;
  int64_t nodes_left_, graphs_left_;
  bool is_whole_ = true;
  uint64_t hash_mask_;
  std::vector<uint32_t> keys_;
  Arena arena_;
  std::optional<NodePatterns> patterns_;
  std::vector<std::vector<I>> row_of_pattern_;  // of each branch
  std::vector<I> rows_of_nodes_;                // [branches, nodes + short_list] of the chunk, where not kept
};

DistinctTensors distinct_rows(const Tensor& powers, const Tensor& ptr, bool wide_index, int64_t hash_bits,
                              bool check_invariants) {
  check_distinct(powers, ptr, wide_index, hash_bits);
  const int64_t* offsets = ptr.const_data_ptr<int64_t>();
  const int64_t graphs = ptr.numel() - 1;
  if (check_invariants) refuse_if(check_offsets("ptr", offsets, graphs, powers.size(1), "nodes"));
  const auto found = make_distinct_rows(powers.size(0), powers.size(1), powers.size(2), graphs, powers.scalar_type(),
                                        wide_index, true, hash_bits, RowLayout::dense, {});
  found->add(powers.const_data_ptr(), offsets, graphs);
  return found->take();
}

}  // namespace

std::unique_ptr<DistinctRows> make_distinct_rows(int64_t branches, int64_t nodes, int64_t width, int64_t graphs,
                                                 ScalarType value, bool wide_index, bool node_rows, int64_t hash_bits,
                                                 RowLayout layout, const std::vector<Operator>& operators) {
  require(branches >= 1, "branches must be at least 1, got ", branches);
  require(branches <= most_branches, "branches must be at most ", most_branches, ", got ", branches);
  require(nodes >= 0, "nodes must be at least 0, got ", nodes);
  require(width >= 0, "width must be at least 0, got ", width);
  require(graphs >= 0, "graphs must be at least 0, got ", graphs);
  constexpr int64_t most_bytes = 8;  // of what is kept of a value, a node or a graph
  product_of("nodes", nodes, product_of("width", std::max<int64_t>(width, 1), most_bytes));
  product_of("graphs", graphs, most_bytes);
  std::unique_ptr<DistinctRows> found;
  dispatch_words(value, [&]<class W>(Tag<W>) {
    dispatch_index(wide_index ? ScalarType::Long : ScalarType::Int, [&]<class I>(Tag<I>) {
      found = std::make_unique<TypedDistinctRows<W, I>>(branches, nodes, width, graphs, value, node_rows, hash_bits,
                                                        layout, operators);
    });
  });
  return found;
}

STABLE_TORCH_LIBRARY_IMPL(spin_fast, CPU, m) { m.impl("distinct_rows", TORCH_BOX(&distinct_rows)); }

}  // namespace spin_fast
