// The branches: rows through their MLP, and the readouts of graphs that share rows.
//
// Layout: as in mlp.inl. Parallel axis: tiles of rows, then graphs or branches; what tiles add to the gradient of the
// weights is kept apart by tasks. Accumulator: sums over the rows of a tile in T, over tiles in float64.

// A tile of rows, [n, stride], and its MLP. Columns that are 0 in every row of the tile are left out of the rows and
// of the first layer's weights: one-hot features and what becomes of them in a few hops have few others.
template <class T>
struct RowTile {
  const T* x;
  int64_t stride;
  const int32_t* column;  // the columns of x that these are
  Layer<T> layers[most_layers];
};

// The parts of the rows from `begin` on: rows(i, p) is where part p of row i begins.
template <class T>
struct RowParts {
  const T* x;
  const int32_t *row_begin, *column_of;  // of sparse rows, as in BranchChunk
  const int64_t* source;
  int64_t parts, width;  // of a part
  int64_t rows_left;     // of the chunk, from `begin` on

  RowParts(const BranchChunk<T>& branch, int64_t begin)
      : x(branch.x),
        row_begin(branch.row_begin),
        column_of(branch.column_of),
        source(branch.source + (begin - branch.known) * branch.parts),
        parts(branch.parts),
        width(branch.mlp.layers[0].in / branch.parts),
        rows_left(branch.rows - begin) {}
  // Dense rows of `x`: those with the numbers `of_rows`, or one after the other.
  RowParts(const T* x, const int64_t* of_rows, int64_t rows, int64_t columns)
      : x(x), row_begin(nullptr), column_of(nullptr), source(of_rows), parts(1), width(columns), rows_left(rows) {}

  const T* operator()(int64_t i, int64_t part) const { return x + (source ? source[i * parts + part] : i) * width; }
  // Calls f(column) for the values of n sparse rows, in one loop for rows that lie one after the other: a loop for each
  // short row ends in a mispredicted branch.
  template <class F>
  void for_each_column(int64_t n, F f) const {
    constexpr int64_t near = 4, far = 8;  // rows whose values, and the place of these, are on their way
    for (int64_t part = 0; part < parts; ++part) {
      const auto row = [&](int64_t i) { return source[(i < rows_left ? i : rows_left - 1) * parts + part]; };
      for (int64_t i = 0, next; i < n; i = next) {
        for (next = i + 1; next < n && row(next) == row(next - 1) + 1;) ++next;
        __builtin_prefetch(row_begin + row(next + far));
        const int32_t then = row_begin[row(next + near)];
        __builtin_prefetch(x + then);
        __builtin_prefetch(column_of + then);
        for (int32_t e = row_begin[row(i)]; e < row_begin[row(next - 1) + 1]; ++e) f(part * width + column_of[e]);
      }
    }
  }
  // Whether n rows lie one after the other, as one part each.
  bool in_order(int64_t n) const {
    int64_t i = 1;
    while (i < n && source[i] == source[0] + i) ++i;
    return parts == 1 && i == n;
  }
};

// Not 0 for each column in which any of n rows is not 0.
template <class T>
void used_bits(const RowParts<T>& rows, int64_t n, Bits<T>* used) {
  constexpr int64_t L = lanes<T>, block = 16;  // the rows of the next one are on their way
  if (rows.row_begin) {
    __builtin_memset(used, 0, rows.parts * rows.width * sizeof(T));
    rows.for_each_column(n, [&](int64_t column) { used[column] = 1; });
    return;
  }
  for (int64_t begin = 0; begin < n; begin += block) {
    const int64_t end = begin + block < n ? begin + block : n;
    for (int64_t part = 0; part < rows.parts; ++part)
      by_panels<T>(rows.width, [&](auto vectors, int64_t j) {
        constexpr int V = vectors();
        T* const to = reinterpret_cast<T*>(used + part * rows.width + j);
        const int64_t left = rows.width - j - (V - 1) * L;  // in the last vector
        Vector<Bits<T>> bits[V] = {};
        const auto add = [&](const T* from) {
          for (int v = 0; v < V; ++v)
            bits[v] |=
                reinterpret_cast<Vector<Bits<T>>>(v < V - 1 ? load(from + v * L) : load_first(from + v * L, left));
        };
        if (begin) add(to);
        for (int64_t i = begin; i < end; ++i) {
          const T* next = rows(i + block < rows.rows_left ? i + block : i, part);
          for (int at = 0; at < V * L; at += 64 / sizeof(T)) __builtin_prefetch(next + j + at);
          if (left <= L) __builtin_prefetch(next + rows.width - 1);
          add(rows(i, part) + j);
        }
        for (int v = 0; v < V; ++v) store_first(to + v * L, reinterpret_cast<Vector<T>>(bits[v]), v < V - 1 ? L : left);
      });
  }
}

