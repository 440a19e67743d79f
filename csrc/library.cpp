// The schemas of all ops, and the pybind11 module _C: loading it registers the ops, and it has what torch ops cannot
// return (build facts, the instruction set, messages about bad contents).
//
// Common arguments: `ptr`, `index`, `count` as in spin_fast/ops; `shared`: z is the dense form [R + 1, N, h] and every
// branch reads the same ptr; `parts` [J, k]: joint rows, which consist of k rows side by side; `tf32`: the MLPs may
// round their factors to TF32 (CUDA only); `check_invariants`: check the contents of the index arrays; `hash_bits`: 64,
// or less in tests that need collisions. For bfloat16 and float16 rows the attention's readout, alpha and their
// gradients are float32.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <optional>
#include <set>

#include "arguments.h"
#include "check.h"
#include "cpu/distinct.h"
#include "cpu/evaluated.h"
#include "cpu/pace.h"
#include "csr.h"

STABLE_TORCH_LIBRARY(spin_fast, m) {
  m.def(
      "power_features(Tensor indptr, Tensor indices, Tensor x, int num_hops, str operator, Tensor? ptr, "
      "Tensor? edge_weight, bool check_invariants, bool float64_sums) -> Tensor");
  m.def(
      "power_features_out(Tensor indptr, Tensor indices, Tensor x, int num_hops, str operator, Tensor? ptr, "
      "Tensor? edge_weight, bool check_invariants, bool float64_sums, Tensor(a!) out) -> ()");
  m.def(
      "power_features_backward(Tensor indptr, Tensor indices, Tensor grad, str operator, Tensor? ptr, "
      "Tensor? edge_weight, bool check_invariants) -> Tensor");
  m.def(
      "sum_readout(Tensor z, Tensor ptr, Tensor? index, Tensor? count, int num_branches, bool shared, "
      "bool check_invariants) -> Tensor");
  m.def(
      "sum_readout_backward(Tensor grad, Tensor ptr, Tensor? index, Tensor? count, int num_branches, SymInt num_rows, "
      "bool shared, bool check_invariants) -> Tensor");
  m.def(
      "attention_readout(Tensor z, Tensor w, Tensor ptr, Tensor? index, Tensor? count, bool shared, "
      "bool check_invariants) -> (Tensor readout, Tensor alpha)");
  m.def(
      "attention_readout_backward(Tensor grad, Tensor? grad_alpha, Tensor z, Tensor w, Tensor ptr, Tensor? index, "
      "Tensor? count, Tensor readout, Tensor alpha, bool shared, bool check_invariants) -> (Tensor dz, Tensor dw)");
  m.def(
      "branch_readout(Tensor rows, Tensor? crow_indices, Tensor? col_indices, int num_features, Tensor parameters, "
      "Tensor? parts, Tensor ptr, Tensor? index, Tensor? count, "
      "Tensor? ids, int num_branches, int[] widths, bool attention, float negative_slope, bool tf32, bool shared, "
      "bool check_invariants) -> Tensor");
  m.def(
      "branch_readout_backward(Tensor grad, Tensor rows, Tensor? crow_indices, Tensor? col_indices, int num_features, "
      "Tensor parameters, Tensor? parts, Tensor ptr, Tensor? index, "
      "Tensor? count, Tensor? ids, int num_branches, int[] widths, bool attention, float negative_slope, bool tf32, "
      "bool shared, bool check_invariants, bool with_rows) -> (Tensor dparameters, Tensor drows)");
  m.def(
      "training_step(Tensor rows, Tensor? crow_indices, Tensor? col_indices, int num_features, Tensor parameters, "
      "Tensor labels, Tensor? class_weight, Tensor? ptr, Tensor? index, "
      "Tensor? count, Tensor? parts, Tensor? joint_ptr, Tensor? joint_index, Tensor? joint_count, Tensor? ids, "
      "int num_branches, int[] widths, int[] classifier_widths, bool attention, float negative_slope, bool tf32, bool "
      "check_invariants) -> (Tensor loss, Tensor gradient)");
  m.def(
      "training_steps(Tensor rows, Tensor? crow_indices, Tensor? col_indices, int num_features, Tensor(a!) parameters, "
      "Tensor labels, Tensor? class_weight, Tensor? ptr, Tensor? index, "
      "Tensor? count, Tensor? parts, Tensor? joint_ptr, Tensor? joint_index, Tensor? joint_count, Tensor ids, "
      "int num_branches, int[] widths, int[] classifier_widths, bool attention, float negative_slope, bool tf32, bool "
      "check_invariants, int batch_size, Tensor(b!) gradient, Tensor(c!) exp_avg, Tensor(d!) "
      "exp_avg_sq, Tensor(e!) num_steps, float learning_rate, float beta1, float beta2, float weight_decay, float eps) "
      "-> Tensor");
  m.def(
      "subtree_keys(Tensor indptr, Tensor indices, Tensor x, Tensor? edge_type, int num_hops, int seed, "
      "bool check_invariants) -> Tensor");
  m.def(
      "distinct_rows(Tensor powers, Tensor ptr, bool wide_index, int hash_bits, bool check_invariants) "
      "-> (Tensor rows, Tensor row_ptr, Tensor ptr, Tensor index, Tensor count, Tensor row_of_node)");
}

