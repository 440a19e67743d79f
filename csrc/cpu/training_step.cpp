// training_step: a pass forward, the classifier and its loss on the readouts of each chunk, and back. training_steps:
// one on each batch, and the update of the parameters.

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <utility>

#include "branch.h"
#include "pace.h"

namespace spin_fast {
namespace {

// Softmax cross-entropy of one graph with its weight in the mean; the scores become their gradient. `exps` [classes] is
// scratch.
template <class T>
double cross_entropy(T* scores, double* exps, int64_t classes, int64_t label, double weight) {
  double top = scores[0], total = 0;
  for (int64_t c = 1; c < classes; ++c) top = std::max<double>(top, scores[c]);
  for (int64_t c = 0; c < classes; ++c) {
    exps[c] = std::exp(scores[c] - top);
    total += exps[c];
  }
  const double loss = std::log(total) + top - scores[label];
  for (int64_t c = 0; c < classes; ++c) scores[c] = static_cast<T>((exps[c] / total - (c == label)) * weight);
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
    std::vector<double> exps(last.out);
    double loss = 0;
    for (int64_t i = 0; i < graphs; ++i) {
      T* scores = spare[0] + i * last.stride;
      std::memcpy(scores, activations[packed_.layers.size() - 1] + i * last.stride, last.stride * sizeof(T));
      loss += cross_entropy(scores, exps.data(), last.out, label(begin + i), weight(label(begin + i)));
    }
    kernels.mlp_backward(packed_.mlp(), readout, stride, graphs, activations, spare[0], spare[1], spare[2], gradient,
                         grad_ + begin * stride);
    return loss;
  }

  Arena& arena_;
  Packed<T> packed_;
  std::vector<T> gradient_, partial_;
  int64_t capacity_ = 0;
  T *readout_ = nullptr, *grad_ = nullptr, *spare_[3] = {};
  std::vector<T*> activations_;
};

// A step on a batch but for the update of the parameters, its arguments checked.
class Step {
 public:
  Step(StepArguments of, const Tensor& rows, const Tensor& labels, const OptionalTensor& class_weight,
       const std::vector<int64_t>& classifier_widths, double slope)
      : of_(std::move(of)), rows_(rows), class_weight_(class_weight), widths_(classifier_widths), slope_(slope) {
    const Arguments& any = of_.any();
    check_ids(any);
    expect("labels", labels, {any.seg.graphs}, {ScalarType::Long});
    labels_ = labels.const_data_ptr<int64_t>();
    const int64_t classes = widths_.back();
    if (class_weight) expect("class_weight", *class_weight, {classes}, {rows.scalar_type()});
    for (int64_t i = 0; i < any.graphs; ++i)
      require(label_of(i) >= 0 && label_of(i) < classes, "labels must be in [0, ", classes, "), got labels[", chosen(i),
              "] = ", label_of(i));
  }

  // Graphs [begin, end) of `ids` are the batch from now on.
  void take(const int64_t* ids, int64_t begin, int64_t end) {
    for (auto* of : {&of_.hops, &of_.joint})
      if (*of) {
        (*of)->ids = ids + begin;
        (*of)->graphs = end - begin;
      }
  }

  // Whether batches of so many graphs are mostly so small that choose() pays.
  template <class T>
  bool may_choose(int64_t graphs) const {
    const auto is_small_one = [&](const std::optional<Arguments>& of) {
      return of && of->model.features > 1 && of->seg.graphs > 0 &&
             is_small<T>(of->model, of->seg.entries / of->seg.graphs * std::min(graphs, of->graphs));
    };
    return is_small_one(of_.hops) || is_small_one(of_.joint);
  }

  // Chooses the rows of a batch of few graphs, for which the next step does not need the parameters.
  template <class T>
  void choose() const {
    if (of_.joint) memory_.joint.take_all<T>(*of_.joint);
    if (of_.hops && of_.hops->model.features > 1) memory_.hops.take_all<T>(*of_.hops);
  }