// Copies these columns of n rows, and fills the rows up to `stride` with zeros. Overwrites `place`, [columns of a row],
// which may be what says the columns that are used.
template <class T>
void copy_columns(const RowParts<T>& rows, int64_t n, const int32_t* column, int64_t columns, int64_t stride,
                  Bits<T>* place, T* to) {
  if (rows.row_begin) {
    for (int64_t k = 0; k < columns; ++k) place[column[k]] = static_cast<Bits<T>>(k);
    __builtin_memset(to, 0, n * stride * sizeof(T));
    const int64_t* row = rows.source;
    for (int64_t i = 0; i < n; ++i)
      for (int64_t part = 0; part < rows.parts; ++part, ++row)
        for (int32_t e = rows.row_begin[*row]; e < rows.row_begin[*row + 1]; ++e)
          to[i * stride + place[part * rows.width + rows.column_of[e]]] = rows.x[e];
    return;
  }
  int64_t end = 0;
  for (int64_t part = 0; part < rows.parts; ++part)
    for (int64_t j = 0; j < rows.width; j += lanes<T>) {
      const int64_t begin = end, first = part * rows.width + j, left = rows.width - j;
      unsigned mask = 0;
      for (; end < columns && column[end] - first < (left < lanes<T> ? left : lanes<T>); ++end)
        mask |= 1u << (column[end] - first);
      for (int64_t i = 0; mask && i < n; ++i)
        copy_masked(rows(i, part) + j, mask, end - begin, to + i * stride + begin);
    }
  for (int64_t i = 0; i < n; ++i)
    for (int64_t k = columns; k < stride; ++k) to[i * stride + k] = 0;
}

// Lists the columns, of `width`, that are used; returns how many.
template <class T>
int32_t list_columns(const Bits<T>* used, int64_t width, int32_t* columns) {
  int32_t number = 0;
  for (int64_t k = 0; k < width; ++k) {
    const bool is_used = used[k] != 0;
    columns[number] = static_cast<int32_t>(k);
    number += is_used;
  }
  return number;
}

template <class T>
int64_t nonzero_columns(const T* x, const int64_t* of_rows, int64_t rows, int64_t width, T* used, int32_t* columns) {
  auto* bits = reinterpret_cast<Bits<T>*>(used);
  used_bits(RowParts<T>(x, of_rows, rows, width), rows, bits);
  return list_columns<T>(bits, width, columns);
}

template <class T>
void narrow_rows(const T* x, const int64_t* of_rows, int64_t rows, int64_t width, const int32_t* columns,
                 int64_t number, T* values) {
  for (int64_t i = 0; i < rows; i += mlp_tile_rows) {
    const int64_t n = rows - i < mlp_tile_rows ? rows - i : mlp_tile_rows;
    const RowParts<T> from(of_rows ? x : x + i * width, of_rows ? of_rows + i : nullptr, n, width);
    copy_columns<T>(from, n, columns, number, number, nullptr, values + i * number);
  }
}

// `kept`: the forward pass has kept its inputs.
template <class T>
RowTile<T> make_row_tile(const BranchChunk<T>& branch, const TileScratch<T>& scratch, int64_t begin, int64_t n,
                         bool kept) {
  RowTile<T> tile;
  for (int64_t l = 0; l < branch.mlp.depth; ++l) tile.layers[l] = branch.mlp.layers[l];
  Layer<T>& first = tile.layers[0];
  const int64_t width = first.in, stride = padded_to(row_multiple, width);
  T* x = branch.inputs ? branch.inputs + begin * stride : scratch.inputs;
  int32_t* columns = branch.inputs ? branch.columns + begin / mlp_tile_rows * (width + 1) : scratch.columns;
  const RowParts<T> rows(branch, begin);
  auto* used = reinterpret_cast<Bits<T>*>(scratch.weight);
  if (!kept) {
    if (branch.all_columns || width <= row_multiple) {  // of a few columns it does not pay to leave some out
      columns[0] = static_cast<int32_t>(width);
      for (int64_t k = 0; k < width; ++k) columns[1 + k] = static_cast<int32_t>(k);
    } else {
      used_bits(rows, n, used);
      columns[0] = list_columns<T>(used, width, columns + 1);
    }
  }
  first.in = columns[0];
  // The backward pass reads its own copy; a product reads rows up to a multiple, which may lie beyond the end of x.
  const bool in_place =
      !branch.inputs && first.in == width && n % row_multiple == 0 && !rows.row_begin && rows.in_order(n);
  tile.x = in_place ? rows(0, 0) : x;
  tile.stride = in_place ? width : padded_to(row_multiple, first.in);
  tile.column = columns + 1;
  if (!kept && !in_place) copy_columns(rows, n, tile.column, first.in, tile.stride, used, x);
  if (first.in < width) {
    for (int64_t k = 0; k < first.in; ++k)
      __builtin_memcpy(scratch.weight + k * first.stride, first.weight + tile.column[k] * first.stride,
                       first.stride * sizeof(T));
    first.weight = scratch.weight;
  }
  return tile;
}

