// The patterns of the nodes of graphs that come chunk by chunk, and the rows of those that are new.
//
// A pattern of hop 0 is a row of x and a degree; one of hop r is a degree and, in the order in which they are stored,
// the patterns of the neighbours in hop r - 1; a node of more than four neighbours has one of its own. Nodes of one
// pattern thus have one row in hop r, whatever the operator, to the bit; rows of two patterns may be equal. Where few
// of the patterns of a chunk are new, as in molecules, most of its rows are neither computed nor compared.
#pragma once

#include <atomic>
#include <bit>
#include <cmath>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "distinct.h"
#include "packed.h"

namespace spin_fast {

// Memory that grows and keeps nothing.
template <class T>
class Room {
 public:
  T* of(int64_t size) {
    if (size > size_) {
      size_ = 0;
      memory_.reset();
      memory_ = std::make_unique_for_overwrite<T[]>(size + size / 4);
      size_ = size + size / 4;
      poisoned(reinterpret_cast<char*>(memory_.get()), size_ * sizeof(T));
    }
    return memory_.get();
  }
  T* get() const { return memory_.get(); }

 private:
  std::unique_ptr<T[]> memory_;
  int64_t size_ = 0;
};

// Memory for so many rows, none of which is known yet; the slots are not cleared. `keys` must outlive it.
template <class W>
KnownRows<W> memory_for_rows(Arena& arena, const std::vector<uint32_t>& keys, int64_t rows) {
  const auto slots = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(2 * rows + 1)));
  KnownRows<W> known = {};
  known.keys = keys.data();
  known.hash_mask = ~uint64_t{0};
  known.width = static_cast<int64_t>(keys.size()) / 2;
  known.rows = arena.take<W>(rows * known.width);
  known.slots = arena.take<uint64_t>(slots);
  known.slot_mask = static_cast<uint64_t>(slots - 1);
  if (known.width < one_hot_columns) known.row_of_column = arena.take<int32_t>(known.width);
  return known;
}

template <class W>
void forget_rows(KnownRows<W>& known) {
  std::memset(known.slots, 0, (known.slot_mask + 1) * sizeof(uint64_t));
  if (known.row_of_column) std::fill_n(known.row_of_column, known.width, -1);
  known.size = 0;
}

// T: of x; A: of the sums.
template <class T, class A>
class Patterns {
  using W = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;

 public:
  // Narrower rows are computed as fast as patterns are found, and among few nodes these hardly repeat.
  static bool pay_for(int64_t width, int64_t nodes) { return width >= 16 && nodes >= at_once; }

  // `room`: patterns of a hop, and nodes of a chunk, at most. Memory is taken from `arena`, which must outlive this.
  Patterns(Arena& arena, int64_t width, std::vector<Operator> operators, int64_t hops, int64_t room)
      : width_(width),
        room_(std::min<int64_t>(room, INT32_MAX / padded_to(column_multiple, width))),  // places in y are int32
        operators_(std::move(operators)),
        row_keys_(hash_keys(width)),
        hops_(hops + 1),
        rows_(1 + operators_.size() * hops) {
    const int64_t rows = std::min(room_, most_rows), stride = padded_to(column_multiple, width);
    x_ = memory_for_rows<W>(arena, row_keys_, rows);
    pattern_of_row_ = arena.take<int32_t>(rows * degrees);
    for (int64_t r = 0; r < hops; ++r)
      for (size_t o = 0; o < operators_.size(); ++o) hops_[r].y.push_back(arena.take<A>(room_ * stride));
    forget(0);
  }

  // Numbers the patterns of a chunk and computes the rows of those that are new; or returns false, where it seems not
  // to pay, or where graphs are so large that others compute their rows.
  bool add(const GraphRange& graphs) {
    if (hops_.size() < 2 || graphs.nodes() > room_) return false;
    if (left_out_ > 0) {
      --left_out_;
      return false;
    }
    return graphs.wide_index ? add<int64_t>(graphs) : add<int32_t>(graphs);
  }

  // Forgets the patterns of a hop and all later ones: the next ones are numbered from 0.
  void forget(int64_t hop) {
    for (size_t r = hop; r < hops_.size(); ++r) {
      hops_[r].known.size = hops_[r].fresh = 0;
      hops_[r].is_clear = false;
    }
  }