  // Returns the loss of the batch, and writes its gradient.
  template <class T>
  T operator()(const T* parameters, T* gradient) const {
    const Arguments& any = of_.any();
    memory_.arena.clear();
    Classifier<T> classifier(memory_.arena, of_.readout_width(), widths_, slope_, parameters, of_.parameters());
    const T* weights = class_weight_ ? class_weight_->template const_data_ptr<T>() : nullptr;
    double total = weights ? 0 : static_cast<double>(any.graphs);
    for (int64_t i = 0; weights && i < any.graphs; ++i) total += weights[label_of(i)];
    total = std::max(total, std::numeric_limits<double>::min());  // graphs that all weigh 0 have loss 0
    const auto weight_of = [&](int64_t label) { return (weights ? weights[label] : 1.0) / total; };
    double loss = 0;
    const auto train = [&](auto& pass) {
      while (pass.next()) {
        const int64_t graphs = pass.end() - pass.begin();
        const auto [readout, grad] = classifier.reserve(graphs);
        pass.forward(readout, classifier.stride());
        const auto label_in_chunk = [&](int64_t i) { return label_of(pass.begin() + i); };
        loss += classifier.step(graphs, pass.threads(), label_in_chunk, weight_of);
        pass.backward(grad);
      }
      pass.write_gradient(gradient);
    };
    const T* x = rows_.const_data_ptr<T>();
    if (of_.hops && of_.joint)
      with_pass(memory_, *of_.hops, x, parameters, true, nullptr, [&](auto& hops) {
        const Model& model = of_.hops->model;
        BranchPass<T> joint(memory_, *of_.joint, x, parameters + model.parameters(), true, nullptr);
        BothPasses<T, std::remove_reference_t<decltype(hops)>> both(hops, joint, model);
        train(both);
      });
    else
      with_pass(memory_, any, x, parameters, true, nullptr, train);
    classifier.write_gradient(gradient);
    return static_cast<T>(loss);
  }

 private:
  int64_t chosen(int64_t i) const { return of_.any().ids ? of_.any().ids[i] : i; }
  int64_t label_of(int64_t i) const { return labels_[chosen(i)]; }

