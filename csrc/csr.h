// Edges in any order as CSR arrays; no torch header. Reference implementation: csr_of_edges in
// spin_fast/ops/reference.py.
//
// Layout: `source` and `target` [E] as listed; CSR rows are targets, their columns sources in ascending order, equal
// edges in the order in which they are listed. Edges are placed by counting, which is linear in nodes and edges: by
// target, and before that by source if they do not come so. One thread: graphs of one batch stay in its caches.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

namespace spin_fast {

// Where the places of each key begin, [keys + 1] shifted by one: the place of an edge is ++first[key + 1] - 1, which
// leaves the offsets of the keys behind.
template <class I>
void count_keys(const I* key, int64_t edges, int64_t keys, I* first) {
  std::fill_n(first, keys + 1, 0);
  for (int64_t e = 0; e < edges; ++e) ++first[int64_t{key[e]} + 1];
  I begin = 0;
  for (int64_t k = 0; k < keys; ++k) {
    const I count = first[k + 1];
    first[k + 1] = begin;
    begin += count;
  }
}

// Whether edges come by key, and those of one key by `then`.
template <class I>
bool come_by(const I* key, const I* then, int64_t edges) {
  bool falls = false;  // no conditional jumps, so that compilers make vectors of it
  for (int64_t e = 1; e < edges; ++e)
    falls |= (key[e] < key[e - 1]) | ((key[e] == key[e - 1]) & (then[e] < then[e - 1]));
  return !falls;
}

// Fills indptr [nodes + 1], indices [E] and, if it is wanted, `order` [E]: the edge that each entry was. Ends must be
// in range. Returns whether the edges came in this order; `order` is left alone then.
template <class I>
bool csr_of_edges(const I* source, const I* target, int64_t edges, int64_t nodes, I* indptr, I* indices, I* order) {
  count_keys(target, edges, nodes, indptr);
  if (come_by(target, source, edges)) {
    std::copy_n(source, edges, indices);
    std::copy_n(indptr + 1, nodes, indptr);
    indptr[nodes] = static_cast<I>(edges);
    return true;
  }
  const auto place = [&](I e) {
    const I at = indptr[int64_t{target[e]} + 1]++;
    indices[at] = source[e];
    if (order) order[at] = e;
  };
  if (std::is_sorted(source, source + edges)) {
    for (int64_t e = 0; e < edges; ++e) place(static_cast<I>(e));
    return false;
  }
  const auto first = std::make_unique_for_overwrite<I[]>(nodes + 1);
  const auto by_source = std::make_unique_for_overwrite<I[]>(edges);
  count_keys(source, edges, nodes, first.get());
  for (int64_t e = 0; e < edges; ++e) by_source[first[int64_t{source[e]} + 1]++] = static_cast<I>(e);
  for (int64_t i = 0; i < edges; ++i) place(by_source[i]);
  return false;
}

}  // namespace spin_fast
