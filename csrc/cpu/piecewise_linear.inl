// The readouts of graphs with one feature, and their gradients.
//
// A branch is then a piecewise affine function of a number x: on each of its intervals z(x) = offset + x slope, and
// likewise the logit. So the MLP is evaluated once per interval, an entry costs no more than finding its interval and
// its weight, and a readout is the product of the moments of a graph's entries on each interval, sum_e alpha_e and
// sum_e alpha_e x_e, with the offsets and slopes of z. These depend on the parameters alone, not on the ends of the
// interval, so that an outlier in one graph is not rounded into the readouts of others.
//
// Layout: entries graph by graph; moments [graphs, columns], offsets before slopes. Parallel axis: branches and
// ranges of graphs. Accumulator: moments in float64, products in T.

// How many of n values, a multiple of column_multiple, are at most x.
template <class T>
inline int64_t number_at_most(const T* values, int64_t n, T x) {
  int64_t number = 0;
  for (int64_t i = 0; i < n; i += lanes<T>) number += lanes_at_most(load(values + i), x);
  return number;
}

template <class T>
void find_kinks(const AffineUnits<T>& units, T* kinks, int64_t* number) {
  constexpr int L = lanes<T>;
  for (int64_t i = 0; i < units.intervals; ++i, kinks += units.width) {
    const T left = units.left[i], right = units.right[i];
    int64_t found = 0;
    for (int64_t j = 0; j < units.width; j += L) {
      const Vector<T> offset = load(units.offset + i * units.stride + j);
      const Vector<T> slope = load(units.slope + i * units.stride + j);
      const Vector<T> at_left = offset + left * slope, at_right = offset + right * slope, kink = -offset / slope;
      const auto rises = (at_left < 0) & (at_right > 0), falls = (at_left > 0) & (at_right < 0);
      const auto inside = (rises | falls) & (kink > left) & (kink < right);
      if (!any<L, Bits<T>>(inside)) continue;
      for (int k = 0; k < L && j + k < units.width; ++k) {
        kinks[found] = kink[k];
        found -= inside[k];
      }
    }
    number[i] = found;
  }
}

template <class T>
void bend(const AffineUnits<T>& units, const T* x, const int64_t* interval, int64_t n, T negative_slope, T* offset,
          T* slope, T* middle) {
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < units.stride; j += lanes<T>) {
      const int64_t from = interval[i] * units.stride + j, to = i * units.stride + j;
      const Vector<T> rise = load(units.slope + from), start = load(units.offset + from), value = start + x[i] * rise;
      store(middle + to, value);
      store(offset + to, value > 0 ? start : negative_slope * start);
      store(slope + to, value > 0 ? rise : negative_slope * rise);
    }
}

// Finds the interval and beta of the entries [begin, end); returns the largest beta.
template <class T>
T locate(const PiecewiseLinearChunk<T>& branch, int64_t begin, int64_t end) {
  for (int64_t e = begin; e < end; ++e) {
    const T x = branch.x[e];
    const int64_t span = (number_at_most(branch.coarse, branch.spans, x) - 1) * column_multiple;
    const int64_t at = span + number_at_most(branch.start + span, column_multiple, x) - 1;
    const T beta = branch.beta[at].offset + x * branch.beta[at].slope;
    branch.interval[e] = static_cast<int32_t>(at);
    branch.weight[e] = beta;
  }
  Vector<T> top = {};
  for (int64_t e = begin; e < end; e += lanes<T>) {
    const Vector<T> beta = load_first(branch.weight + e, end - e);
    top = beta > top ? beta : top;
  }
  return maximum_of<T>(top);
}

// Turns the beta of the entries [begin, end) into weights, count exp(beta - top).
template <class T>
void weigh(const PiecewiseLinearChunk<T>& branch, int64_t begin, int64_t end, T top) {
  constexpr int L = lanes<T>;
  for (int64_t e = begin; e < end; e += L) {
    const Vector<T> beta = load_first(branch.weight + e, end - e);
    const Vector<T> mass = branch.w ? exp_of<T>(beta - top) : Vector<T>{} + 1;
    store_first(branch.weight + e, branch.count ? mass * load_first(branch.count + e, end - e) : mass, end - e);
  }
}

// Adds value(e) and value(e) x of the entries [begin, end) to the sums of their intervals. Even and odd entries have
// sums apart, [2, columns], until they are joined: one would wait for the one before, of its interval.
template <class T, class F>
inline void add_by_interval(const PiecewiseLinearChunk<T>& branch, int64_t begin, int64_t end, double* sum, F value) {
  const auto add = [&](int64_t e, double* to) {
    const double v = value(e);
    to[0] += v;
    to[branch.intervals] += v * static_cast<double>(branch.x[e]);
  };
  double* const odd = sum + branch.columns;
  int64_t e = begin;
  for (; e + 2 <= end; e += 2) {
    add(e, sum + branch.interval[e]);
    add(e + 1, odd + branch.interval[e + 1]);
  }
  if (e < end) add(e, sum + branch.interval[e]);
}

