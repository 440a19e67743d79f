// The MLPs of the branches and of the classifier, and the matrix products that they are made of.
//
// Layout: rows and activations row-major, their columns padded to whole registers of every instruction set, their
// number to a multiple of 4; a layer's weights [in, out]. Parallel axis: the caller's. Accumulator: T, as in any matrix
// product.
//
// A product is made of tiles of rows x columns that stay in registers: of the inner loop, every weight that is loaded
// serves all rows, and every activation all columns of the tile.

constexpr int register_rows = vector_bytes == 64 ? 12 : 6;  // what the registers hold, with two vectors of columns

// finish(row, column, sum) of a[row, :] w[:, column] + bias[column], for R rows and V vectors of columns.
template <int R, int V, class T, class F>
inline __attribute__((always_inline)) void product_tile(const T* a, int64_t lda, const T* w, int64_t ldw, int64_t depth,
                                                        const T* bias, F finish) {
  constexpr int L = lanes<T>;
  Vector<T> sum[R][V];
  for (int v = 0; v < V; ++v) {
    const Vector<T> start = bias ? load(bias + v * L) : Vector<T>{};
    for (int i = 0; i < R; ++i) sum[i][v] = start;
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vector<T> column[V];
    for (int v = 0; v < V; ++v) column[v] = load(w + k * ldw + v * L);
#pragma GCC unroll 12
    for (int i = 0; i < R; ++i) {
      const T one = a[i * lda + k];
      for (int v = 0; v < V; ++v) sum[i][v] += one * column[v];
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < R; ++i)
    for (int v = 0; v < V; ++v) finish(i, v * L, sum[i][v]);
}

// Calls tile(std::integral_constant<int, R>, first) for n items, a multiple of 4, R at a time.
template <class F>
inline __attribute__((always_inline)) void by_tiles(int64_t n, F tile) {
  int64_t i = 0;
  for (; i + register_rows <= n; i += register_rows) tile(std::integral_constant<int, register_rows>{}, i);
  if constexpr (register_rows == 12) {
    if (n - i == 8) tile(std::integral_constant<int, 8>{}, i);
    if (n - i == 4) tile(std::integral_constant<int, 4>{}, i);
  } else {
    if (n - i == 4) tile(std::integral_constant<int, 4>{}, i);
    if (n - i == 2) tile(std::integral_constant<int, 2>{}, i);
  }
}

// Calls panel(std::integral_constant<int, V>, first column) for the columns, V vectors at a time; only the last one may
// have lanes that are not filled.
template <class T, class F>
inline __attribute__((always_inline)) void by_panels(int64_t columns, F panel) {
  constexpr int L = lanes<T>;
  int64_t j = 0;
  for (; j + L < columns; j += 2 * L) panel(std::integral_constant<int, 2>{}, j);
  if (j < columns) panel(std::integral_constant<int, 1>{}, j);
}

// finish(row, column, sum) of a w + bias for n rows (a multiple of 4) and all columns.
template <class T, class F>
inline void product(const T* a, int64_t lda, const T* w, int64_t ldw, int64_t depth,
                    const std::type_identity_t<T>* bias, int64_t n, F finish) {
  by_panels<T>(ldw, [&](auto vectors, int64_t j) {
    by_tiles(n, [&](auto rows, int64_t i) {
      product_tile<rows(), vectors()>(a + i * lda, lda, w + j, ldw, depth, bias ? bias + j : bias,
                                      [&](int row, int column, Vector<T> sum) { finish(i + row, j + column, sum); });
    });
  });
}

// sum[k, :] += sum_rows a[row, k] g[row, :] for n rows; k up to `depth`, filled up to a multiple of row_multiple.
template <class T>
inline void add_outer(const T* a, int64_t lda, int64_t depth, const T* g, int64_t ldg, int64_t n, T* sum) {
  constexpr int L = lanes<T>;
  by_panels<T>(ldg, [&](auto vectors, int64_t j) {
    by_tiles(padded_to(row_multiple, depth), [&](auto rows, int64_t k) {
      constexpr int R = rows(), V = vectors();
      Vector<T> part[R][V] = {};
      for (int64_t row = 0; row < n; ++row) {
        Vector<T> column[V];
        for (int v = 0; v < V; ++v) column[v] = load(g + row * ldg + j + v * L);
        const T* of = a + row * lda + k;
#pragma GCC unroll 12
        for (int i = 0; i < R; ++i)
          for (int v = 0; v < V; ++v) part[i][v] += of[i] * column[v];
      }
#pragma GCC unroll 12
      for (int i = 0; i < R; ++i)
        for (int v = 0; v < V; ++v) {
          T* to = sum + (k + i) * ldg + j + v * L;
          store(to, load(to) + part[i][v]);
        }
    });
  });
}

// sum += the sum of n rows.
template <class T>
inline void add_up(const T* rows, int64_t stride, int64_t n, T* sum) {
  constexpr int chains = 4;
  for (int64_t j = 0; j < stride; j += lanes<T>) {
    Vector<T> part[chains] = {};
    int64_t i = 0;
    for (; i + chains <= n; i += chains)
      for (int c = 0; c < chains; ++c) part[c] += load(rows + (i + c) * stride + j);
    for (; i < n; ++i) part[0] += load(rows + i * stride + j);
    store(sum + j, load(sum + j) + ((part[0] + part[1]) + (part[2] + part[3])));
  }
}

template <class T>
void add_partials(const T* partial, int64_t number, int64_t size, double* total) {
  constexpr int L = lanes<double>;
  for (int64_t i = 0; i < size; i += L) {
    Vector<double> sum = load(total + i);
    for (int64_t k = 0; k < number; ++k) sum += load<L, double>(partial + k * size + i);
    store(total + i, sum);
  }
}

template <class T>
inline Vector<T> leaky(Vector<T> value, T slope) {
  return value > 0 ? value : slope * value;
}

template <class T>
void mlp_forward(const Mlp<T>& mlp, const T* x, int64_t stride, int64_t n, T* const* activations) {
  for (int64_t l = 0; l < mlp.depth; ++l) {
    const Layer<T>& layer = mlp.layers[l];
    T* out = activations[l];
    product(
        x, stride, layer.weight, layer.stride, layer.in, layer.bias, padded_to(row_multiple, n),
        [&](int64_t i, int64_t j, Vector<T> sum) { store(out + i * layer.stride + j, leaky<T>(sum, layer.slope)); });
    x = out;
    stride = layer.stride;
  }
}

// From dz [n, stride of the layer]: adds to the layer's gradient, and writes that of what goes into the LeakyReLU below
// it, of slope `slope` and with the sign of `gate` (null: none), unless dx is null.
template <class T>
inline void layer_backward(const Layer<T>& layer, const T* below, int64_t stride, int64_t n, const T* dz, T* gradient,
                           const T* gate, T slope, T* dx) {
  add_outer(below, stride, layer.in, dz, layer.stride, n, gradient);
  add_up(dz, layer.stride, n, gradient + padded_to(row_multiple, layer.in) * layer.stride);
  if (!dx) return;
  product(dz, layer.stride, layer.transposed, layer.below, layer.out, nullptr, padded_to(row_multiple, n),
          [&](int64_t i, int64_t j, Vector<T> value) {
            const int64_t at = i * layer.below + j;
            if (gate) value = load(gate + at) > 0 ? value : slope * value;
            store(dx + at, value);
          });
}

template <class T>
void mlp_backward(const Mlp<T>& mlp, const T* x, int64_t stride, int64_t n, const T* const* activations, T* dz,
                  T* first, T* second, T* const* gradient, T* dx) {
  for (int64_t l = mlp.depth - 1; l >= 0; --l) {
    const Layer<T>& layer = mlp.layers[l];
    if (l == 0) return layer_backward<T>(layer, x, stride, n, dz, gradient[0], nullptr, 1, dx);
    const T* below = activations[l - 1];
    layer_backward<T>(layer, below, layer.below, n, dz, gradient[l], below, mlp.layers[l - 1].slope, first);
    dz = first;
    std::swap(first, second);
  }
}
