// distinct_rows: which rows of a branch are equal, and how often each graph has each.
//
// A hash only proposes: rows are equal if their bits are, -0 read as +0. Who comes first does not depend on how the
// work is cut, into pieces of graphs or into chunks that come one after the other, so neither does the result on the
// number of threads or of chunks.

#include "distinct.h"

#include <atomic>
#include <bit>
#include <type_traits>
#include <utility>
#include <vector>

#include "../arguments.h"
#include "patterns.h"

namespace spin_fast {
namespace {

constexpr int64_t piece_nodes = 4096;        // a table of so many stays in the nearest caches
constexpr int64_t dense_bytes = 256;         // of a row that may be sparse
constexpr int64_t pattern_bytes = 64 << 20;  // of patterns that are remembered, and their sources

// Slots of a table for so many entries: a power of two.
int64_t table_size(int64_t entries) { return std::bit_ceil(static_cast<uint64_t>(2 * entries)); }

// Ranges of nodes, each of one graph and of at most piece_nodes.
struct GraphPieces {
  std::vector<int64_t> begin;     // [pieces + 1] nodes
  std::vector<int64_t> of_graph;  // [G + 1] pieces

  int64_t size() const { return begin.size() - 1; }
};

GraphPieces cut_graphs(const int64_t* ptr, int64_t graphs) {
  GraphPieces pieces;
  for (int64_t g = 0; g < graphs; ++g) {
    pieces.of_graph.push_back(pieces.begin.size());
    for (int64_t v = ptr[g]; v < ptr[g + 1]; v += piece_nodes) pieces.begin.push_back(v);
  }
  pieces.of_graph.push_back(pieces.begin.size());
  pieces.begin.push_back(ptr[graphs]);
  return pieces;
}

template <class I>
struct Entry {
  I row;
  int32_t count;
};

// Writes entries sorted by row, adding up those of equal rows; returns how many are left.
template <class I>
int64_t write_sorted(std::vector<Entry<I>>& entries, int64_t size, bool distinct, I* row, int32_t* count) {
  if (distinct && size <= short_list) {  // as many as are smaller is the place: no branch to mispredict
    for (int64_t i = 0; i < size; ++i) {
      int32_t place = 0;
      for (int64_t j = 0; j < size; ++j) place += entries[j].row < entries[i].row;
      row[place] = entries[i].row, count[place] = entries[i].count;
    }
    return size;
  }
  const auto less = [](const Entry<I>& a, const Entry<I>& b) { return a.row < b.row; };
  std::sort(entries.begin(), entries.begin() + size, less);
  int64_t left = 0;
  for (int64_t i = 0; i < size; ++i) {
    if (left > 0 && row[left - 1] == entries[i].row)
      count[left - 1] += entries[i].count;
    else
      row[left] = entries[i].row, count[left++] = entries[i].count;
  }
  return left;
}

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
};

// The search for the distinct rows of one branch in one chunk: its rows as bits W; numbers of nodes, entries and rows
// are of type I.
template <class W, class I>
struct BranchSearch {
  const W* rows;  // [N, d]
  int64_t width;  // d
  int64_t nodes;  // N
  const int64_t* ptr;
  int64_t graphs;
  const GraphPieces& pieces;
  const uint32_t* keys;
  uint64_t hash_mask;
  Store<W, I>& store;
  bool sparse;
  DistinctKernels<W, I> kernels;
  int64_t* sizes;        // [pieces] entries
  int64_t* rows_before;  // [pieces] rows that first appear in earlier pieces
  // As in RowSearch.
  uint64_t* hash;
  I* first_node;
  I* row;
  int32_t* count;
  I* row_of_node;

  RowSearch<W, I> row_search() const {
    const int64_t* const row_begin = sparse ? store.row_begin.begin() : nullptr;
    return {rows,
            width,
            keys,
            hash_mask,
            store.rows.begin(),
            row_begin,
            store.column.begin(),
            store.slots.data(),
            store.slots.size() - 1,
            hash,
            first_node,
            row,
            count,
            row_of_node};
  }

