// What refers to a node or to a row: the transposes of an adjacency and of an index, on one thread.
#pragma once

#include "entries.h"

namespace spin_fast {

// Counting sort: calls put(item, place) for the items [0, n), ascending, each with its place in the order of their keys
// [0, keys); returns where each key begins, and the end.
template <class O, class Key, class Put>
std::vector<O> sort_by_key(int64_t n, int64_t keys, Key key, Put put) {
  std::vector<O> offsets(keys + 2);
  // Counted one further on, each offset moves to where its key begins while the items are put in place.
  for (int64_t i = 0; i < n; ++i) ++offsets[key(i) + 2];
  for (int64_t k = 0; k < keys; ++k) offsets[k + 2] += offsets[k + 1];
  for (int64_t i = 0; i < n; ++i) put(i, offsets[key(i) + 1]++);
  offsets.pop_back();
  return offsets;
}

template <class T, class I>
struct Adjacency {
  const I* indptr;
  const I* indices;
  const T* weight;
  int64_t nodes, edges;
};

template <class T, class I>
struct TransposedAdjacency {
  std::vector<I> indptr, indices;
  std::vector<T> weight;
};

// The entries of a row of the transpose keep the order of the rows they came from.
template <class T, class I>
TransposedAdjacency<T, I> transpose(const Adjacency<T, I>& a) {
  TransposedAdjacency<T, I> t{{}, std::vector<I>(a.edges), std::vector<T>(a.weight ? a.edges : 0)};
  int64_t v = 0;
  t.indptr = sort_by_key<I>(
      a.edges, a.nodes, [&](int64_t e) { return a.indices[e]; },
      [&](int64_t e, I place) {
        while (e >= a.indptr[v + 1]) ++v;
        t.indices[place] = static_cast<I>(v);
        if (a.weight) t.weight[place] = a.weight[e];
      });
  return t;
}

// The entries of each row of z, as in EntriesOfRow.
struct TransposedIndex {
  std::vector<int64_t> offsets;
  std::vector<int32_t> entries, place;
};

inline TransposedIndex transpose(const Segments& seg) {
  constexpr int64_t most = INT32_MAX;
  const int64_t segments = seg.graphs * seg.branches;
  require(seg.entries <= most, "index must have at most ", most, " entries, got ", seg.entries);
  require(segments <= most, "ptr must have at most ", most, " segments, got ", segments);
  TransposedIndex t{{}, std::vector<int32_t>(seg.entries), std::vector<int32_t>(seg.entries)};
  for (int64_t branch = 0; branch < seg.branches; ++branch)
    for (int64_t graph = 0; graph < seg.graphs; ++graph)
      std::fill(t.place.begin() + first_entry(seg, branch, graph),
                t.place.begin() + first_entry(seg, branch, graph + 1),
                static_cast<int32_t>(graph * seg.branches + branch));
  t.offsets = sort_by_key<int64_t>(
      seg.entries, seg.rows, [&](int64_t e) { return seg.narrow_index ? seg.narrow_index[e] : seg.wide_index[e]; },
      [&](int64_t e, int64_t place) { t.entries[place] = static_cast<int32_t>(e); });
  return t;
}

}  // namespace spin_fast
