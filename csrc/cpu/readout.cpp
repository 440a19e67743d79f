// sum_readout, attention_readout and their gradients: from tensors to the kernels in readout.inl.

#include <string>
#include <tuple>
#include <vector>

#include "../check.h"
#include "ops.h"

namespace spin_fast {
namespace {

struct Form {
  int64_t rows, width, entries, branches, graphs;
};

// Checks ptr, index and count against a z of [rows, width]. `shared`: z is the dense form, every branch reads the same
// ptr.
Form form_of(int64_t rows, int64_t width, const Tensor& ptr, const OptionalTensor& index, const OptionalTensor& count,
             int64_t branches, bool shared, bool checked) {
  expect("ptr", ptr, {-1}, ScalarType::Long);
  STD_TORCH_CHECK(ptr.numel() >= 1 && branches >= 1, "ptr must have at least one entry, and there must be a branch");
  if (index) expect("index", *index, {-1}, index->scalar_type());
  const int64_t entries = index ? index->numel() : rows;
  if (count) expect("count", *count, {entries}, ScalarType::Int);
  const int64_t runs = ptr.numel() - 1;
  STD_TORCH_CHECK(!shared || (!index && !count && rows % branches == 0),
                  "the dense form takes neither index nor count, and as many rows in each branch");
  STD_TORCH_CHECK(shared || runs % branches == 0, "ptr must have a multiple of the number of branches as segments");
  if (!checked) {
    const int64_t end = shared ? rows / branches : entries;
    dispatch(ScalarType::Float, index ? index->scalar_type() : ScalarType::Long, [&](auto, auto index_tag) {
      using I = typename decltype(index_tag)::type;
      const std::string problem =
          check_segments(ptr.const_data_ptr<int64_t>(), runs, data<I>(index), data<int32_t>(count), end, rows);
      STD_TORCH_CHECK(problem.empty(), problem);
    });
  }
  return {rows, width, entries, branches, shared ? runs : runs / branches};
}

template <class I>
Segments<I> segments_of(const Form& form, const Tensor& ptr, const OptionalTensor& index, const OptionalTensor& count,
                        bool shared) {
  return {ptr.const_data_ptr<int64_t>(),
          data<I>(index),
          data<int32_t>(count),
          form.graphs,
          form.branches,
          shared ? 0 : form.graphs,
          shared ? form.rows / form.branches : 0,
          form.width};
}

template <class I>
int64_t first_entry(const Segments<I>& seg, int64_t branch, int64_t graph) {
  return seg.ptr[branch * seg.ptr_stride + graph] + branch * seg.entry_stride;
}

// Runs f(branch, piece, begin, end) over the segments of each branch, pieces in parallel.
template <class I, class F>
void for_each_piece(const Segments<I>& seg, int64_t pieces, F f) {
  const auto run = [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t branch = i / pieces, piece = i % pieces;
      const auto cost = [&](int64_t graph) { return first_entry(seg, branch, graph) + graph; };
      const int64_t base = branch * seg.graphs;
      f(branch, piece, base + cut(cost, seg.graphs, piece, pieces), base + cut(cost, seg.graphs, piece + 1, pieces));
    }
  };
  if (pieces == 1) return run(0, seg.branches);
  torch::stable::parallel_for(0, seg.branches * pieces, 1, run);
}

int64_t pieces_of(const Form& form) { return number_of_pieces(form.entries * form.width / form.branches, form.graphs); }

// The entries of each row of z: a counting sort of `index`, or the identity.
struct RowEntries {
  std::vector<int64_t> offsets, entries;
  Tensor place;
  EntriesOfRow view;
};

template <class I>
RowEntries entries_of_rows(const Form& form, const Segments<I>& seg) {
  RowEntries of;
  of.place = empty({form.entries}, ScalarType::Long);
  int64_t* place = of.place.mutable_data_ptr<int64_t>();
  for (int64_t branch = 0; branch < form.branches; ++branch)
    for (int64_t graph = 0; graph < form.graphs; ++graph)
      std::fill(place + first_entry(seg, branch, graph), place + first_entry(seg, branch, graph + 1),
                graph * form.branches + branch);
  if (seg.index) {
    of.offsets.assign(form.rows + 1, 0);
    of.entries.resize(form.entries);
    for (int64_t e = 0; e < form.entries; ++e) ++of.offsets[seg.index[e] + 1];
    for (int64_t u = 0; u < form.rows; ++u) of.offsets[u + 1] += of.offsets[u];
    std::vector<int64_t> next(of.offsets.begin(), of.offsets.end() - 1);
    for (int64_t e = 0; e < form.entries; ++e) of.entries[next[seg.index[e]]++] = e;
  }
  of.view = {seg.index ? of.offsets.data() : nullptr, of.entries.data(), place, form.branches, form.width};
  return of;
}

template <class T, class I>
void rows_backward(const Form& form, const Segments<I>& seg, const T* grad, const T* alpha, const T* dbeta, const T* w,
                   T* dz) {
  const RowEntries of = entries_of_rows(form, seg);
  const auto cost = [&](int64_t u) { return u + (seg.index ? of.offsets[u] : u); };
  parallel_items(form.rows, (form.rows + form.entries) * form.width, cost, [&](int64_t begin, int64_t end) {
    kernels<T, I>().rows_backward(of.view, grad, seg.count, alpha, dbeta, w, dz, begin, end);
  });
}

// Calls f(segments, Tag<T>) with the types of the values and of the index.
template <class F>
void with_segments(const Form& form, ScalarType value, const Tensor& ptr, const OptionalTensor& index,
                   const OptionalTensor& count, bool shared, F f) {
  dispatch(value, index ? index->scalar_type() : ScalarType::Long, [&](auto value_tag, auto index_tag) {
    using I = typename decltype(index_tag)::type;
    f(segments_of<I>(form, ptr, index, count, shared), value_tag, index_tag);
  });
}

Tensor sum_readout(const Tensor& z, const Tensor& ptr, OptionalTensor index, OptionalTensor count, int64_t num_branches,
                   bool shared, bool checked) {
  const ScalarType value = z.scalar_type();
  expect("z", z, {-1, -1}, value);
  const Form form = form_of(z.size(0), z.size(1), ptr, index, count, num_branches, shared, checked);
  Tensor readout = empty({form.graphs, form.branches * form.width}, value);
  with_segments(form, value, ptr, index, count, shared, [&](const auto& seg, auto value_tag, auto index_tag) {
    using T = typename decltype(value_tag)::type;
    using I = typename decltype(index_tag)::type;
    const T* rows = z.const_data_ptr<T>();
    T* out = readout.mutable_data_ptr<T>();
    for_each_piece(seg, pieces_of(form), [&](int64_t, int64_t, int64_t begin, int64_t end) {
      kernels<T, I>().sum_readout(seg, rows, out, begin, end);
    });
  });
  return readout;
}

Tensor sum_readout_backward(const Tensor& grad, const Tensor& ptr, OptionalTensor index, OptionalTensor count,
                            int64_t num_branches, int64_t num_rows, bool shared, bool checked) {
  const ScalarType value = grad.scalar_type();
  expect("grad", grad, {-1, -1}, value);
  STD_TORCH_CHECK(num_branches >= 1 && grad.size(1) % num_branches == 0, "grad has the wrong shape");
  const Form form = form_of(num_rows, grad.size(1) / num_branches, ptr, index, count, num_branches, shared, checked);
  STD_TORCH_CHECK(grad.size(0) == form.graphs, "grad has the wrong shape");
  Tensor dz = empty({num_rows, form.width}, value);
  with_segments(form, value, ptr, index, count, shared, [&](const auto& seg, auto value_tag, auto) {
    using T = typename decltype(value_tag)::type;
    rows_backward<T>(form, seg, grad.const_data_ptr<T>(), nullptr, nullptr, nullptr, dz.mutable_data_ptr<T>());
  });
  return dz;
}

std::tuple<Tensor, Tensor> attention_readout(const Tensor& z, const Tensor& w, const Tensor& ptr, OptionalTensor index,
                                             OptionalTensor count, bool shared, bool checked) {
  const ScalarType value = z.scalar_type();
  expect("z", z, {-1, -1}, value);
  expect("w", w, {-1, z.size(1)}, value);
  const Form form = form_of(z.size(0), z.size(1), ptr, index, count, w.size(0), shared, checked);
  Tensor readout = empty({form.graphs, form.branches * form.width}, value);
  Tensor alpha = empty({form.entries}, value);
  with_segments(form, value, ptr, index, count, shared, [&](const auto& seg, auto value_tag, auto index_tag) {
    using T = typename decltype(value_tag)::type;
    using I = typename decltype(index_tag)::type;
    const T *rows = z.const_data_ptr<T>(), *vectors = w.const_data_ptr<T>();
    T *out = readout.mutable_data_ptr<T>(), *weights = alpha.mutable_data_ptr<T>();
    for_each_piece(seg, pieces_of(form), [&](int64_t, int64_t, int64_t begin, int64_t end) {
      kernels<T, I>().attention_readout(seg, rows, vectors, out, weights, begin, end);
    });
  });
  return {readout, alpha};
}

std::tuple<Tensor, Tensor> attention_readout_backward(const Tensor& grad, OptionalTensor grad_alpha, const Tensor& z,
                                                      const Tensor& w, const Tensor& ptr, OptionalTensor index,
                                                      OptionalTensor count, const Tensor& readout, const Tensor& alpha,
                                                      bool shared, bool checked) {
  const ScalarType value = z.scalar_type();
  expect("z", z, {-1, -1}, value);
  expect("w", w, {-1, z.size(1)}, value);
  const Form form = form_of(z.size(0), z.size(1), ptr, index, count, w.size(0), shared, checked);
  expect("grad", grad, {form.graphs, form.branches * form.width}, value);
  expect("readout", readout, {form.graphs, form.branches * form.width}, value);
  expect("alpha", alpha, {form.entries}, value);
  if (grad_alpha) expect("grad_alpha", *grad_alpha, {form.entries}, value);
  Tensor dz = empty({form.rows, form.width}, value), dw = empty({form.branches, form.width}, value);
  with_segments(form, value, ptr, index, count, shared, [&](const auto& seg, auto value_tag, auto index_tag) {
    using T = typename decltype(value_tag)::type;
    using I = typename decltype(index_tag)::type;
    const T *ds = grad.const_data_ptr<T>(), *rows = z.const_data_ptr<T>(), *vectors = w.const_data_ptr<T>();
    const T *s = readout.const_data_ptr<T>(), *weights = alpha.const_data_ptr<T>(), *dalpha = data<T>(grad_alpha);
    const int64_t pieces = pieces_of(form);
    std::vector<double> partial(form.branches * pieces * form.width);
    Tensor scratch = empty({form.entries}, value);
    T* dbeta = scratch.mutable_data_ptr<T>();
    for_each_piece(seg, pieces, [&](int64_t branch, int64_t piece, int64_t begin, int64_t end) {
      kernels<T, I>().attention_backward(seg, ds, dalpha, rows, vectors, s, weights, dbeta,
                                         partial.data() + (branch * pieces + piece) * form.width, begin, end);
    });
    T* dvectors = dw.mutable_data_ptr<T>();
    for (int64_t i = 0; i < form.branches * form.width; ++i) {
      double sum = 0;
      for (int64_t piece = 0; piece < pieces; ++piece)
        sum += partial[(i / form.width * pieces + piece) * form.width + i % form.width];
      dvectors[i] = static_cast<T>(sum);
    }
    rows_backward<T>(form, seg, ds, weights, dbeta, vectors, dz.mutable_data_ptr<T>());
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