namespace py = pybind11;

namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style>;

template <class T>
const T* data(const std::optional<Array<T>>& array) {
  return array ? array->data() : nullptr;
}

template <class I>
std::string check_csr(const Array<I>& indptr, const Array<I>& indices, const std::optional<Array<int64_t>>& ptr,
                      int64_t num_nodes) {
  return spin_fast::check_csr(indptr.data(), indices.data(), indices.size(), data(ptr), ptr ? ptr->size() - 1 : 0,
                              num_nodes);
}

template <class I>
std::string check_segments(const Array<int64_t>& ptr, const std::optional<Array<I>>& index,
                           const std::optional<Array<int32_t>>& count, const Array<int64_t>& row_ptr) {
  const int64_t branches = row_ptr.size() - 1, entries = index ? index->size() : row_ptr.at(branches);
  return spin_fast::check_segments(ptr.data(), ptr.size() - 1, data(index), data(count), entries, row_ptr.data(),
                                   branches);
}

using spin_fast::check_num_branches;
using spin_fast::check_widths;
using spin_fast::DistinctRows;
using spin_fast::EvaluatedRows;
using spin_fast::Model;
using spin_fast::require;
using spin_fast::ScalarType;
using spin_fast::Tensor;

ScalarType word_of(int64_t bytes) { return bytes == 4 ? ScalarType::Float : ScalarType::Double; }

void check_powers(const py::array& powers, int64_t branches, int64_t width, int64_t bytes) {
  if (powers.ndim() != 3 || powers.shape(0) != branches || powers.shape(2) != width || powers.itemsize() != bytes ||
      !(powers.flags() & py::array::c_style))
    throw py::value_error("powers must be [branches, N, d], contiguous, and of the dtype of all chunks");
}

void check_nodes(const Array<int64_t>& ptr, int64_t nodes) {
  if (ptr.size() == 0) throw py::value_error("ptr must have at least one entry");
  const std::string problem = spin_fast::check_offsets("ptr", ptr.data(), ptr.size() - 1, nodes, "nodes");
  if (!problem.empty()) throw py::value_error(problem);
}

void add_rows(DistinctRows& found, const py::array& powers, const Array<int64_t>& ptr) {
  check_powers(powers, found.branches, found.width, found.bytes);
  check_nodes(ptr, powers.shape(1));
  found.add(powers.data(), ptr.data(), ptr.size() - 1);
}

// `x` [N, d] and CSR arrays of a batch, and the offsets of some consecutive graphs of it. Contents of the CSR arrays
// are not checked.
template <class I>
spin_fast::GraphRange graph_range(const Array<I>& indptr, const Array<I>& indices, const py::array& x,
                                  const Array<int64_t>& ptr, int64_t width, int64_t bytes) {
  if (x.ndim() != 2 || x.shape(1) != width || x.itemsize() != bytes || !(x.flags() & py::array::c_style))
    throw py::value_error("x must be [N, d], contiguous, and of the dtype of all chunks");
  require(indptr.size() == x.shape(0) + 1, "indptr must have ", x.shape(0) + 1, " entries, got ", indptr.size());
  require(ptr.size() > 0, "ptr must have at least one entry");
  const int64_t* offsets = ptr.data();
  for (int64_t g = 0; g < ptr.size(); ++g)
    require(offsets[g] >= (g ? offsets[g - 1] : 0) && offsets[g] <= x.shape(0), "ptr must be ascending from 0 to ",
            x.shape(0), " nodes at most, got ", offsets[g], " at ", g);
  return {indptr.data(), indices.data(), sizeof(I) == 8, indices.size(), offsets, ptr.size() - 1, x.data()};
}