  int64_t hop_of(int64_t branch) const {
    return branch == 0 ? 0 : (branch - 1) % (static_cast<int64_t>(hops_.size()) - 1) + 1;
  }
  // Of the nodes of the last chunk, in this hop.
  const int32_t* of_nodes(int64_t hop) const { return hops_[hop].of_node.get(); }
  // New patterns of the last chunk: how many, the number of the first one, and their rows in a branch.
  int64_t fresh(int64_t hop) const { return hops_[hop].fresh; }
  int64_t first_fresh(int64_t hop) const { return hops_[hop].known.size - hops_[hop].fresh; }
  const T* rows(int64_t branch) const { return rows_[branch].get(); }

 private:
  static constexpr int64_t most_rows = 1 << 12;  // of x: where there are more, nodes hardly share patterns
  static constexpr int64_t degrees = 8;          // that share patterns in hop 0
  static constexpr int64_t at_once = 1024;       // nodes
  static constexpr int64_t chunks_without = 16;  // after one in which it did not pay
  static constexpr int64_t number_cost = 400;    // of a node's pattern, in multiply-adds of vectors: about
  // Of a graph: no more than power.cpp, which sums up large graphs in another way, counts as small.
  static constexpr int64_t most_values = 1 << 17, most_edges = 1 << 14;

  struct HopPatterns {
    KnownPatterns known = {};
    Room<PatternBucket> table;
    int64_t buckets = 0;
    int64_t fresh = 0;
    bool is_clear = false;
    Room<int32_t> of_node;   // [nodes + 1], the last one -1
    Room<int64_t> node;      // [fresh], the first of each new pattern
    std::vector<A*> y = {};  // of each operator, the sources [room, stride]
  };

  // Empties the tables of hops that have been forgotten, now that they are needed.
  void clear_tables() {
    for (size_t r = 0; r < hops_.size(); ++r) {
      if (hops_[r].is_clear) continue;
      hops_[r].is_clear = true;
      if (r > 0) {
        empty_table(hops_[r]);
      } else {
        forget_rows(x_);
        std::fill_n(pattern_of_row_, std::min(room_, most_rows) * degrees, -1);
      }
    }
  }

  static void empty_table(HopPatterns& hop) {
    for (int64_t i = 0; i < hop.buckets; ++i) {
      std::fill_n(hop.table.get()[i].key[0], PatternBucket::size * pattern_degree, free_key);
      hop.table.get()[i].used = 0;
    }
  }

  // Makes room for so many patterns more in the table, of which at most half is taken then.
  void grow_table(HopPatterns& hop, int64_t more) {
    KnownPatterns& known = hop.known;
    if (2 * (known.size + more) <= PatternBucket::size * hop.buckets) return;
    std::vector<uint32_t> keys(known.size * pattern_degree);
    for (int64_t i = 0; i < hop.buckets; ++i) {
      const PatternBucket& bucket = hop.table.get()[i];
      for (int32_t k = 0; k < bucket.used; ++k)
        std::copy_n(bucket.key[k], pattern_degree, &keys[bucket.number[k] * pattern_degree]);
    }
    const int64_t buckets = std::max<int64_t>(2 * hop.buckets, at_once);
    hop.buckets = 0;  // unless there is memory
    known.buckets = hop.table.of(buckets);
    hop.buckets = buckets;
    known.bucket_mask = buckets - 1;
    empty_table(hop);
    std::vector<int32_t> number(known.size);  // as before
    std::vector<int64_t> fresh(known.size);
    known.size = 0;
    known.size = isa_kernels<PatternKernels>().number(known, keys.data(), number.size(), number.data(), fresh.data());
  }

  bool gives_up() {
    forget(0);
    left_out_ = chunks_without;
    return false;
  }

