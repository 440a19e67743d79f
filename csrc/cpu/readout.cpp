// sum_readout, attention_readout and their gradients: from tensors to the kernels in readout.inl.

#include <cmath>
#include <tuple>
#include <type_traits>
#include <vector>

#include "../segments.h"
#include "transpose.h"

namespace spin_fast {
namespace {

// A small tensor of S for the kernels to read and write as Compute<S>: itself, or a converted copy.
template <class S>
struct Converted {
  using T = Compute<S>;

  explicit Converted(const Tensor& t, bool read = true) : tensor(t), size(t.numel()) {
    if constexpr (!std::is_same_v<S, T>) {
      copy.resize(size);
      if (read) isa_kernels<PowerKernels<S, int64_t>>().widen(stored<S>(t), copy.data(), size);
    }
  }
  T* data() {
    if constexpr (std::is_same_v<S, T>) return static_cast<T*>(tensor.mutable_data_ptr());
    return copy.data();
  }
  void round() {
    if constexpr (!std::is_same_v<S, T>)
      isa_kernels<PowerKernels<S, int64_t>>().narrow(copy.data(), static_cast<S*>(tensor.mutable_data_ptr()), size);
  }

  Tensor tensor;
  int64_t size;
  std::vector<T> copy;
};

struct LongSegment {
  int64_t segment;
  size_t first, last;  // its pieces
};

// The segments of a readout in pieces of about the same number of entries, which depends on the input alone.
struct Partition {
  std::vector<Piece> pieces;
  std::vector<LongSegment> longs;
  std::vector<double> partial;
  bool tiny;  // not worth a second thread
};

Partition cut_into_pieces(const Segments& seg) {
  Partition partition;
  const int64_t most =
      std::max(task_cost / std::max<int64_t>(seg.width, 1), seg.entries / 1024) / tile_entries * tile_entries +
      tile_entries;
  partition.tiny = seg.entries <= most;
  if (seg.graphs == 0) return partition;
  for (int64_t branch = 0; branch < seg.branches; ++branch) {
    const int64_t first = branch * seg.graphs, end = first + seg.graphs;
    int64_t begin = first, cost = 0;
    const auto flush = [&](int64_t stop) {
      if (stop > begin) partition.pieces.push_back({begin, stop, 0, 0, false, nullptr});
      begin = stop;
      cost = 0;
    };
    for (int64_t s = first; s < end && !partition.tiny; ++s) {
      const int64_t from = first_entry(seg, branch, s - first), to = first_entry(seg, branch, s - first + 1);
      if (to - from > most) {
        flush(s);
        partition.longs.push_back({s, partition.pieces.size(), 0});
        for (int64_t at = from; at < to; at += most)
          partition.pieces.push_back({s, s + 1, at, std::min(at + most, to), true, nullptr});
        partition.longs.back().last = partition.pieces.size();
        begin = s + 1;
        continue;
      }
      cost += to - from + 4;  // a segment costs about as much as four entries
      if (cost >= most) flush(s + 1);
    }
    flush(end);
  }
  return partition;
}

// Allocates `size` zeros per piece for its partial sums.
void allot_partials(Partition& partition, int64_t size) {
  partition.partial.resize(partition.pieces.size() * size);
  for (size_t i = 0; i < partition.pieces.size(); ++i)
    partition.pieces[i].partial = partition.partial.data() + i * size;
}

template <class T>
Scratch<T> piece_scratch(int64_t width) {
  constexpr int64_t bytes = sizeof(T), bytes_of_sum = sizeof(double);
  const int64_t stride = padded_to(column_multiple, width), tile = tile_entries * stride;
  T* rows = reinterpret_cast<T*>(thread_scratch((2 * tile + stride) * bytes + stride * bytes_of_sum));
  return {rows, rows + 2 * tile, rows + tile, reinterpret_cast<double*>(rows + 2 * tile + stride)};
}

// Whether dz, and z where it is read, are larger than the caches of a core, and the rows of dz whole cache lines. What
// is written around them costs no reads, and whoever reads dz next finds as little of it in those caches otherwise.
bool bypasses_caches(const Tensor& dz, int64_t width, bool reads_z) {
  constexpr int64_t caches = int64_t{8} << 20;
  const bool halves = dz.element_size() < 4;  // these are converted in registers, not written in whole lines
  const int64_t row = width * dz.element_size(), bytes = dz.numel() * dz.element_size();
  return !halves && bytes * (1 + reads_z) > caches && row % cache_line == 0 &&
         reinterpret_cast<uintptr_t>(dz.data_ptr()) % cache_line == 0;
}

// Per segment sum_e a_e b_e.
template <class T>
std::vector<double> sums_of_products(const Segments& seg, const T* a, const T* b) {
  std::vector<double> sums(seg.branches * seg.graphs);
  for (int64_t branch = 0; branch < seg.branches; ++branch)
    for (int64_t graph = 0; graph < seg.graphs; ++graph)
      for (int64_t e = first_entry(seg, branch, graph); e < first_entry(seg, branch, graph + 1); ++e)
        sums[branch * seg.graphs + graph] += static_cast<double>(a[e]) * static_cast<double>(b[e]);
  return sums;
}

// Runs f(piece, scratch) over the pieces, in parallel.
template <class T, class F>
void for_each_piece(const Partition& partition, int64_t width, F f) {
  if (partition.pieces.empty()) return;
  const auto run = [&](int64_t first, int64_t last) {
    const Scratch<T> scratch = piece_scratch<T>(width);
    for (int64_t i = first; i < last; ++i) f(partition.pieces[i], scratch);
  };
  const auto number = static_cast<int64_t>(partition.pieces.size());
  if (partition.tiny) return run(0, number);
  parallel_ranges(number, run);
}

// Adds up the partial sums of the pieces of each long segment and writes its readout; with attention, its largest logit
// and softmax denominator replace those of its pieces.
template <class T>
void combine(const Segments& seg, const Partition& partition, bool attention, T* readouts) {
  for (const LongSegment& of : partition.longs) {
    double top = 0, total = 0;
    std::vector<double> sum(seg.width);
    for (size_t i = of.first; attention && i < of.last; ++i) top = std::max(top, partition.pieces[i].partial[0]);
    for (size_t i = of.first; i < of.last; ++i) {
      const double* partial = partition.pieces[i].partial;
      const double factor = attention ? std::exp(partial[0] - top) : 1;
      total += factor * partial[1];
      for (int64_t j = 0; j < seg.width; ++j) sum[j] += factor * partial[2 + j];
    }
    T* readout = readouts + (of.segment % seg.graphs * seg.branches + of.segment / seg.graphs) * seg.width;
    for (int64_t j = 0; j < seg.width; ++j) readout[j] = static_cast<T>(attention ? sum[j] / total : sum[j]);
    for (size_t i = of.first; attention && i < of.last; ++i)
      partition.pieces[i].partial[0] = top, partition.pieces[i].partial[1] = total;
  }
}

template <class S>
void rows_backward(const ReadoutKernels<S>& kernels, const Segments& seg, const Gradients<S>& gradients) {
  constexpr int64_t most = INT32_MAX;
  const int64_t segments = seg.graphs * seg.branches;
  require(seg.entries <= most, "index must have at most ", most, " entries, got ", seg.entries);
  require(segments <= most, "ptr must have at most ", most, " segments, got ", segments);
  std::vector<int32_t> entries(seg.entries), place(seg.entries);
  for (int64_t branch = 0; branch < seg.branches; ++branch)
    for (int64_t graph = 0; graph < seg.graphs; ++graph)
      std::fill(place.begin() + first_entry(seg, branch, graph), place.begin() + first_entry(seg, branch, graph + 1),
                static_cast<int32_t>(graph * seg.branches + branch));
  const std::vector<int64_t> offsets = sort_by_key<int64_t>(
      seg.entries, seg.rows, [&](int64_t e) { return seg.narrow_index ? seg.narrow_index[e] : seg.wide_index[e]; },
      [&](int64_t e, int64_t at) { entries[at] = static_cast<int32_t>(e); });
  const EntriesOfRow of = {offsets.data(), entries.data(), place.data(), seg.branches, seg.width};
  const auto cost = [&](int64_t u) { return u + offsets[u]; };
  parallel_items(seg.rows, (seg.rows + seg.entries) * seg.width, cost, [&](int64_t begin, int64_t end) {
    kernels.rows_backward(of, gradients.grad, seg.count, gradients.alpha, gradients.dbeta, gradients.w, gradients.dz,
                          begin, end);
  });
}

Tensor sum_readout(const Tensor& z, const Tensor& ptr, OptionalTensor index, OptionalTensor count, int64_t num_branches,
                   bool shared, bool check_invariants) {
  const int64_t num_rows = rows_of(z);
  const ScalarType value = z.scalar_type();
  require(!shared || z.dim() == 2 || z.size(0) == num_branches, "z must have ", num_branches, " branches, got ",
          z.size(0));
  const Segments seg =
      checked_segments(num_rows, z.size(-1), ptr, index, count, num_branches, shared, check_invariants);
  Tensor readout = empty({seg.graphs, seg.branches * seg.width}, value);
  dispatch_storage(value, [&]<class S>(Tag<S>) {
    using T = Compute<S>;
    const S* rows = stored<S>(z);
    Converted<S> result(readout, false);
    T* out = result.data();
    Partition partition = cut_into_pieces(seg);
    if (!partition.longs.empty()) allot_partials(partition, padded_to(column_multiple, seg.width) + 2);
    const auto kernel = isa_kernels<ReadoutKernels<S>>().sum;
    for_each_piece<T>(partition, seg.width,
                      [&](const Piece& piece, const Scratch<T>& scratch) { kernel(seg, piece, scratch, rows, out); });
    combine(seg, partition, false, out);
    result.round();
  });
  return readout;
}

Tensor sum_readout_backward(const Tensor& grad, const Tensor& ptr, OptionalTensor index, OptionalTensor count,
                            int64_t num_branches, int64_t num_rows, bool shared, bool check_invariants) {
  const ScalarType value = expect("grad", grad, {any, any}, stored_types);
  check_num_branches(num_branches);
  require(num_rows >= 0, "num_rows must be at least 0, got ", num_rows);
  product_of("num_rows", sum_of("num_rows", num_rows, 2), sizeof(int64_t));  // of where the entries of a row begin
  const Segments seg = checked_segments(num_rows, grad.size(1) / num_branches, ptr, index, count, num_branches, shared,
                                        check_invariants);
  expect("grad", grad, {seg.graphs, seg.branches * seg.width}, {value});
  Tensor dz = empty({num_rows, seg.width}, value);
  dispatch_storage(value, [&]<class S>(Tag<S>) {
    using T = Compute<S>;
    Converted<S> ds(grad);
    Gradients<S> of = {};
    of.grad = ds.data();
    of.dz = static_cast<S*>(dz.mutable_data_ptr());
    of.bypass = bypasses_caches(dz, seg.width, false);
    const auto kernels = isa_kernels<ReadoutKernels<S>>();
    if (index) return rows_backward(kernels, seg, of);
    for_each_piece<T>(cut_into_pieces(seg), seg.width, [&](const Piece& piece, const Scratch<T>& scratch) {
      kernels.sum_backward(seg, piece, scratch, of);
    });
  });
  return dz;
}

std::tuple<Tensor, Tensor> attention_readout(const Tensor& z, const Tensor& w, const Tensor& ptr, OptionalTensor index,
                                             OptionalTensor count, bool shared, bool check_invariants) {
  const int64_t num_rows = rows_of(z);
  const ScalarType value = z.scalar_type();
  const Segments seg =
      checked_segments(num_rows, z.size(-1), ptr, index, count, branches_of(w, z), shared, check_invariants);
  Tensor readout = empty({seg.graphs, seg.branches * seg.width}, compute_type(value));
  Tensor alpha = empty({seg.entries}, compute_type(value));
  dispatch_storage(value, [&]<class S>(Tag<S>) {
    using T = Compute<S>;
    Converted<S> w_wide(w);
    const S* rows = stored<S>(z);
    const T* vectors = w_wide.data();
    T *out = readout.mutable_data_ptr<T>(), *weights = alpha.mutable_data_ptr<T>();
    Partition partition = cut_into_pieces(seg);
    if (!partition.longs.empty()) allot_partials(partition, padded_to(column_multiple, seg.width) + 2);
    const auto kernels = isa_kernels<ReadoutKernels<S>>();
    for_each_piece<T>(partition, seg.width, [&](const Piece& piece, const Scratch<T>& scratch) {
      kernels.attention(seg, piece, scratch, rows, vectors, out, weights);
    });
    if (partition.longs.empty()) return;
    combine(seg, partition, true, out);
    for_each_piece<T>(partition, 0, [&](const Piece& piece, const Scratch<T>&) {
      if (piece.split) kernels.weights(seg, piece, static_cast<T>(piece.partial[0]), piece.partial[1], weights);
    });
  });
  return {readout, alpha};
}

std::tuple<Tensor, Tensor> attention_readout_backward(const Tensor& grad, OptionalTensor grad_alpha, const Tensor& z,
                                                      const Tensor& w, const Tensor& ptr, OptionalTensor index,
                                                      OptionalTensor count, const Tensor& readout, const Tensor& alpha,
                                                      bool shared, bool check_invariants) {
  const int64_t num_rows = rows_of(z);
  const ScalarType value = z.scalar_type();
  const Segments seg =
      checked_segments(num_rows, z.size(-1), ptr, index, count, branches_of(w, z), shared, check_invariants);
  expect("grad", grad, {seg.graphs, seg.branches * seg.width}, {compute_type(value)});
  expect("readout", readout, {seg.graphs, seg.branches * seg.width}, {compute_type(value)});
  expect("alpha", alpha, {seg.entries}, {compute_type(value)});
  if (grad_alpha) expect("grad_alpha", *grad_alpha, {seg.entries}, {compute_type(value)});
  Tensor dz = empty(z.sizes(), value), dw = empty(w.sizes(), value);
  dispatch_storage(value, [&]<class S>(Tag<S>) {
    using T = Compute<S>;
    const T *weights = alpha.const_data_ptr<T>(), *dalpha = data<T>(grad_alpha);
    std::vector<double> from_alpha;
    if (dalpha) from_alpha = sums_of_products(seg, weights, dalpha);
    std::vector<T> dbeta(index ? seg.entries : 0);
    Converted<S> w_wide(w), dvectors(dw, false);
    const Gradients<S> of = {grad.const_data_ptr<T>(),
                             dalpha,
                             dalpha ? from_alpha.data() : nullptr,
                             stored<S>(z),
                             w_wide.data(),
                             readout.const_data_ptr<T>(),
                             weights,
                             dbeta.data(),
                             static_cast<S*>(dz.mutable_data_ptr()),
                             bypasses_caches(dz, seg.width, true)};
    Partition partition = cut_into_pieces(seg);
    allot_partials(partition, padded_to(column_multiple, seg.width));
    const auto kernels = isa_kernels<ReadoutKernels<S>>();
    for_each_piece<T>(partition, seg.width, [&](const Piece& piece, const Scratch<T>& scratch) {
      kernels.attention_backward(seg, piece, scratch, of);
    });
    std::vector<double> sum(seg.branches * seg.width);
    for (const Piece& piece : partition.pieces)
      for (int64_t j = 0; j < seg.width; ++j) sum[piece.begin / seg.graphs * seg.width + j] += piece.partial[j];
    std::transform(sum.begin(), sum.end(), dvectors.data(), [](double value) { return static_cast<T>(value); });
    dvectors.round();
    if (index) rows_backward(kernels, seg, of);
  });
  return {dz, dw};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(spin_fast, CPU, m) {
  m.impl("sum_readout", TORCH_BOX(&sum_readout));
  m.impl("sum_readout_backward", TORCH_BOX(&sum_readout_backward));
  m.impl("attention_readout", TORCH_BOX(&attention_readout));
  m.impl("attention_readout_backward", TORCH_BOX(&attention_readout_backward));
}

}  // namespace spin_fast