template <class T>
void branch_forward(const BranchChunk<T>& branch, const TileScratch<T>& scratch, int64_t begin, int64_t n) {
  constexpr int L = lanes<T>;
  const RowTile<T> tile = make_row_tile(branch, scratch, begin, n, false);
  T* activations[most_layers] = {};
  for (int64_t l = 0; l < branch.mlp.depth; ++l) {
    T* kept = branch.activations[l];
    activations[l] = kept ? kept + begin * branch.mlp.layers[l].stride : l % 2 ? scratch.second : scratch.first;
  }
  mlp_forward<T>({branch.mlp.depth, tile.layers}, tile.x, tile.stride, n, activations);
  if (!branch.w) return;
  const int64_t stride = branch.mlp.layers[branch.mlp.depth - 1].stride;
  const T* z = activations[branch.mlp.depth - 1];
  for (int64_t i = 0; i < n; i += L) {
    const auto row = [&](int k) { return z + (i + k) * stride; };
    const Vector<T> logit = products<L, T>(row, [&](int) { return branch.w; }, stride);
    const Vector<T> beta = logit < 0 ? Vector<T>{} : logit;
    store_first(branch.beta + begin + i, beta, n - i);
    constexpr T high = sizeof(T) == 4 ? 80 : 700;
    const Vector<T> mass = beta > high ? Vector<T>{} + static_cast<T>(__builtin_inf()) : exp_of<T>(beta);
    store_first(branch.mass + begin + i, mass, n - i);
  }
}

// sum = (sum +) sum_e weight(e) z[row[e], :] over n entries, in T where there is room for it, else in float64.
template <class T, class W>
inline void add_entries(const T* z, int64_t stride, const int32_t* row, int64_t n, W weight, double* sum, T* direct) {
  constexpr int L = lanes<T>;
  by_panels<T>(stride, [&](auto vectors, int64_t j) {
    constexpr int V = vectors();
    Vector<T> even[V] = {}, odd[V] = {};
    int64_t e = 0;
    for (; e + 2 <= n; e += 2) {
      const T first = weight(e), second = weight(e + 1);
      for (int v = 0; v < V; ++v) {
        even[v] += first * load(z + row[e] * stride + j + v * L);
        odd[v] += second * load(z + row[e + 1] * stride + j + v * L);
      }
    }
    for (int v = 0; v < V; ++v) {
      if (e < n) even[v] += weight(e) * load(z + row[e] * stride + j + v * L);
      even[v] += odd[v];
      if (direct)
        store(direct + j + v * L, even[v]);
      else
        add_scaled<T>(sum + j + v * L, 1.0, even[v]);
    }
  });
}

// The readout of graph g with the weights mass(e), but for their sum, which is returned: infinite or NaN where that or
// a sum that the readout is made of is not finite.
template <class T, class W>
double readout_of_graph(const BranchChunk<T>& branch, int64_t g, W mass, double* sum) {
  constexpr int L = lanes<T>;
  const Layer<T>& last = branch.mlp.layers[branch.mlp.depth - 1];
  const T* z = branch.activations[branch.mlp.depth - 1];
  const int64_t n = branch.ptr[g + 1] - branch.ptr[g];
  const int32_t* row = branch.row + branch.ptr[g];
  const int32_t* count = branch.count ? branch.count + branch.ptr[g] : nullptr;
  T* readout = branch.readout + g * branch.readout_stride;
  T* direct = n <= tile_entries ? reinterpret_cast<T*>(sum) : nullptr;
  if (!direct)
    for (int64_t j = 0; j < last.stride; ++j) sum[j] = 0;
  double total = 0;
  for (int64_t e = 0; e == 0 || e < n; e += tile_entries) {
    const int64_t k = n - e < tile_entries ? n - e : tile_entries;
    T weight[tile_entries], part = 0;
    for (int64_t i = 0; i < k; ++i) {
      weight[i] = count ? mass(row[e + i]) * static_cast<T>(count[e + i]) : mass(row[e + i]);
      part += weight[i];
    }
    total += static_cast<double>(part);
    add_entries(z, last.stride, row + e, k, [&](int64_t i) { return weight[i]; }, sum, direct);
  }
  const double scale = branch.w && n ? 1 / total : 1;
  Vector<T> zero = {};  // unless a number is not finite
  if (direct)
    for (int64_t j = 0; j < last.out; j += L) {
      const Vector<T> value = load_first(direct + j, last.out - j);
      zero += value - value;
      store_first(readout + j, value * static_cast<T>(scale), last.out - j);
    }
  else
    for (int64_t j = 0; j < last.out; ++j) {
      zero[0] += static_cast<T>(sum[j] - sum[j]);
      readout[j] = static_cast<T>(sum[j] * scale);
    }
  return total + static_cast<double>(sum_of<T>(zero));
}