template <class I>
bool add_graphs(DistinctRows& found, const Array<I>& indptr, const Array<I>& indices, const py::array& x,
                const Array<int64_t>& ptr) {
  return found.add(graph_range(indptr, indices, x, ptr, found.width, found.bytes));
}

// An array that keeps its tensor.
py::array array_of(const Tensor& t) {
  const char* dtype = t.scalar_type() == ScalarType::Float    ? "float32"
                      : t.scalar_type() == ScalarType::Double ? "float64"
                      : t.scalar_type() == ScalarType::Int    ? "int32"
                                                              : "int64";
  std::vector<int64_t> shape;
  for (int64_t axis = 0; axis < t.dim(); ++axis) shape.push_back(t.size(axis));
  const py::capsule owner(new Tensor(t), [](void* tensor) { delete static_cast<Tensor*>(tensor); });
  return py::array(py::dtype(dtype), shape, t.data_ptr(), owner);
}

// indptr, indices, and if it is wanted the edge that each entry was, unless the edges come in this order.
template <class I>
py::tuple csr_of_edges(const Array<I>& edge_index, int64_t num_nodes, bool wants_order) {
  require(edge_index.ndim() == 2 && edge_index.shape(0) == 2, "edge_index must be [2, E]");
  require(num_nodes >= 0, "num_nodes must be at least 0, got ", num_nodes);
  const int64_t edges = edge_index.shape(1), most = std::numeric_limits<I>::max();
  require(edges <= most, "edge_index must be int64 to have more than ", most, " edges, got ", edges);
  const I *source = edge_index.data(), *target = source + edges;
  const ScalarType type = sizeof(I) == 4 ? ScalarType::Int : ScalarType::Long;
  Tensor indptr = spin_fast::empty({num_nodes + 1}, type), indices = spin_fast::empty({edges}, type);
  Tensor order = spin_fast::empty({wants_order ? edges : 0}, type);
  const auto to = [](Tensor& t) { return static_cast<I*>(t.mutable_data_ptr()); };
  bool in_order = true;
  {
    const py::gil_scoped_release others_may_run;
    if (!spin_fast::is_within(source, 0, 2 * edges, 0, num_nodes)) {
      const auto [low, high] = std::minmax_element(source, source + 2 * edges);
      spin_fast::refuse("edge_index must be in [0, ", num_nodes, "), got ", *low, "..", *high);
    }
    in_order = spin_fast::csr_of_edges(source, target, edges, num_nodes, to(indptr), to(indices),
                                       wants_order ? to(order) : nullptr);
  }
  return py::make_tuple(array_of(indptr), array_of(indices),
                        wants_order && !in_order ? py::object(array_of(order)) : py::none());
}

py::tuple take_rows(DistinctRows& found) {
  const auto indices = found.take_indices();
  py::tuple arrays = std::apply([](const auto&... t) { return py::make_tuple(array_of(t)...); }, found.take());
  if (indices) arrays = arrays + py::make_tuple(array_of(indices->first), array_of(indices->second));
  return arrays;
}

std::vector<spin_fast::Operator> parse_operators(const std::vector<std::string>& names, int64_t branches) {
  require(names.empty() || (branches - 1) % static_cast<int64_t>(names.size()) == 0, "operators must share ",
          branches - 1, " hops, got ", names.size());
  std::vector<spin_fast::Operator> operators;
  for (const std::string& name : names) operators.push_back(spin_fast::parse_operator(name));
  return operators;
}

template <class T>
std::unique_ptr<EvaluatedRows> evaluated_rows(const Array<T>& parameters, int64_t features, int64_t branches,
                                              const std::vector<int64_t>& widths, bool attention, double slope,
                                              int64_t room, const std::vector<std::string>& operators) {
  require(features >= 0, "features must be at least 0, got ", features);
  check_widths("widths", widths);
  check_num_branches(branches);
  require(slope >= 0 && std::isfinite(slope), "negative_slope must be finite and at least 0, got ", slope);
  const Model model = {features, branches, widths, attention, slope};
  require(parameters.size() == model.parameters(), "parameters must be ", model.parameters(), ", got ",
          parameters.size());
  return spin_fast::make_evaluated_rows(model, parameters.data(), word_of(sizeof(T)), room,
                                        parse_operators(operators, branches));
}

// Runs f(i) for i in [0, n) and throws what one of them has thrown, of which torch would make another error.
template <class F>
void in_parallel(int64_t n, F f) {
  std::exception_ptr error;
  std::mutex writes;
  spin_fast::parallel_ranges(n, [&](int64_t begin, int64_t end) {
    try {
      for (int64_t i = begin; i < end; ++i) f(i);
    } catch (...) {
      const std::lock_guard lock(writes);
      error = std::current_exception();
    }
  });
  if (error) std::rethrow_exception(error);
}