  template <class I>
  bool add(const GraphRange& graphs) {
    const I* indptr = static_cast<const I*>(graphs.indptr);
    const int64_t first = graphs.ptr[0], nodes = graphs.nodes();
    for (int64_t g = 0; g < graphs.graphs; ++g) {
      const int64_t begin = graphs.ptr[g], end = graphs.ptr[g + 1];
      const int64_t values = (end - begin) * padded_to(column_multiple, width_);
      if (values > most_values || indptr[end] - indptr[begin] > most_edges) return false;
    }
    const auto table = isa_kernels<PowerKernels<T, I>>();
    Powers<T, I> powers = {};
    powers.hop.indptr = indptr;
    powers.hop.indices = static_cast<const I*>(graphs.indices);
    powers.hop.width = powers.full_width = width_;
    powers.hop.edges = graphs.edges;
    powers.x = static_cast<const T*>(graphs.x);
    const bool tells = nodes >= at_once;  // whether they pay
    if (tells && !has_few_neighbours(indptr + first, at_once)) return gives_up();
    for (size_t r = 0; r < hops_.size(); ++r)
      if (hops_[r].known.size + nodes > room_) {
        forget(r);
        break;
      }
    clear_tables();
    for (HopPatterns& hop : hops_) {
      hop.of_node.of(nodes + 1)[nodes] = -1;
      hop.node.of(nodes);
      hop.fresh = 0;
    }
    const std::vector<int64_t> blocks = blocks_of(graphs);
    const auto number_block = [&](int64_t r, int64_t b) {
      const int64_t begin = blocks[b], end = blocks[b + 1];
      if (r == 0) return number_rows(powers.x + first * width_, indptr + first, begin, end);
      if (r == 1 && b == 0) table.near_nodes(powers.hop, first, nodes, near_.of(nodes * pattern_degree));
      number_patterns(r, begin, end);
      return !(tells && r == 1 && end == nodes && hops_[r].fresh * 4 > nodes);
    };
    if (!for_each_block(nodes, blocks.size() - 1, number_block)) return gives_up();
    int64_t fresh = 0;
    for (size_t r = 1; r < hops_.size(); ++r) fresh += hops_[r].fresh;
    nodes_so_far_ += nodes;
    compute_rows(powers, table, first, nodes);
    if (tells && fresh * 2 > nodes * (static_cast<int64_t>(hops_.size()) - 1)) left_out_ = chunks_without;
    return true;
  }

  template <class I>
  static bool has_few_neighbours(const I* indptr, int64_t nodes) {
    int64_t too_many = 0;
    for (int64_t v = 0; v < nodes; ++v) too_many += indptr[v + 1] - indptr[v] > pattern_degree;
    return too_many * 8 <= nodes;
  }

  // Where blocks of nodes begin and end: of whole graphs, so that a block needs no other one of the hop before. All but
  // the last have at_once nodes or more.
  static std::vector<int64_t> blocks_of(const GraphRange& graphs) {
    std::vector<int64_t> bounds = {0};
    for (int64_t g = 1; g <= graphs.graphs; ++g) {
      const int64_t end = graphs.ptr[g] - graphs.ptr[0];
      if (end >= bounds.back() + at_once || g == graphs.graphs) bounds.push_back(end);
    }
    return bounds;
  }

  // Runs f(hop, block) on the blocks of each hop in order, and on each after the hop before; stops where f returns
  // false, and returns whether it never did. One thread takes hop after hop, whose table stays in its caches; each of
  // several takes a block of the last hop that no other is at and that can go on.
  template <class F>
  bool for_each_block(int64_t nodes, int64_t blocks, F f) {
    struct alignas(64) Hop {
      std::atomic<bool> taken = false;
      std::atomic<int64_t> done = 0;
    };
    const auto hops = static_cast<int64_t>(hops_.size());
    const int64_t threads = std::min(hops, threads_for(hops * nodes * number_cost));
    std::vector<Hop> of(hops);
    std::atomic<bool> stopped = false;
    const auto is_next = [&](int64_t r) { return of[r].done < (r == 0 ? blocks : of[r - 1].done.load()); };
    const auto take_block = [&] {
      for (int64_t i = 0; i < hops; ++i) {
        const int64_t r = threads == 1 ? i : hops - 1 - i;
        if (!is_next(r) || of[r].taken.exchange(true)) continue;
        if (is_next(r)) {  // another may have taken it since
          if (f(r, of[r].done))
            ++of[r].done;
          else
            stopped = true;
        }
        of[r].taken = false;
        return;
      }
      wait_briefly();
    };
    const auto run = [&](int64_t, int64_t) {
      try {
        while (!stopped && of[hops - 1].done < blocks) take_block();
      } catch (...) {
        stopped = true;  // others would wait
        throw;
      }
    };
    parallel_ranges(threads, run, threads);
    return !stopped;
  }

  // The patterns of hop 0; false where there are too many rows.
  template <class I>
  bool number_rows(const T* x, const I* indptr, int64_t begin, int64_t end) {
    HopPatterns& hop = hops_[0];
    const auto number = isa_kernels<DistinctKernels<W, int32_t>>().number;
    int32_t* const of_node = hop.of_node.get();
    int64_t* const node = hop.node.get();
    for (int64_t v = begin; v < end; v += at_once) {
      const int64_t n = std::min(at_once, end - v);
      if (x_.size + n > std::min(room_, most_rows)) return false;
      const int64_t fresh = number(x_, reinterpret_cast<const W*>(x + v * width_), n, of_node + v, nullptr);
      if (v == 0 && n == at_once && fresh * 2 > n) return false;
      x_.size += fresh;
      for (int64_t i = v; i < v + n; ++i) {
        const int64_t degree = indptr[i + 1] - indptr[i];
        int32_t apart = -1;
        int32_t& pattern = degree < degrees ? pattern_of_row_[of_node[i] * degrees + degree] : apart;
        if (pattern < 0) {
          pattern = static_cast<int32_t>(hop.known.size++);
          node[hop.fresh++] = i;
        }
        of_node[i] = pattern;
      }
    }
    return true;
  }

