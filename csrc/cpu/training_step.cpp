// training_step: a pass forward, the classifier and its loss on the readouts of each chunk, and back.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>

#include "branch.h"

namespace spin_fast {
namespace {

// Softmax cross-entropy of one graph with its weight in the mean; the scores become their gradient.
template <class T>
double cross_entropy(T* scores, int64_t classes, int64_t label, double weight) {
  double top = scores[0], total = 0;
  for (int64_t c = 1; c < classes; ++c) top = std::max<double>(top, scores[c]);
  for (int64_t c = 0; c < classes; ++c) total += std::exp(scores[c] - top);
  const double loss = std::log(total) + top - scores[label];
  for (int64_t c = 0; c < classes; ++c)
    scores[c] = static_cast<T>((std::exp(scores[c] - top) / total - (c == label)) * weight);
  return loss * weight;
}

// The classifier on the readouts of a chunk, with its loss and gradients.
template <class T>
class Classifier {
 public:
  // `in`: columns of the readouts; the parameters begin at `at` in the flat vector.
  Classifier(Arena& arena, int64_t in, const std::vector<int64_t>& widths, double slope, const T* parameters,
             int64_t at)
      : arena_(arena) {
    packed_.add_classifier(arena, parameters, at, in, widths, slope, true);
    gradient_.resize(packed_.gradient_size);
  }

  // Memory for the readouts of so many graphs, and for their gradient.
  std::pair<T*, T*> reserve(int64_t graphs) {
    if (graphs > capacity_) {
      capacity_ = padded_to(column_multiple, graphs);
      const int64_t wide = packed_.layers[0].below;
      readout_ = arena_.take<T>(capacity_ * wide);
      std::memset(readout_, 0, capacity_ * wide * sizeof(T));
      grad_ = arena_.take<T>(capacity_ * wide);
      for (T*& spare : spare_) spare = arena_.take<T>(capacity_ * packed_.widest);
      activations_.clear();
      for (const Layer<T>& layer : packed_.layers) activations_.push_back(arena_.take<T>(capacity_ * layer.stride));
    }
    return {readout_, grad_};
  }

  // The loss of the reserved readouts; adds to the gradients, and leaves that of the readouts.
  template <class Label, class Weight>
  double step(int64_t graphs, int64_t threads, Label label, Weight weight) {
    const int64_t tasks = (graphs + task_graphs - 1) / task_graphs, size = packed_.gradient_size;
    std::vector<double> loss(tasks);
    partial_.assign((tasks - 1) * size, 0);  // of all tasks but the first
    parallel_tasks(tasks, threads, [&](int64_t task) {
      const int64_t begin = task * task_graphs, end = std::min(graphs, begin + task_graphs);
      loss[task] = step(begin, end, label, weight, task ? partial_.data() + (task - 1) * size : gradient_.data());
    });
    for (int64_t task = 1; task < tasks; ++task)
      for (int64_t i = 0; i < size; ++i) gradient_[i] += partial_[(task - 1) * size + i];
    return std::accumulate(loss.begin(), loss.end(), 0.0);
  }

  int64_t stride() const { return packed_.layers[0].below; }

  void write_gradient(T* gradient) const { packed_.unpack(gradient_.data(), gradient); }

 private:
  static constexpr int64_t task_graphs = 64;

  // The same for the graphs [begin, end).
  template <class Label, class Weight>
  double step(int64_t begin, int64_t end, Label label, Weight weight, T* gradients) {
    const auto kernels = isa_kernels<BranchKernels<T>>();
    const int64_t graphs = end - begin, stride = packed_.layers[0].below;
    const T* readout = readout_ + begin * stride;
    T *activations[most_layers], *gradient[most_layers], *spare[3];
    for (size_t l = 0; l < packed_.layers.size(); ++l) {
      activations[l] = activations_[l] + begin * packed_.layers[l].stride;
      gradient[l] = gradients + packed_.places[l].gradient;
    }
    for (int k = 0; k < 3; ++k) spare[k] = spare_[k] + begin * packed_.widest;
    kernels.mlp_forward(packed_.mlp(), readout, stride, graphs, activations);
    const Layer<T>& last = packed_.layers.back();
    double loss = 0;
    for (int64_t i = 0; i < graphs; ++i) {
      T* scores = spare[0] + i * last.stride;
      std::memcpy(scores, activations[packed_.layers.size() - 1] + i * last.stride, last.stride * sizeof(T));
      loss += cross_entropy(scores, last.out, label(begin + i), weight(label(begin + i)));
    }
    kernels.mlp_backward(packed_.mlp(), readout, stride, graphs, activations, activations, spare[0], spare[1], spare[2],
                         gradient, grad_ + begin * stride);
    return loss;
  }