// Of consecutive graphs of a batch, chunk by chunk, and which chunks have them: not one that does not fit, nor, but for
// `by_powers`, one whose patterns do not pay. A thread for each of the rows takes one chunk after the other.
template <class I>
std::pair<py::array, std::vector<bool>> readouts_of_graphs(const std::vector<EvaluatedRows*>& rows,
                                                           const Array<I>& indptr, const Array<I>& indices,
                                                           const py::array& x, const std::vector<Array<int64_t>>& ptrs,
                                                           bool by_powers) {
  const auto chunks = static_cast<int64_t>(ptrs.size());
  require(!rows.empty() && std::set(rows.begin(), rows.end()).size() == rows.size(), "rows must be different objects");
  const int64_t features = rows[0]->model.features, width = rows[0]->model.readout_width();
  const int64_t bytes = rows[0]->bytes, room = rows[0]->room;
  for (const EvaluatedRows* of : rows)
    require(
        of->model.features == features && of->model.readout_width() == width && of->bytes == bytes && of->room == room,
        "rows must be alike");
  std::vector<spin_fast::GraphRange> graphs;
  for (const Array<int64_t>& ptr : ptrs) graphs.push_back(graph_range(indptr, indices, x, ptr, features, bytes));
  std::vector<int64_t> first = {0};  // graph of each chunk
  for (const auto& chunk : graphs) first.push_back(first.back() + chunk.graphs);
  Tensor readouts = spin_fast::empty({first.back(), width}, word_of(bytes));
  char* const out = static_cast<char*>(readouts.mutable_data_ptr());
  std::vector<char> is_made(chunks);  // threads write to it
  {
    const py::gil_scoped_release others_may_run;
    std::atomic<int64_t> taken = 0;
    const int64_t threads = std::min<int64_t>(rows.size(), chunks);
    in_parallel(threads, [&](int64_t t) {
      const spin_fast::Serial serial(threads > 1);
      for (int64_t i = taken++; i < chunks; i = taken++) {
        if (graphs[i].nodes() > room) continue;
        void* const to = out + first[i] * width * bytes;
        is_made[i] = rows[t]->readout_by_patterns(graphs[i], to);
        if (is_made[i] || !by_powers) continue;
        rows[t]->readout(graphs[i], to);
        is_made[i] = true;
      }
    });
  }
  return {array_of(readouts), std::vector<bool>(is_made.begin(), is_made.end())};
}

py::array readout_of_rows(EvaluatedRows& rows, const py::array& powers, const Array<int64_t>& ptr) {
  check_powers(powers, rows.model.branches, rows.model.features, rows.bytes);
  check_nodes(ptr, powers.shape(1));
  require(powers.shape(1) <= rows.room, "powers must have at most ", rows.room, " nodes, got ", powers.shape(1));
  const void* values = powers.data();
  const int64_t *offsets = ptr.data(), graphs = ptr.size() - 1;
  Tensor readouts = spin_fast::empty({graphs, rows.model.readout_width()}, word_of(rows.bytes));
  {
    const py::gil_scoped_release others_may_run;
    rows.readout(values, offsets, graphs, readouts.mutable_data_ptr());
  }
  return array_of(readouts);
}

template <class T>
py::array class_scores(const Array<T>& readouts, const Array<T>& parameters, const std::vector<int64_t>& widths,
                       double slope) {
  require(readouts.ndim() == 2, "readouts must be [G, k], got ", readouts.ndim(), " dimensions");
  require(slope >= 0 && std::isfinite(slope), "negative_slope must be finite and at least 0, got ", slope);
  const int64_t size = spin_fast::classifier_parameters(readouts.shape(1), widths);
  require(parameters.size() == size, "parameters must be ", size, ", got ", parameters.size());
  return array_of([&] {
    const py::gil_scoped_release others_may_run;
    return spin_fast::class_scores(readouts.data(), readouts.shape(0), readouts.shape(1), parameters.data(),
                                   word_of(sizeof(T)), widths, slope);
  }());
}

// In a parallel region, inside which torch opens no other.
void on_this_thread(const py::function& f) {
  in_parallel(2, [&](int64_t task) {
    if (task == 0) f();
  });
}

}  // namespace