  StepArguments of_;
  const Tensor& rows_;
  const OptionalTensor& class_weight_;
  const std::vector<int64_t>& widths_;
  const double slope_;
  const int64_t* labels_;
  Workspace& memory_ = workspace();
};

std::tuple<Tensor, Tensor> training_step(const Tensor& rows, OptionalTensor crow_indices, OptionalTensor col_indices,
                                         int64_t num_features, const Tensor& parameters, const Tensor& labels,
                                         OptionalTensor class_weight, OptionalTensor ptr, OptionalTensor index,
                                         OptionalTensor count, OptionalTensor parts, OptionalTensor joint_ptr,
                                         OptionalTensor joint_index, OptionalTensor joint_count, OptionalTensor ids,
                                         int64_t num_branches, std::vector<int64_t> widths,
                                         std::vector<int64_t> classifier_widths, bool attention, double negative_slope,
                                         bool /*tf32*/, bool check_invariants) {
  const Step step(step_arguments(rows, crow_indices, col_indices, num_features, parameters, ptr, index, count, parts,
                                 joint_ptr, joint_index, joint_count, ids, num_branches, widths, classifier_widths,
                                 attention, negative_slope, check_invariants),
                  rows, labels, class_weight, classifier_widths, negative_slope);
  const ScalarType value = rows.scalar_type();
  Tensor loss = empty({}, value), gradient = empty({parameters.numel()}, value);
  dispatch_compute(value, [&]<class T>(Tag<T>) {
    *loss.mutable_data_ptr<T>() = step(parameters.const_data_ptr<T>(), gradient.mutable_data_ptr<T>());
  });
  return {loss, gradient};
}

constexpr int64_t least_shared_update = 1 << 16;

// torch's own update of a single parameter, for the bits of its optimiser.
void adam(const Tensor& parameters, const Tensor& gradient, const Tensor& exp_avg, const Tensor& exp_avg_sq,
          const Tensor& num_steps, double learning_rate, double beta1, double beta2, double weight_decay, double eps) {
  using torch::stable::detail::from;
  const auto list = [](auto&... tensors) { return from(std::vector<Tensor>{tensors...}); };
  std::array<StableIValue, 15> stack{list(parameters), list(gradient),     list(exp_avg),       list(exp_avg_sq),
                                     list(),           list(num_steps),    from(learning_rate), from(beta1),
                                     from(beta2),      from(weight_decay), from(eps),           from(false),
                                     from(false),      from(std::nullopt), from(std::nullopt)};
  const AOTITorchError error = torch_call_dispatcher("aten::_fused_adam_", "", stack.data(), TORCH_ABI_VERSION);
  if (error != AOTI_TORCH_SUCCESS) throw std::runtime_error("torch has no fused Adam for these parameters");
}

Tensor training_steps(const Tensor& rows, OptionalTensor crow_indices, OptionalTensor col_indices, int64_t num_features,
                      Tensor parameters, const Tensor& labels, OptionalTensor class_weight, OptionalTensor ptr,
                      OptionalTensor index, OptionalTensor count, OptionalTensor parts, OptionalTensor joint_ptr,
                      OptionalTensor joint_index, OptionalTensor joint_count, const Tensor& ids, int64_t num_branches,
                      std::vector<int64_t> widths, std::vector<int64_t> classifier_widths, bool attention,
                      double negative_slope, bool /*tf32*/, bool check_invariants, int64_t batch_size, Tensor gradient,
                      Tensor exp_avg, Tensor exp_avg_sq, Tensor num_steps, double learning_rate, double beta1,
                      double beta2, double weight_decay, double eps) {
  const ScalarType value = rows.scalar_type();
  Step step(step_arguments(rows, crow_indices, col_indices, num_features, parameters, ptr, index, count, parts,
                           joint_ptr, joint_index, joint_count, given("ids", ids), num_branches, widths,
                           classifier_widths, attention, negative_slope, check_invariants),
            rows, labels, class_weight, classifier_widths, negative_slope);
  require(batch_size >= 1, "batch_size must be at least 1, got ", batch_size);
  const int64_t size = parameters.numel(), graphs = ids.numel();
  expect("gradient", gradient, {size}, {value});
  expect("exp_avg", exp_avg, {size}, {value});
  expect("exp_avg_sq", exp_avg_sq, {size}, {value});
  expect("num_steps", num_steps, {}, {ScalarType::Float});
  Tensor losses = empty({graphs / batch_size + (graphs % batch_size != 0 || graphs == 0)}, value);
  dispatch_compute(value, [&]<class T>(Tag<T>) {
    const auto take_batch = [&](int64_t begin) {
      step.take(ids.const_data_ptr<int64_t>(), begin, begin + std::min(batch_size, graphs - begin));
    };
    const bool chooses_ahead = step.may_choose<T>(batch_size);
    take_batch(0);
    int64_t i = 0;
    const auto make_step = [&] {
      losses.mutable_data_ptr<T>()[i] = step(parameters.const_data_ptr<T>(), gradient.mutable_data_ptr<T>());
      *num_steps.mutable_data_ptr<float>() += 1;
      const bool more = i + 1 < losses.numel();
      if (more) take_batch((i + 1) * batch_size);
      // Of few parameters half would be in the caches of another core after an update by two threads: the other one
      // chooses the rows of the next batch.
      const auto update = [&](int64_t first, int64_t last) {
        if (first == 0)
          adam(parameters, gradient, exp_avg, exp_avg_sq, num_steps, learning_rate, beta1, beta2, weight_decay, eps);
        if (chooses_ahead && more && last == 2) step.choose<T>();
      };
      size < least_shared_update ? parallel_ranges(2, update) : update(0, 1);
      ++i;
    };
    const int64_t threads = torch::stable::get_num_threads();
    thread_local Pace of_thread;
    Pace& pace = of_thread;
    if (threads > 1)
      pace.begin(size, batch_size, threads);
    else
      while (i < losses.numel()) make_step();
    while (i < losses.numel()) {
      const bool alone = pace.is_alone();
      const auto make_steps = [&](int64_t first, int64_t) {
        const Serial serial(alone);
        for (int64_t left = first ? 0 : pace.steps(); left > 0 && i < losses.numel(); --left) {
          const auto begin = std::chrono::steady_clock::now();
          make_step();
          pace.add(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
        }
      };
      alone ? parallel_ranges(2, make_steps) : make_steps(0, 1);  // inside this no thread is asked for
    }
  });
  return losses;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(spin_fast, CPU, m) {
  m.impl("training_step", TORCH_BOX(&training_step));
  m.impl("training_steps", TORCH_BOX(&training_steps));
}

}  // namespace spin_fast
