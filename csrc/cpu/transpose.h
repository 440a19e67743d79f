// What refers to a node or to a row: a sort by keys, and the transpose of an adjacency, on one thread.
#pragma once

#include "ops.h"

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

}  // namespace spin_fast