template <class T>
void branch_readout(const BranchChunk<T>& branch, double* sum, int64_t begin, int64_t end) {
  constexpr double most = sizeof(T) == 4 ? 1e30 : 1e300;
  for (int64_t g = begin; g < end; ++g) {
    if (!branch.w) {
      readout_of_graph(branch, g, [](int64_t) { return static_cast<T>(1); }, sum);
      continue;
    }
    // beta is at least 0, so without subtracting the largest one first nothing is lost unless a sum overflows.
    T top = 0;
    double total = readout_of_graph(branch, g, [&](int64_t u) { return branch.mass[u]; }, sum);
    if (!(total < most)) {
      for (int64_t e = branch.ptr[g]; e < branch.ptr[g + 1]; ++e)
        top = branch.beta[branch.row[e]] > top ? branch.beta[branch.row[e]] : top;
      const auto mass = [&](int64_t u) { return static_cast<T>(__builtin_exp(double{branch.beta[u]} - double{top})); };
      total = readout_of_graph(branch, g, mass, sum);
    }
    branch.top[g] = top;
    branch.scale[g] = static_cast<T>(1 / total);
  }
}

// What the entries [begin, end) of graph g add to the gradient of z, which lacks what comes through beta, and, with ds
// the gradient of the readout s and t = <ds, s>, to that of beta:
//   dz_u = sum_e alpha_e ds,  dbeta_u = sum_e alpha_e (<ds, z_u> - t) = <dz_u, z_u> - shift_u,
//   shift_u = sum_e alpha_e t.
// `each_once`: dz and shift are those of the entries from `begin` on; they are written, not added to.
template <bool each_once, class T>
inline void readout_backward(const BranchChunk<T>& branch, int64_t g, int64_t begin, int64_t end, T* dz, T* shift) {
  constexpr int L = lanes<T>;
  const Layer<T>& last = branch.mlp.layers[branch.mlp.depth - 1];
  const int32_t *row = branch.row, *count = branch.count;
  const T *w = branch.w, *mass = branch.mass, *beta = branch.beta, *ds = branch.grad + g * branch.readout_stride;
  const T t = w ? static_cast<T>(wide_dot(ds, branch.readout + g * branch.readout_stride, last.out)) : 0;
  const T scale = w ? branch.scale[g] : 1, top = w ? branch.top[g] : 0;
  const auto alpha_of = [&](int64_t e) {
    const T times = count ? scale * static_cast<T>(count[e]) : scale;
    if (!w) return times;
    return times * (top > 0 ? static_cast<T>(__builtin_exp(double{beta[row[e]]} - double{top})) : mass[row[e]]);
  };
  by_panels<T>(last.stride, [&](auto vectors, int64_t j) {
    constexpr int V = vectors();
    Vector<T> value[V];
    for (int v = 0; v < V; ++v) {
      const int64_t from = j + v * L;
      value[v] = from < last.out ? load_first(ds + from, last.out - from) : Vector<T>{};
    }
    for (int64_t e = begin; e < end; ++e) {
      const T alpha = alpha_of(e);
      const int64_t at = each_once ? e - begin : row[e];
      T* to = dz + at * last.stride + j;
      for (int v = 0; v < V; ++v) store(to + v * L, each_once ? alpha * value[v] : load(to + v * L) + alpha * value[v]);
      if (j == 0 && w) shift[at] = each_once ? alpha * t : shift[at] + alpha * t;
    }
  });
}

// Graph by graph, since then ds stays in registers, and jumps are as few as graphs.
template <class T>
void branch_readout_backward(const BranchChunk<T>& branch) {
  __builtin_memset(branch.dz, 0, branch.rows * branch.mlp.layers[branch.mlp.depth - 1].stride * sizeof(T));
  if (branch.w) __builtin_memset(branch.shift, 0, branch.rows * sizeof(T));
  for (int64_t g = 0; g < branch.graphs; ++g)
    readout_backward<false>(branch, g, branch.ptr[g], branch.ptr[g + 1], branch.dz, branch.shift);
}