  // The patterns of a later hop, whose hop before has these nodes.
  void number_patterns(int64_t r, int64_t begin, int64_t end) {
    HopPatterns& hop = hops_[r];
    const auto keys = isa_kernels<PatternKernels>().keys;
    const auto number = isa_kernels<PatternKernels>().number;
    const int32_t* before = hops_[r - 1].of_node.get();
    int32_t* const of_node = hop.of_node.get();
    int64_t* node = hop.node.get() + hop.fresh;
    uint32_t key[at_once * pattern_degree];
    for (int64_t v = begin; v < end; v += at_once) {
      const int64_t n = std::min(at_once, end - v);
      keys(near_.get() + v * pattern_degree, n, before, nodes_so_far_ + v, key);
      grow_table(hop, n);
      const int64_t fresh = number(hop.known, key, n, of_node + v, node);
      for (int64_t i = 0; i < fresh; ++i) node[i] += v;
      node += fresh;
      hop.known.size += fresh;
      hop.fresh += fresh;
    }
  }

  template <class I>
  void compute_rows(Powers<T, I>& powers, const PowerKernels<T, I>& table, int64_t first, int64_t nodes) {
    const I* indptr = powers.hop.indptr + first;
    const auto last = static_cast<int64_t>(hops_.size()) - 1;
    const auto kernels = [&] {  // of the type of the sums: for hop 0, and for the others
      if constexpr (std::is_same_v<T, A>)
        return std::pair(table.pattern_sources, table.pattern_rows);
      else
        return std::pair(table.float64_pattern_sources, table.float64_pattern_rows);
    }();
    for (size_t o = 0; o < operators_.size(); ++o) {
      powers.op = operators_[o];
      powers.by_edge = powers.op == Operator::sym_adj;
      if (powers.by_edge) {
        double* scale = scales_.of(nodes);
        for (int64_t v = 0; v < nodes; ++v) {
          const auto degree = static_cast<double>(indptr[v + 1] - indptr[v]);
          scale[v] = degree == 0 ? 0 : 1 / std::sqrt(degree);
        }
        powers.hop.left = powers.hop.right = scale - first;
        powers.hop.plain = 1;
      }
      for (int64_t r = 0; r <= last; ++r) {
        const HopPatterns& hop = hops_[r];
        const int64_t* node = hop.node.get();
        T* const rows = rows_[r == 0 ? 0 : o * last + r].of(hop.fresh * width_);
        parallel_items(hop.fresh, hop.fresh * (width_ + 16) * 4, [&](int64_t begin, int64_t end) {
          PatternRows<A> of = {};
          of.node = node + begin;
          of.first_node = first;
          of.size = end - begin;
          of.next = r < last ? hop.y[o] : nullptr;
          of.first_new = first_fresh(r) + begin;
          T* const out = rows + begin * width_;
          if (r == 0) return kernels.first(powers, of, out);
          of.pattern = hops_[r - 1].of_node.get();
          of.y = hops_[r - 1].y[o];
          int64_t neighbours = 0;
          for (int64_t i = begin; i < end; ++i) neighbours += indptr[node[i] + 1] - indptr[node[i]];
          constexpr int64_t bytes = sizeof(A) + sizeof(int32_t);
          kernels.second(powers, of, out, thread_scratch((2 * of.size + neighbours) * bytes));
        });
      }
    }
  }

  int64_t width_, room_;
  std::vector<Operator> operators_;
  std::vector<uint32_t> row_keys_;
  KnownRows<W> x_ = {};      // the rows of x
  int32_t* pattern_of_row_;  // [rows of x, degrees], -1 where there is none yet
  std::vector<HopPatterns> hops_;
  std::vector<Room<T>> rows_;  // of each branch, of the new patterns
  Room<int32_t> near_;         // [nodes, pattern_degree]
  Room<double> scales_;        // [nodes]
  int64_t nodes_so_far_ = 0;
  int64_t left_out_ = 0;  // chunks to come
};

}  // namespace spin_fast