  Arena& arena_;
  Packed<T> packed_;
  std::vector<T> gradient_, partial_;
  int64_t capacity_ = 0;
  T *readout_ = nullptr, *grad_ = nullptr, *spare_[3] = {};
  std::vector<T*> activations_;
};

std::tuple<Tensor, Tensor> training_step(const Tensor& rows, OptionalTensor crow_indices, OptionalTensor col_indices,
                                         int64_t num_features, const Tensor& parameters, const Tensor& labels,
                                         OptionalTensor class_weight, OptionalTensor ptr, OptionalTensor index,
                                         OptionalTensor count, OptionalTensor parts, OptionalTensor joint_ptr,
                                         OptionalTensor joint_index, OptionalTensor joint_count, OptionalTensor ids,
                                         int64_t num_branches, std::vector<int64_t> widths,
                                         std::vector<int64_t> classifier_widths, bool attention, double negative_slope,
                                         bool /*tf32*/, bool check_invariants) {
  const StepArguments step = step_arguments(rows, crow_indices, col_indices, num_features, parameters, ptr, index,
                                            count, parts, joint_ptr, joint_index, joint_count, ids, num_branches,
                                            widths, classifier_widths, attention, negative_slope, check_invariants);
  const Arguments& of = step.any();
  check_ids(of);
  const ScalarType value = rows.scalar_type();
  expect("labels", labels, {of.seg.graphs}, {ScalarType::Long});
  const int64_t* label = labels.const_data_ptr<int64_t>();
  const int64_t classes = classifier_widths.back();
  if (class_weight) expect("class_weight", *class_weight, {classes}, {value});
  const auto chosen = [&](int64_t i) { return of.ids ? of.ids[i] : i; };
  const auto label_of = [&](int64_t i) { return label[chosen(i)]; };
  for (int64_t i = 0; i < of.graphs; ++i)
    require(label_of(i) >= 0 && label_of(i) < classes, "labels must be in [0, ", classes, "), got labels[", chosen(i),
            "] = ", label_of(i));
  Tensor loss = empty({}, value), gradient = empty({parameters.numel()}, value);
  dispatch_compute(value, [&](auto tag) {
    using T = typename decltype(tag)::type;
    Workspace& memory = workspace();
    const T* values = parameters.const_data_ptr<T>();
    Classifier<T> classifier(memory.arena, step.readout_width(), classifier_widths, negative_slope, values,
                             step.parameters());
    const T* weights = class_weight ? class_weight->const_data_ptr<T>() : nullptr;
    double total = weights ? 0 : static_cast<double>(of.graphs);
    for (int64_t i = 0; weights && i < of.graphs; ++i) total += weights[label_of(i)];
    total = std::max(total, std::numeric_limits<double>::min());  // graphs that all weigh 0 have loss 0
    const auto weight_of = [&](int64_t label) { return (weights ? weights[label] : 1.0) / total; };
    const auto train = [&](auto& pass) {
      double sum = 0;
      while (pass.next()) {
        const int64_t graphs = pass.end() - pass.begin();
        const auto [readout, grad] = classifier.reserve(graphs);
        pass.forward(readout, classifier.stride());
        const auto label_in_chunk = [&](int64_t i) { return label_of(pass.begin() + i); };
        sum += classifier.step(graphs, pass.threads(), label_in_chunk, weight_of);
        pass.backward(grad);
      }
      *loss.mutable_data_ptr<T>() = static_cast<T>(sum);
      pass.write_gradient(gradient.mutable_data_ptr<T>());
    };
    const T* x = rows.const_data_ptr<T>();
    if (step.hops && step.joint)
      with_pass(memory, *step.hops, x, values, true, nullptr, [&](auto& hops) {
        const Model& model = step.hops->model;
        BranchPass<T> joint(memory, *step.joint, x, values + model.parameters(), true, nullptr);
        BothPasses<T, std::remove_reference_t<decltype(hops)>> both(hops, joint, model);
        train(both);
      });
    else
      with_pass(memory, of, x, values, true, nullptr, train);
    classifier.write_gradient(gradient.mutable_data_ptr<T>());
  });
  return {loss, gradient};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(spin_fast, CPU, m) { m.impl("training_step", TORCH_BOX(&training_step)); }

}  // namespace spin_fast