// The same for the n entries of a tile, from `begin` on, of which each has a row of its own.
template <class T>
void tile_readout_backward(const BranchChunk<T>& branch, int64_t begin, int64_t n, T* dz, T* shift) {
  const int64_t stride = branch.mlp.layers[branch.mlp.depth - 1].stride;
  int64_t g = 0;  // the last graph that begins at `begin` or before
  for (int64_t end = branch.graphs; end - g > 1;) {
    const int64_t middle = (g + end) / 2;
    (branch.ptr[middle] <= begin ? g : end) = middle;
  }
  for (int64_t i = 0; i < n; ++g) {
    const int64_t left = branch.ptr[g + 1] - (begin + i), some = left < n - i ? left : n - i;
    readout_backward<true>(branch, g, begin + i, begin + i + some, dz + i * stride, shift + i);
    i += some;
  }
}

template <class T>
void branch_backward(const BranchChunk<T>& branch, const TileScratch<T>& scratch, int64_t begin, int64_t n,
                     T* const* gradient) {
  constexpr int L = lanes<T>;
  const int64_t depth = branch.mlp.depth, stride = branch.mlp.layers[depth - 1].stride;
  const T slope = branch.mlp.layers[depth - 1].slope;
  const RowTile<T> tile = make_row_tile(branch, scratch, begin, n, true);
  const T* activations[most_layers] = {};
  for (int64_t l = 0; l < depth; ++l) activations[l] = branch.activations[l] + begin * branch.mlp.layers[l].stride;
  const T* z = activations[depth - 1];
  T* dz = branch.each_once ? scratch.dz : branch.dz + begin * stride;
  T* shift = branch.each_once ? scratch.shift : branch.shift + begin;
  if (branch.each_once) tile_readout_backward(branch, begin, n, dz, shift);
  for (int64_t begin_row = 0; begin_row < n; begin_row += L) {
    const int64_t end_row = begin_row + L < n ? begin_row + L : n;
    T dbeta[L] = {};
    if (branch.w) {  // 0 where the ReLU is shut
      const auto row_of = [&](const T* rows) { return [=](int k) { return rows + (begin_row + k) * stride; }; };
      const int64_t at = begin + begin_row, some = end_row - begin_row;
      const Vector<T> value = products<L, T>(row_of(dz), row_of(z), stride) - load_first(shift + begin_row, some);
      store(dbeta, load_first(branch.beta + at, some) > 0 ? value : Vector<T>{});
    }
    for (int64_t j = 0; j < stride; j += L) {  // dz_u += dbeta_u w, dw = sum_u dbeta_u z_u
      Vector<T> dw[2] = {};
      const Vector<T> w = branch.w ? load(branch.w + j) : Vector<T>{};
      for (int64_t i = begin_row; i < end_row; ++i) {
        T* to = dz + i * stride + j;
        const T scale = dbeta[i - begin_row];
        const Vector<T> value = load(z + i * stride + j), sum = load(to) + scale * w;
        store(to, value > 0 ? sum : slope * sum);
        dw[i & 1] += scale * value;
      }
      if (branch.w) store(gradient[depth] + j, load(gradient[depth] + j) + (dw[0] + dw[1]));
    }
  }
  const Layer<T>& first = branch.mlp.layers[0];
  const bool all = tile.layers[0].in == first.in;
  T* gradients[most_layers];
  for (int64_t l = 0; l < depth; ++l) gradients[l] = gradient[l];
  const int64_t compact = padded_to(row_multiple, tile.layers[0].in) + 1;
  if (!all) {
    gradients[0] = scratch.gradient;
    __builtin_memset(scratch.gradient, 0, compact * first.stride * sizeof(T));
  }
  mlp_backward<T>({depth, tile.layers}, tile.x, tile.stride, n, activations, dz, scratch.first, scratch.second,
                  gradients, branch.dx ? branch.dx + begin * first.below : nullptr);
  if (!all) {
    const auto add = [&](int64_t from, int64_t to) {
      const T* of = scratch.gradient + from * first.stride;
      T* sum = gradient[0] + to * first.stride;
      for (int64_t j = 0; j < first.stride; j += L) store(sum + j, load(sum + j) + load(of + j));
    };
    for (int64_t k = 0; k < tile.layers[0].in; ++k) add(k, tile.column[k]);
    add(compact - 1, padded_to(row_multiple, first.in));
  }
}
