// The parameters of a model as the kernels read them, and the memory of a call.
#pragma once

#include <iterator>
#include <utility>

#include "../model.h"
#include "ops.h"

namespace spin_fast {

// Memory of one call, or of an object, kept by the thread for its next one.
class Arena {
 public:
  template <class T>
  T* take(int64_t n) {
    const int64_t bytes = padded_to(cache_line, n * static_cast<int64_t>(sizeof(T))) + cache_line;
    if (allocations_.empty() || used_ + bytes > allocations_.back().second) {
      const int64_t size = std::max<int64_t>(bytes, allocations_.empty() ? 1 << 16 : 2 * allocations_.back().second);
      std::unique_ptr<char, Free> memory(
          static_cast<char*>(std::aligned_alloc(cache_line, padded_to(cache_line, size))));
      if (!memory) throw std::bad_alloc();
      allocations_.emplace_back(std::move(memory), size);
      used_ = 0;
    }
    char* at = allocations_.back().first.get() + used_;
    used_ += bytes;
    return reinterpret_cast<T*>(poisoned(at, bytes));
  }
  // Forgets what was taken and keeps the largest allocation for the next call.
  void clear() {
    if (allocations_.size() > 1) allocations_.erase(allocations_.begin(), allocations_.end() - 1);
    used_ = 0;
  }

 private:
  std::vector<std::pair<std::unique_ptr<char, Free>, int64_t>> allocations_;
  int64_t used_ = 0;
};

// Rows one after the other, into rows of `stride`, padded with zeros.
template <class T>
void copy_rows(const T* from, int64_t rows, int64_t columns, T* to, int64_t stride) {
  if (columns == stride) {
    std::copy_n(from, rows * columns, to);
    return;
  }
  for (int64_t i = 0; i < rows; ++i)
    std::fill_n(std::copy_n(from + i * columns, columns, to + i * stride), stride - columns, T{0});
}

// Rows of `from_stride` as columns, in rows of `stride` that are padded with zeros.
template <class From, class T>
void copy_transposed(const From* from, int64_t rows, int64_t columns, int64_t from_stride, T* to, int64_t stride) {
  constexpr int64_t size = 4;  // of blocks that fit into registers
  typedef From FourFrom __attribute__((vector_size(size * sizeof(From))));
  typedef T Four __attribute__((vector_size(size * sizeof(T))));
  typedef FourFrom Unaligned __attribute__((aligned(alignof(From)), may_alias));
  typedef Four UnalignedTo __attribute__((aligned(alignof(T)), may_alias));
  int64_t i = 0;
  for (; i + size <= rows; i += size) {
    int64_t j = 0;
    for (; j + size <= columns; j += size) {
      Four row[size], half[size];
      for (int64_t r = 0; r < size; ++r)
        row[r] = __builtin_convertvector(*reinterpret_cast<const Unaligned*>(from + (i + r) * from_stride + j), Four);
      for (int64_t r = 0; r < size; r += 2) {
        half[r] = __builtin_shufflevector(row[r], row[r + 1], 0, 4, 1, 5);
        half[r + 1] = __builtin_shufflevector(row[r], row[r + 1], 2, 6, 3, 7);
      }
      T* const at = to + j * stride + i;
      for (int64_t c = 0; c < 2; ++c) {
        *reinterpret_cast<UnalignedTo*>(at + 2 * c * stride) =
            __builtin_shufflevector(half[c], half[c + 2], 0, 1, 4, 5);
        *reinterpret_cast<UnalignedTo*>(at + (2 * c + 1) * stride) =
            __builtin_shufflevector(half[c], half[c + 2], 2, 3, 6, 7);
      }
    }
    for (; j < columns; ++j)
      for (int64_t r = 0; r < size; ++r) to[j * stride + i + r] = static_cast<T>(from[(i + r) * from_stride + j]);
  }
  for (int64_t j = 0; j < columns; ++j) {
    for (int64_t r = i; r < rows; ++r) to[j * stride + r] = static_cast<T>(from[r * from_stride + j]);
    std::fill_n(to + j * stride + rows, stride - rows, T{0});
  }
}

// An MLP packed for the kernels, the places of its parameters in the flat parameters, and the layout of their
// gradients.
template <class T>
struct Packed {
  struct Place {
    int64_t weight, bias;  // in the flat vector
    bool by_input;         // whether the weight is [in, out] there, else [out, in]
    int64_t gradient;      // in a buffer of gradients
  };

  std::vector<Layer<T>> layers;
  std::vector<Place> places;
  int64_t gradient_size = 0;
  int64_t widest = 0;

  Mlp<T> mlp() const { return {static_cast<int64_t>(layers.size()), layers.data()}; }

