// Errors about arguments, and one-pass checks of the contents of index arrays; no torch header. Reference
// implementations: check_csr and check_segments in spin_fast/ops/reference.py.
#pragma once

#include <cstdint>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace spin_fast {

// Python gets a ValueError for std::invalid_argument. STD_TORCH_CHECK would raise a RuntimeError that names a file of
// the machine that built the library.
template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

template <class... Parts>
void require(bool holds, const Parts&... parts) {
  if (!holds) [[unlikely]]
    refuse(parts...);
}

// a * b and a + b of sizes that are not negative; an overflow is refused by the name of the argument that causes it.
inline int64_t product_of(const char* name, int64_t a, int64_t b) {
  int64_t product = 0;
  require(!__builtin_mul_overflow(a, b, &product), name, " must make sizes below 2^63, got ", a, " * ", b);
  return product;
}

inline int64_t sum_of(const char* name, int64_t a, int64_t b) {
  int64_t sum = 0;
  require(!__builtin_add_overflow(a, b, &sum), name, " must make sizes below 2^63, got ", a, " + ", b);
  return sum;
}

// Refuses what the checks below found: a message, or an empty string.
inline void refuse_if(const std::string& problem) { require(problem.empty(), problem); }

inline std::string at(const char* name, int64_t i, int64_t value) {
  return std::string(name) + "[" + std::to_string(i) + "] = " + std::to_string(value);
}

// The checks go through all values without a branch, which compilers make vectors of; what is wrong is looked for
// afterwards. A sign bit tells it: of u - low or last - u, in unsigned arithmetic, where u is not in [low, last].
template <class U>
constexpr bool has_sign(U bits) {
  return bits >> (8 * sizeof(U) - 1) != 0;
}

template <class I>
bool is_ascending(const I* offsets, int64_t ranges) {
  using U = std::make_unsigned_t<I>;
  U signs = static_cast<U>(offsets[0]);
  for (int64_t i = 0; i < ranges; ++i) {
    const U begin = static_cast<U>(offsets[i]), end = static_cast<U>(offsets[i + 1]);
    signs |= end | (end - begin);
  }
  return !has_sign(signs);
}

// Whether values[begin, end) are in [low, high), where 0 <= low.
template <class I>
bool is_within(const I* values, int64_t begin, int64_t end, int64_t low, int64_t high) {
  using U = std::make_unsigned_t<I>;
  constexpr int64_t most = std::numeric_limits<I>::max();
  if (low >= high || low > most) return begin >= end;
  const U first = static_cast<U>(low), last = static_cast<U>(high > most ? most : high - 1);
  U signs = 0;
  for (int64_t i = begin; i < end; ++i) {
    const U value = static_cast<U>(values[i]);
    signs |= (value - first) | (last - value);
  }
  return !has_sign(signs);
}

template <class I>
std::string check_offsets(const char* name, const I* offsets, int64_t ranges, int64_t end, const char* of) {
  if (offsets[0] != 0) return std::string(name) + " must start with 0, got " + std::to_string(offsets[0]);
  for (int64_t i = is_ascending(offsets, ranges) ? ranges : 0; i < ranges; ++i)
    if (offsets[i + 1] < offsets[i])
      return std::string(name) + " must not decrease, got " + at(name, i, offsets[i]) + ", " +
             at(name, i + 1, offsets[i + 1]);
  if (offsets[ranges] != end)
    return std::string(name) + " must end with the number of " + of + ", " + std::to_string(end) + ", got " +
           std::to_string(offsets[ranges]);
  return {};
}

// Checks values[begin, end); `meaning` says in a message what [low, high) is.
template <class I>
std::string check_range(const char* name, const I* values, int64_t begin, int64_t end, int64_t low, int64_t high,
                        const std::string& meaning = "") {
  if (is_within(values, begin, end, low, high)) return {};
  int64_t i = begin;
  while (values[i] >= low && values[i] < high) ++i;
  return std::string(name) + " must be in [" + std::to_string(low) + ", " + std::to_string(high) + ")" + meaning +
         ", got " + at(name, i, values[i]);
}

// The offsets of a block-diagonal adjacency. ptr may be null: one graph.
template <class I>
std::string check_csr_offsets(const I* indptr, int64_t edges, const int64_t* ptr, int64_t graphs, int64_t nodes) {
  const std::string problem = check_offsets("indptr", indptr, nodes, edges, "indices");
  return problem.empty() && ptr ? check_offsets("ptr", ptr, graphs, nodes, "nodes") : problem;
}