template <class T>
void piecewise_linear_readout(const PiecewiseLinearChunk<T>& branch, double* sum, int64_t begin, int64_t end) {
  constexpr int D = lanes<double>;
  const Layer<T>& last = branch.mlp.layers[branch.mlp.depth - 1];
  const int64_t intervals = branch.intervals, columns = branch.columns;
  // beta is at least 0, so without subtracting the largest one first nothing is lost unless it overflows.
  constexpr T high = sizeof(T) == 4 ? 60 : 600;
  const bool overflows = locate(branch, branch.ptr[begin], branch.ptr[end]) > high;
  if (!overflows) weigh<T>(branch, branch.ptr[begin], branch.ptr[end], 0);
  for (int64_t g = begin; g < end; ++g) {
    const int64_t first = branch.ptr[g], after = branch.ptr[g + 1];
    if (overflows) {
      T top = 0;
      for (int64_t e = first; e < after; ++e) top = branch.weight[e] > top ? branch.weight[e] : top;
      weigh(branch, first, after, top);
    }
    for (int64_t k = 0; k < 2 * columns; ++k) sum[k] = 0;
    add_by_interval(branch, first, after, sum, [&](int64_t e) { return static_cast<double>(branch.weight[e]); });
    for (int64_t k = 0; k < columns; ++k) sum[k] += sum[columns + k];
    Vector<double> total = {};
    for (int64_t k = 0; k < intervals; k += D) total += load_first(sum + k, intervals - k);
    const double scale = !branch.w ? 1 : first < after ? 1 / sum_of<double>(total) : 0;
    branch.scale[g] = static_cast<T>(scale);
    for (int64_t k = 0; k < columns; ++k) branch.moments[g * columns + k] = static_cast<T>(sum[k] * scale);
  }
  product(branch.moments + begin * columns, columns, branch.z, last.stride, 2 * intervals, nullptr,
          padded_to(row_multiple, end - begin), [&](int64_t i, int64_t j, Vector<T> value) {
            if (i < end - begin && j < last.out)
              store_first(branch.readout + (begin + i) * branch.readout_stride + j, value, last.out - j);
          });
}

// With t = <ds, s>, dlogit_e = alpha_e (<ds, z_e> - t), of which the offset gets 1 and the slope x.
template <class T>
void piecewise_linear_readout_backward(const PiecewiseLinearChunk<T>& branch, const T* grad, T* products, double* sum,
                                       double* dlogit, int64_t begin, int64_t end) {
  const Layer<T>& last = branch.mlp.layers[branch.mlp.depth - 1];
  const int64_t intervals = branch.intervals, columns = branch.columns;
  for (int64_t g = begin; g < end; ++g)
    for (int64_t j = 0; j < last.stride; j += lanes<T>)
      store(branch.ds + g * last.stride + j,
            j < last.out ? load_first(grad + g * branch.readout_stride + j, last.out - j) : Vector<T>{});
  if (!branch.w) return;
  product(branch.ds + begin * last.stride, last.stride, branch.transposed, columns, last.out, nullptr,
          padded_to(row_multiple, end - begin),
          [&](int64_t i, int64_t k, Vector<T> value) { store(products + i * columns + k, value); });
  for (int64_t k = 0; k < 2 * columns; ++k) sum[k] = 0;
  for (int64_t g = begin; g < end; ++g) {
    const T *offset = products + (g - begin) * columns, *slope = offset + intervals;
    const T* readout = branch.readout + g * branch.readout_stride;
    const T shift = static_cast<T>(wide_dot(grad + g * branch.readout_stride, readout, last.out));
    add_by_interval(branch, branch.ptr[g], branch.ptr[g + 1], sum, [&](int64_t e) {
      const T product = offset[branch.interval[e]] + branch.x[e] * slope[branch.interval[e]];
      return static_cast<double>(branch.weight[e] * branch.scale[g] * (product - shift));
    });
  }
  for (int64_t k = 0; k < columns; ++k) dlogit[k] = sum[k] + sum[columns + k];
}

template <class T>
void piecewise_linear_backward(const PiecewiseLinearChunk<T>& branch, const double* dlogit, T* dz, T* dw) {
  constexpr int L = lanes<T>;
  const Layer<T>& last = branch.mlp.layers[branch.mlp.depth - 1];
  const int64_t intervals = branch.intervals;
  __builtin_memset(dz, 0, 2 * intervals * last.stride * sizeof(T));
  add_outer(branch.moments, branch.columns, 2 * intervals, branch.ds, last.stride, branch.graphs, dz);
  for (int64_t j = 0; j < last.stride; j += L) {
    const Vector<T> w = branch.w ? load(branch.w + j) : Vector<T>{};
    Vector<T> sum = {};
    for (int64_t k = 0; k < 2 * intervals; ++k) {
      const int64_t at = k * last.stride + j, interval = k < intervals ? k : k - intervals;
      Vector<T> value = load(dz + at);
      const bool open = branch.w && (branch.beta[interval].offset != 0 || branch.beta[interval].slope != 0);
      if (open) {
        const T logit = static_cast<T>(dlogit[k]);
        value += logit * w;
        sum += logit * load(branch.z + at);
      }
      store(dz + at, load(branch.gate + interval * last.stride + j) > 0 ? value : last.slope * value);
    }
    if (branch.w) store(dw + j, load(dw + j) + sum);
  }
}