  // `slope` of the LeakyReLU after the layer; `with_transposed` where a gradient goes further down.
  void add(Arena& arena, const T* parameters, Place place, int64_t in, int64_t out, double slope,
           bool with_transposed) {
    Layer<T> layer{in,      out,     padded_to(column_multiple, in), padded_to(column_multiple, out), nullptr,
                   nullptr, nullptr, static_cast<T>(slope)};
    const T* from = parameters + place.weight;
    T* const weight = arena.take<T>(in * layer.stride);
    T* const transposed = with_transposed ? arena.take<T>(out * layer.below) : nullptr;
    T* const bias = arena.take<T>(layer.stride);
    if (place.by_input) {
      copy_rows(from, in, out, weight, layer.stride);
      if (transposed) copy_transposed(from, in, out, out, transposed, layer.below);
    } else {
      copy_transposed(from, out, in, in, weight, layer.stride);
      if (transposed) copy_rows(from, out, in, transposed, layer.below);
    }
    copy_rows(parameters + place.bias, 1, out, bias, layer.stride);
    layer.weight = weight;
    layer.transposed = transposed;
    layer.bias = bias;
    place.gradient = gradient_size;
    gradient_size += (padded_to(row_multiple, in) + 1) * layer.stride;
    widest = std::max(widest, layer.stride);
    layers.push_back(layer);
    places.push_back(place);
  }

  // The layers of a classifier on `in` columns, whose parameters begin at `at` in the flat vector.
  void add_classifier(Arena& arena, const T* parameters, int64_t at, int64_t in, const std::vector<int64_t>& widths,
                      double slope, bool with_transposed) {
    for (size_t l = 0; l < widths.size(); ++l) {
      const int64_t out = widths[l];
      add(arena, parameters, {at, at + in * out, false, 0}, in, out, l + 1 < widths.size() ? slope : 1.0,
          with_transposed);
      at += (in + 1) * out;
      in = out;
    }
  }

  // Writes a buffer of gradients into the flat vector.
  template <class From>
  void unpack(const From* gradient, T* parameters) const {
    for (size_t l = 0; l < layers.size(); ++l) {
      const Layer<T>& layer = layers[l];
      const Place& place = places[l];
      const From* from = gradient + place.gradient;
      T* const weight = parameters + place.weight;
      if (place.by_input)
        for (int64_t i = 0; i < layer.in; ++i) std::copy_n(from + i * layer.stride, layer.out, weight + i * layer.out);
      else
        copy_transposed(from, layer.in, layer.out, layer.stride, weight, layer.in);
      from += padded_to(row_multiple, layer.in) * layer.stride;
      std::copy_n(from, layer.out, parameters + place.bias);
    }
  }
};

// Memory of this thread for a tile of rows of an MLP.
template <class T>
TileScratch<T> tile_scratch(const Packed<T>& mlp) {
  const int64_t features = padded_to(column_multiple, mlp.layers[0].in) + column_multiple;
  const int64_t first = features * mlp.layers[0].stride, wide = mlp_tile_rows * mlp.widest;
  const int64_t sizes[] = {mlp_tile_rows * features, features, first, first, wide, wide, wide, mlp_tile_rows};
  int64_t total = cache_line;
  for (const int64_t size : sizes) total += padded_to(cache_line, size * static_cast<int64_t>(sizeof(T)));
  char* memory = thread_scratch(total);
  T* at[std::size(sizes)];
  for (size_t i = 0; i < std::size(sizes); ++i) {
    at[i] = reinterpret_cast<T*>(memory);
    memory += padded_to(cache_line, sizes[i] * static_cast<int64_t>(sizeof(T)));
  }
  return {at[0], reinterpret_cast<int32_t*>(at[1]), at[2], at[3], at[4], at[5], at[6], at[7]};
}

// The packed MLP of one branch and its w.
template <class T>
struct PackedBranch {
  Packed<T> mlp;
  T* w = nullptr;
  int64_t w_gradient = 0;

  PackedBranch(Arena& arena, const Model& model, int64_t branch, const T* parameters, bool input_gradient) {
    int64_t at = model.attention ? model.readout_width() : 0;
    for (size_t l = 0; l < model.widths.size(); ++l) {
      const int64_t in = model.below(l), out = model.widths[l];
      const int64_t weight = at + branch * in * out, bias = at + model.branches * in * out + branch * out;
      mlp.add(arena, parameters, {weight, bias, true, 0}, in, out, model.slope, l > 0 || input_gradient);
      at += model.branches * (in + 1) * out;
    }
    if (!model.attention) return;
    const int64_t stride = mlp.layers.back().stride;
    w = arena.take<T>(stride);
    for (int64_t j = 0; j < stride; ++j) w[j] = j < model.width() ? parameters[branch * model.width() + j] : 0;
    w_gradient = mlp.gradient_size;
    mlp.gradient_size += stride;
  }

  // Writes a buffer of gradients into the flat vector.
  void unpack(const Model& model, int64_t branch, const double* from, T* gradient) const {
    mlp.unpack(from, gradient);
    for (int64_t j = 0; w && j < model.width(); ++j)
      gradient[branch * model.width() + j] = static_cast<T>(from[w_gradient + j]);
  }
};

}  // namespace spin_fast