// Its indices, once its offsets are right.
template <class I>
std::string check_csr_indices(const I* indptr, const I* indices, int64_t edges, const int64_t* ptr, int64_t graphs,
                              int64_t nodes) {
  if (!ptr) return check_range("indices", indices, 0, edges, 0, nodes);
  int64_t g = 0;
  while (g < graphs && is_within(indices, indptr[ptr[g]], indptr[ptr[g + 1]], ptr[g], ptr[g + 1])) ++g;
  if (g == graphs) return {};
  const std::string problem = check_range("indices", indices, 0, edges, 0, nodes);
  if (!problem.empty()) return problem;
  int64_t v = ptr[g], e = indptr[v], other = 0;
  while (indices[e] >= ptr[g] && indices[e] < ptr[g + 1]) ++e;
  while (e >= indptr[v + 1]) ++v;
  while (indices[e] >= ptr[other + 1]) ++other;
  return "indices must stay inside the graph of their row, got " + at("indices", e, indices[e]) + " (graph " +
         std::to_string(other) + ") in row " + std::to_string(v) + " (graph " + std::to_string(g) + ")";
}

template <class I>
std::string check_csr(const I* indptr, const I* indices, int64_t edges, const int64_t* ptr, int64_t graphs,
                      int64_t nodes) {
  const std::string problem = check_csr_offsets(indptr, edges, ptr, graphs, nodes);
  return problem.empty() ? check_csr_indices(indptr, indices, edges, ptr, graphs, nodes) : problem;
}

// Compressed sparse rows [rows, width], whose columns must ascend in a row: none of them twice.
inline std::string check_sparse_rows(const int32_t* crow_indices, int64_t rows, const int32_t* col_indices,
                                     int64_t values, int64_t width) {
  std::string problem = check_offsets("crow_indices", crow_indices, rows, values, "values");
  if (problem.empty()) problem = check_range("col_indices", col_indices, 0, values, 0, width);
  if (!problem.empty()) return problem;
  int64_t falls = 0;  // all of which must be between two rows
  for (int64_t e = 1; e < values; ++e) falls += col_indices[e] <= col_indices[e - 1];
  for (int64_t i = 0; i < rows; ++i) {
    const int32_t e = crow_indices[i];
    falls -= e > 0 && e < crow_indices[i + 1] && col_indices[e] <= col_indices[e - 1];
  }
  for (int64_t i = falls ? 0 : rows; i < rows; ++i)
    for (int64_t e = crow_indices[i] + 1; e < crow_indices[i + 1]; ++e)
      if (col_indices[e] <= col_indices[e - 1])
        return "col_indices must ascend in each row, got " + at("col_indices", e - 1, col_indices[e - 1]) + ", " +
               at("col_indices", e, col_indices[e]) + " in row " + std::to_string(i);
  return problem;
}

// The segments of a branch may refer to the rows [row_ptr[branch], row_ptr[branch + 1]); index and count may be null.
template <class I>
std::string check_segments(const int64_t* ptr, int64_t segments, const I* index, const int32_t* count, int64_t entries,
                           const int64_t* row_ptr, int64_t branches) {
  std::string problem = check_offsets("ptr", ptr, segments, entries, index ? "index" : "rows of z");
  for (int64_t b = 0; problem.empty() && b < branches; ++b) {
    const int64_t begin = ptr[b * (segments / branches)], end = ptr[(b + 1) * (segments / branches)];
    const int64_t low = row_ptr[b], high = row_ptr[b + 1];
    const std::string branch = "branch " + std::to_string(b);
    if (index)
      problem = check_range("index", index, begin, end, low, high, branches > 1 ? ", the rows of " + branch : "");
    else if (entries > 0 && (begin != low || end != high))
      problem = "ptr must give " + branch + " its rows, " + std::to_string(low) + " to " + std::to_string(high) +
                ", got " + std::to_string(begin) + " to " + std::to_string(end);
  }
  if (!problem.empty() || !count) return problem;
  if (is_within(count, 0, entries, 1, int64_t{1} << 31)) return {};
  int64_t e = 0;
  while (count[e] >= 1) ++e;
  return "count must be positive, got " + at("count", e, count[e]);
}

}  // namespace spin_fast
