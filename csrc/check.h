// Errors about arguments, and one-pass checks of the contents of index arrays; no torch header. Reference
// implementations: check_csr and check_segments in spin_fast/ops/reference.py.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

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

template <class I>
std::string check_offsets(const char* name, const I* offsets, int64_t ranges, int64_t end, const char* of) {
  if (offsets[0] != 0) return std::string(name) + " must start with 0, got " + std::to_string(offsets[0]);
  for (int64_t i = 0; i < ranges; ++i)
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
  for (int64_t i = begin; i < end; ++i)
    if (values[i] < low || values[i] >= high)
      return std::string(name) + " must be in [" + std::to_string(low) + ", " + std::to_string(high) + ")" + meaning +
             ", got " + at(name, i, values[i]);
  return {};
}

// ptr may be null: one graph.
template <class I>
std::string check_csr(const I* indptr, const I* indices, int64_t edges, const int64_t* ptr, int64_t graphs,
                      int64_t nodes) {
  std::string problem = check_offsets("indptr", indptr, nodes, edges, "indices");
  if (problem.empty() && ptr) problem = check_offsets("ptr", ptr, graphs, nodes, "nodes");
  if (problem.empty()) problem = check_range("indices", indices, 0, edges, 0, nodes);
  if (!problem.empty() || !ptr) return problem;
  for (int64_t g = 0; g < graphs; ++g)
    for (int64_t v = ptr[g]; v < ptr[g + 1]; ++v)
      for (int64_t e = indptr[v]; e < indptr[v + 1]; ++e) {
        const int64_t u = indices[e];
        if (u >= ptr[g] && u < ptr[g + 1]) continue;
        int64_t other = 0;
        while (u >= ptr[other + 1]) ++other;
        return "indices must stay inside the graph of their row, got " + at("indices", e, u) + " (graph " +
               std::to_string(other) + ") in row " + std::to_string(v) + " (graph " + std::to_string(g) + ")";
      }
  return {};
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
  for (int64_t e = 0; e < entries; ++e)
    if (count[e] < 1) return "count must be positive, got " + at("count", e, count[e]);
  return {};
}

}  // namespace spin_fast