PYBIND11_MODULE(_C, m, py::mod_gil_not_used()) {
  m.doc() = "The compiled part of spin_fast; importing it registers torch.ops.spin_fast.*";
  const auto same_type = py::arg().noconvert();
  m.def("check_csr", &check_csr<int32_t>, same_type, same_type, py::arg(), py::arg());
  m.def("check_csr", &check_csr<int64_t>, same_type, same_type, py::arg(), py::arg());
  m.def("check_segments", &check_segments<int32_t>, same_type, same_type, py::arg(), py::arg());
  m.def("check_segments", &check_segments<int64_t>, same_type, same_type, py::arg(), py::arg());
  m.def("check_sparse_rows", [](const Array<int32_t>& crow_indices, const Array<int32_t>& col_indices, int64_t width) {
    return spin_fast::check_sparse_rows(crow_indices.data(), crow_indices.size() - 1, col_indices.data(),
                                        col_indices.size(), width);
  });
  m.def("csr_of_edges", &csr_of_edges<int32_t>, same_type, py::arg(), py::arg());
  m.def("csr_of_edges", &csr_of_edges<int64_t>, same_type, py::arg(), py::arg());
  py::class_<DistinctRows>(m, "DistinctRows", "The distinct rows of powers that come chunk by chunk.")
      .def(py::init([](int64_t branches, int64_t nodes, int64_t width, int64_t graphs, int64_t bytes, bool wide_index,
                       bool node_rows, std::optional<bool> sparse, const std::vector<std::string>& operators) {
        using spin_fast::RowLayout;
        const auto layout = !sparse ? RowLayout::chosen : *sparse ? RowLayout::sparse : RowLayout::dense;
        return spin_fast::make_distinct_rows(branches, nodes, width, graphs, word_of(bytes), wide_index, node_rows, 64,
                                             layout, parse_operators(operators, branches));
      }))
      .def("add", &add_rows, same_type, same_type)
      .def("add_graphs", &add_graphs<int32_t>, same_type, same_type, same_type, same_type)
      .def("add_graphs", &add_graphs<int64_t>, same_type, same_type, same_type, same_type)
      .def("is_sparse", &DistinctRows::is_sparse)
      .def("num_rows", &DistinctRows::num_rows)
      .def("take", &take_rows);
  py::class_<EvaluatedRows>(m, "EvaluatedRows", "The readouts of chunks of graphs by MLPs whose weights stand still.")
      .def(py::init(&evaluated_rows<float>), same_type, py::arg(), py::arg(), py::arg(), py::arg(), py::arg(),
           py::arg(), py::arg())
      .def(py::init(&evaluated_rows<double>), same_type, py::arg(), py::arg(), py::arg(), py::arg(), py::arg(),
           py::arg(), py::arg())
      .def("readout", &readout_of_rows, same_type, same_type);
  py::class_<spin_fast::Pace>(m, "Pace", "Whether steps are made by one thread or by all; for tests.")
      .def(py::init())
      .def("begin", &spin_fast::Pace::begin)
      .def("is_alone", &spin_fast::Pace::is_alone)
      .def("steps", &spin_fast::Pace::steps)
      .def("add", &spin_fast::Pace::add);
  m.def("readouts_of_graphs", &readouts_of_graphs<int32_t>, py::arg(), same_type, same_type, same_type, py::arg(),
        py::arg());
  m.def("readouts_of_graphs", &readouts_of_graphs<int64_t>, py::arg(), same_type, same_type, same_type, py::arg(),
        py::arg());
  m.def("class_scores", &class_scores<float>, same_type, same_type, py::arg(), py::arg());
  m.def("class_scores", &class_scores<double>, same_type, same_type, py::arg(), py::arg());
  m.def("isa", &spin_fast::isa_name, "The instruction set that the CPU kernels run on.");
  m.def("isa_available", &spin_fast::available_isas, "The instruction sets that this CPU can run.");
  m.def("set_isa", &spin_fast::set_isa, "Choose the instruction set; ValueError if it is unknown or not there.");
  m.def("on_this_thread", &on_this_thread, "Call a function whose torch operations start no threads.");
  m.def("go_without_threads", [] { spin_fast::without_threads = true; });
  m.def("poison_scratch", [](bool on) { spin_fast::poison_scratch = on; });
  m.def("build_info", [] {
    py::dict info;
    info["compiler"] = __VERSION__;
    info["built_for_torch"] = SPIN_FAST_TORCH_TARGET;
    info["built_with_torch"] = SPIN_FAST_TORCH_BUILD;
    return info;
  });
}