  template <class F>
  void for_each_entry(int64_t piece, F f) const {
    for (int64_t e = pieces.begin[piece]; e < pieces.begin[piece] + sizes[piece]; ++e) f(e);
  }

  template <class F>
  void for_pieces(F f) const {
    const auto cost = [&](int64_t piece) { return pieces.begin[piece]; };
    parallel_items(pieces.size(), nodes * (width + 16), cost, f);
  }

  // Finds the entries of each piece and the entry of each node, for now in row_of_node.
  void find_entries() const {
    const RowSearch<W, I> search = row_search();
    for_pieces([&](int64_t from, int64_t to) {
      for (int64_t b = from; b < to; ++b) {
        const int64_t begin = pieces.begin[b], end = pieces.begin[b + 1], size = table_size(end - begin);
        auto* hashes = reinterpret_cast<uint64_t*>(thread_scratch((end - begin) * 8 + size * sizeof(I)));
        sizes[b] = kernels.find_entries(search, begin, end, {hashes, reinterpret_cast<I*>(hashes + end - begin), size});
      }
    });
  }

  // Makes room for so many rows more.
  void grow_table(int64_t entries) const {
    std::vector<uint64_t>& slots = store.slots;
    const uint64_t size = table_size(store.size + entries), mask = size - 1;
    if (size <= slots.size()) return;
    slots = std::vector<uint64_t>();  // before there is another
    slots = std::vector<uint64_t>(size);
    parallel_items(store.size, store.size * 16, [&](int64_t begin, int64_t end) {
      for (int64_t u = begin; u < end; ++u) {
        const uint32_t h = store.hashes.begin()[u];
        uint64_t i = h & mask, free = 0;
        while (
            !__atomic_compare_exchange_n(&slots[i], &free, slot_tag(h) | u, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
          i = (i + 1) & mask, free = 0;
      }
    });
  }

  // Finds the slot of each entry, for now in `row`.
  void find_slots() const {
    const RowSearch<W, I> search = row_search();
    for_pieces([&](int64_t from, int64_t to) {
      for (int64_t b = from; b < to; ++b) {
        if (b + 1 < to)
          for_each_entry(b + 1, [&](int64_t e) { __builtin_prefetch(&store.slots[hash[e] & search.slot_mask]); });
        kernels.find_slots(search, pieces.begin[b], pieces.begin[b] + sizes[b]);
      }
    });
  }

  uint64_t& slot_of(int64_t entry) const { return store.slots[static_cast<std::make_unsigned_t<I>>(row[entry])]; }

  // Numbers the rows that are new by first appearance, and keeps them.
  void number_rows(std::vector<I>& entry_of_row) const {
    entry_of_row.clear();
    for (int64_t b = 0; b < pieces.size(); ++b) {
      rows_before[b] = store.size + entry_of_row.size();
      if (b + 1 < pieces.size()) for_each_entry(b + 1, [&](int64_t e) { __builtin_prefetch(&slot_of(e)); });
      for_each_entry(b, [&](int64_t e) {
        uint64_t& slot = slot_of(e);
        if (slot & slot_claimed) {
          slot = slot_tag_in(slot) | (store.size + entry_of_row.size());
          entry_of_row.push_back(static_cast<I>(e));
        }
        row[e] = static_cast<I>(slot_number(slot));
      });
    }
    const int64_t fresh = entry_of_row.size();
    const auto row_of = [&](int64_t u) { return rows + first_node[entry_of_row[u]] * width; };
    W* distinct = sparse ? nullptr : store.rows.add(fresh * width);
    uint32_t* hashes = store.hashes.add(fresh);
    store.size += fresh;
    parallel_items(fresh, fresh * (width + 4), [&](int64_t begin, int64_t end) {
      for (int64_t u = begin; u < end; ++u) {
        if (!sparse) std::transform(row_of(u), row_of(u) + width, distinct + u * width, positive_zero<W>);
        hashes[u] = static_cast<uint32_t>(hash[entry_of_row[u]]);
      }
    });
    if (!sparse || fresh == 0) return;
    int64_t* end = store.row_begin.add(fresh);
    parallel_items(fresh, fresh * width, [&](int64_t from, int64_t to) {
      for (int64_t u = from; u < to; ++u) end[u] = kernels.nonzeros(row_of(u), width);
    });
    std::partial_sum(end - 1, end + fresh, end - 1);
    const int64_t begin = store.rows.size(), more = end[fresh - 1] - begin;
    W* value = store.rows.add(more) - begin;
    int32_t* column = store.column.add(more) - begin;
    parallel_items(fresh, fresh * width, [&](int64_t from, int64_t to) {
      for (int64_t u = from; u < to; ++u) kernels.pack_row(row_of(u), width, value + end[u - 1], column + end[u - 1]);
    });
  }

  // Gives each entry its row, in `row`, and each node its entry.
  void find_rows(std::vector<I>& entry_of_row) const {
    find_entries();
    grow_table(std::accumulate(sizes, sizes + pieces.size(), int64_t{0}));
    find_slots();
    number_rows(entry_of_row);
  }

  // Gives each node its row; writes the entries of each graph, sorted by row, where its nodes begin, and how many.
  void list_entries(int64_t* list_sizes) const {
    const auto cost = [&](int64_t graph) { return ptr[graph]; };
    parallel_items(graphs, nodes * 16, cost, [&](int64_t from, int64_t to) {
      std::vector<Entry<I>> known, fresh;
      for (int64_t g = from; g < to; ++g) {
        for (int64_t v = ptr[g]; v < ptr[g + 1]; ++v) row_of_node[v] = row[row_of_node[v]];
        known.resize(std::max<size_t>(known.size(), ptr[g + 1] - ptr[g]));
        fresh.resize(known.size());
        // Rows that no earlier graph has are in order already, unless pieces share them.
        const int64_t first = pieces.of_graph[g], last = pieces.of_graph[g + 1];
        const bool one_piece = last - first <= 1;
        const int64_t ordered = one_piece && last > first ? rows_before[first] : INT64_MAX;
        int64_t num_known = 0, num_fresh = 0;
        for (int64_t b = first; b < last; ++b)
          for_each_entry(b, [&](int64_t e) {
            known[num_known] = fresh[num_fresh] = {row[e], count[e]};
            num_known += row[e] < ordered;
            num_fresh += row[e] >= ordered;
          });
        int64_t size = write_sorted(known, num_known, one_piece, row + ptr[g], count + ptr[g]);
        for (int64_t i = 0; i < num_fresh; ++i, ++size)
          row[ptr[g] + size] = fresh[i].row, count[ptr[g] + size] = fresh[i].count;
        list_sizes[g] = size;
      }
    });
  }

  // Gives each node the row of its pattern; writes the entries of each graph as list_entries does.
  void list_nodes(const int32_t* pattern, const I* row_of_pattern, int64_t* list_sizes) const {
    const auto cost = [&](int64_t graph) { return ptr[graph]; };
    parallel_items(graphs, nodes * 16, cost, [&](int64_t from, int64_t to) {
      for (int64_t g = from; g < to; ++g) {
        for (int64_t v = ptr[g]; v < ptr[g + 1]; ++v) row_of_node[v] = row_of_pattern[pattern[v]];
        const int64_t n = ptr[g + 1] - ptr[g];
        I *const own = row_of_node + ptr[g], *const to = row + ptr[g];
        if (n <= short_list) {
          list_sizes[g] = kernels.list_rows(own, n, to, count + ptr[g]);
          continue;
        }
        std::copy_n(own, n, to);
        std::sort(to, to + n);
        int64_t size = 0;
        for (int64_t i = 0, next; i < n; i = next, ++size) {
          for (next = i + 1; next < n && to[next] == to[i];) ++next;
          to[size] = to[i], count[ptr[g] + size] = static_cast<int32_t>(next - i);
        }
        list_sizes[g] = size;
      }
    });
  }

  // Keeps the lists of all graphs, closed up.
  void keep_lists() const {
    const int64_t* list_sizes = store.lists.begin() + store.lists.size() - graphs;
    std::vector<int64_t> ends(graphs + 1);
    std::partial_sum(list_sizes, list_sizes + graphs, ends.begin() + 1);
    I* index = store.index.add(ends[graphs]);
    int32_t* times = store.count.add(ends[graphs]);
    const auto cost = [&](int64_t g) { return ends[g]; };
    parallel_items(graphs, ends[graphs] * 8, cost, [&](int64_t begin, int64_t end) {
      for (int64_t g = begin; g < end; ++g) {
        std::copy_n(row + ptr[g], list_sizes[g], index + ends[g]);
        std::copy_n(count + ptr[g], list_sizes[g], times + ends[g]);
      }
    });
  }
};

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
                         Filled<int32_t>(nodes), Filled<I>(node_rows ? nodes : 0), Filled<int64_t>(nodes + 1),
                         Filled<int32_t>(layout == RowLayout::dense ? 0 : nodes * width)});
    for (Store<W, I>& store : stores_) *store.row_begin.add(1) = 0;
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
    check_room(nodes, graphs);
    nodes_left_ -= nodes;
    graphs_left_ -= graphs;
    const GraphPieces pieces = cut_graphs(ptr, graphs);
    const W* rows = static_cast<const W*>(powers);
    if (layout == RowLayout::chosen && nodes > 0) choose_layout(rows, nodes, ptr);
    for_each_branch(nodes, pieces.size(), [&](int64_t b, Scratch& scratch) {
      Store<W, I>& store = stores_[b];
      I* const row_of_node = rows_of_nodes(store, scratch);
      const auto search = search_of(store, rows + b * nodes * width, ptr, graphs, pieces, scratch, row_of_node);
      search.find_rows(scratch.entry_of_row);
      search.list_entries(store.lists.add(graphs));
      search.keep_lists();
    });
  }

  bool add(const GraphRange& graphs) override {
    if constexpr (has_patterns) {
      if (layout == RowLayout::chosen && width * bytes < dense_bytes) layout = RowLayout::dense;
      if (!patterns_ || layout == RowLayout::chosen) return false;  // all rows of the first graph tell the layout
      const int64_t nodes = graphs.nodes();
      check_room(nodes, graphs.graphs);
      if (!patterns_are_whole_) patterns_->forget(0);  // what a failure has left
      patterns_are_whole_ = false;
      if (!patterns_->add(graphs)) {
        patterns_are_whole_ = true;
        return false;
      }
      nodes_left_ -= nodes;
      graphs_left_ -= graphs.graphs;
      std::vector<int64_t> ptr(graphs.graphs + 1);
      for (int64_t g = 0; g <= graphs.graphs; ++g) ptr[g] = graphs.ptr[g] - graphs.ptr[0];
      const GraphPieces no_pieces = {};
      Scratch all(nodes, 0);
      for (int64_t b = 0; b < branches; ++b) {
        const int64_t hop = patterns_->hop_of(b), fresh = patterns_->fresh(hop), first = patterns_->first_fresh(hop);
        const int64_t ends[] = {0, fresh};
        const GraphPieces pieces = cut_graphs(ends, 1);
        Scratch scratch(fresh, pieces.size());
        const auto search = search_of(stores_[b], reinterpret_cast<const W*>(patterns_->rows(b)), ends, 1, pieces,
                                      scratch, scratch.row_of_node.template mutable_data_ptr<I>());
        search.find_rows(scratch.entry_of_row);
        std::vector<I>& row_of_pattern = row_of_pattern_[b];
        row_of_pattern.resize(first + fresh);
        for (int64_t i = 0; i < fresh; ++i) row_of_pattern[first + i] = search.row[search.row_of_node[i]];
        const auto lists =
            search_of(stores_[b], nullptr, ptr.data(), graphs.graphs, no_pieces, all, rows_of_nodes(stores_[b], all));
        lists.list_nodes(patterns_->of_nodes(hop), row_of_pattern.data(), stores_[b].lists.add(graphs.graphs));
        lists.keep_lists();
      }
      patterns_are_whole_ = true;
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
    const int64_t values = size_of(&Store<W, I>::rows);
    if (values > INT32_MAX || sparse_bytes(values, num_rows()) >= num_rows() * width * bytes) {
      make_dense();
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
    return std::pair(crow, col);
  }

  DistinctTensors take() override {
    nodes_left_ = graphs_left_ = 0;
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
    return {rows, row_ptr, ptr, index, count, row_of_node};
  }

 private:
  static constexpr bool has_patterns = sizeof(W) >= 4;
  using NodePatterns = Patterns<std::conditional_t<sizeof(W) == 8, double, float>, double>;

  // Memory of a chunk.
  struct Scratch {
    Scratch(int64_t nodes, int64_t pieces)
        : sizes(pieces + 1),
          rows_before(pieces + 1),
          hash(empty({nodes}, ScalarType::Long)),
          first_node(empty({nodes}, index_type)),
          row(empty({nodes}, index_type)),
          count(empty({nodes}, ScalarType::Int)),
          row_of_node(empty({nodes}, index_type)) {}

    std::vector<int64_t> sizes, rows_before;
    Tensor hash, first_node, row, count, row_of_node;
    std::vector<I> entry_of_row;
  };

  // Runs f(branch, scratch). Where there are several branches for each thread, a thread takes whole ones, the last one
  // first, which has the most rows: nothing goes from core to core then but the powers. More threads share each branch.
  template <class F>
  void for_each_branch(int64_t nodes, int64_t pieces, F f) {
    const int64_t worth = threads_for(nodes * branches * search_cost(width));
    const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), worth);
    const bool apart = threads > 1 && 2 * threads <= branches;
    std::vector<Scratch> scratch;
    for (int64_t i = 0; i < (apart ? threads : 1); ++i) scratch.emplace_back(nodes, pieces);
    if (!apart) {
      for (int64_t b = 0; b < branches; ++b) f(b, scratch[0]);
      return;
    }
    std::atomic<int64_t> left = branches;
    parallel_ranges(threads, [&](int64_t own, int64_t) {  // each range is of one thread, which keeps its memory
      for (int64_t b; (b = left.fetch_sub(1) - 1) >= 0;) f(b, scratch[own]);
    });
  }

  BranchSearch<W, I> search_of(Store<W, I>& store, const W* rows, const int64_t* ptr, int64_t graphs,
                               const GraphPieces& pieces, Scratch& scratch, I* row_of_node) const {
    const int64_t nodes = ptr[graphs];
    return {rows,
            width,
            nodes,
            ptr,
            graphs,
            pieces,
            keys_.data(),
            hash_mask_,
            store,
            is_sparse(),
            isa_kernels<DistinctKernels<W, I>>(),
            scratch.sizes.data(),
            scratch.rows_before.data(),
            reinterpret_cast<uint64_t*>(scratch.hash.template mutable_data_ptr<int64_t>()),
            scratch.first_node.template mutable_data_ptr<I>(),
            scratch.row.template mutable_data_ptr<I>(),
            scratch.count.template mutable_data_ptr<int32_t>(),
            row_of_node};
  }

  // Where the rows of the nodes of a chunk are written.
  I* rows_of_nodes(Store<W, I>& store, Scratch& scratch) const {
    return node_rows_ ? store.row_of_node.add(scratch.row.numel()) : scratch.row_of_node.template mutable_data_ptr<I>();
  }

  void check_room(int64_t nodes, int64_t graphs) {
    require(nodes <= nodes_left_, "powers must have at most the ", nodes_left_, " nodes that are left, got ", nodes);
    require(graphs <= graphs_left_, "ptr must have at most the ", graphs_left_, " graphs that are left, got ", graphs);
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
  uint64_t hash_mask_;
  std::vector<uint32_t> keys_;
  Arena arena_;
  std::optional<NodePatterns> patterns_;
  bool patterns_are_whole_ = true;
  std::vector<std::vector<I>> row_of_pattern_;  // of each branch
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
