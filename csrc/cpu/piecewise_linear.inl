// The readouts of graphs with one feature, and their gradients.
//
// A branch is then a piecewise affine function of a number x: on each of its intervals z(x) = offset + x slope, and
// likewise the logit. So the MLP is evaluated once per interval, an entry costs no more than finding its interval and
// its weight, and all that is needed of a graph's entries on an interval are their moments, with M the sum of alpha, c
// the mean of x weighted by alpha, and V the sum of alpha (x - c)^2. A readout is the sum of M z(c) over intervals.
// Offset and slope depend on the parameters alone, not on the ends of the interval, so that an outlier in one graph is
// not rounded into the readouts of others.
//
// Of the gradients, dlogit_e = alpha_e <ds, z_e - s>; the gradients of the logit's offset and slope, its sum over an
// interval and that of dlogit_e x_e, are M <ds, z(c) - s> and M c <ds, z(c) - s> + V <ds, slope>.
// What goes into a layer is affine on each interval of the layer below, so the layer's gradient takes the sum of dz
// over the intervals inside of it, and dx is found there, too.
//
// Layout: entries graph by graph; of a graph the moments of the intervals that it has entries on, which are few.
// Parallel axis: branches and, forward, ranges of graphs. Accumulator: of moments float64, else T.

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
T locate(const PiecewiseLinearChunk<T>& branch, int64_t begin, int64_t end, int32_t* interval, T* weight) {
  for (int64_t e = begin; e < end; ++e) {
    const T x = branch.x[e];
    const int64_t span = (number_at_most(branch.coarse, branch.spans, x) - 1) * column_multiple;
    const int64_t at = span + number_at_most(branch.start + span, column_multiple, x) - 1;
    interval[e - begin] = static_cast<int32_t>(at);
    const T beta = branch.beta[at].offset + x * branch.beta[at].slope;
    weight[e - begin] = beta > 0 ? beta : 0;  // rounding may place x beyond a kink
  }
  Vector<T> top = {};
  for (int64_t e = 0; e < end - begin; e += lanes<T>) {
    const Vector<T> beta = load_first(weight + e, end - begin - e);
    top = beta > top ? beta : top;
  }
  return maximum_of<T>(top);
}

// Turns the beta of n entries into weights, count exp(beta - top).
template <class T>
void weigh(const PiecewiseLinearChunk<T>& branch, int64_t begin, int64_t n, T top, T* weight) {
  constexpr int L = lanes<T>;
  for (int64_t e = 0; e < n; e += L) {
    const Vector<T> mass = branch.w ? exp_of<T>(load_first(weight + e, n - e) - top) : Vector<T>{} + 1;
    store_first(weight + e, branch.count ? mass * load_first(branch.count + begin + e, n - e) : mass, n - e);
  }
}

// Writes the moments of a graph with n entries, on the intervals that have some, and returns the number of these. Even
// and odd entries have sums apart, as one would wait for the one before, of its interval. Spread is summed up around
// the means: from the squares of x it would be a difference of nearly equal numbers where x is far from 0. sums are all
// 0, and left so.
template <class T>
int64_t write_moments(const PiecewiseLinearChunk<T>& branch, int64_t begin, int64_t n, const int32_t* interval,
                      const T* weight, double* sums) {
  constexpr int64_t D = lanes<double>, word = 64;
  const int64_t columns = padded_to(column_multiple, branch.intervals);
  const T* const x = branch.x + begin;
  double *const mass = sums, *const first = mass + 2 * columns, *const spread = first + 2 * columns;
  double* const mean = spread + 2 * columns;
  const auto both = [&](double* sum, int64_t k) { return sum[k] + sum[columns + k]; };
  const auto clear = [&](double* sum, int64_t k) { sum[k] = sum[columns + k] = 0; };
  const auto for_each_entry = [&](auto add) {
    int64_t e = 0;
    for (; e + 2 <= n; e += 2) {
      add(e, interval[e]);
      add(e + 1, columns + interval[e + 1]);
    }
    if (e < n) add(e, interval[e]);
  };
  for_each_entry([&](int64_t e, int64_t to) {
    const auto weight_e = static_cast<double>(weight[e]);
    mass[to] += weight_e;
    first[to] += weight_e * static_cast<double>(x[e]);
  });
  Vector<double> total = {};
  for (int64_t k = 0; k < columns; k += D) total += load(mass + k) + load(mass + columns + k);
  const double scale = branch.w ? 1 / sum_of<double>(total) : 1;
  Moments<T>* const moments = branch.moments + begin;
  Moments<T>* next = moments;
  for (int64_t from = 0; from < columns; from += word) {
    uint64_t used = 0;
    for (int64_t k = from; k < from + word && k < columns; k += D)
      used |= uint64_t{nonzero_lanes(load(mass + k) + load(mass + columns + k))} << (k - from);
    for (; used; used &= used - 1, ++next) {
      const int64_t k = from + __builtin_ctzll(used);
      mean[k] = both(first, k) / both(mass, k);
      *next = {static_cast<int32_t>(k), static_cast<T>(both(mass, k) * scale), static_cast<T>(mean[k]), 0};
      clear(mass, k);
      clear(first, k);
    }
  }
  if (branch.with_spread)
    for_each_entry([&](int64_t e, int64_t to) {
      const double distance = static_cast<double>(x[e]) - mean[interval[e]];
      spread[to] += static_cast<double>(weight[e]) * distance * distance;
    });
  for (Moments<T>* m = moments; m < next; ++m) {
    m->spread = static_cast<T>(both(spread, m->interval) * scale);
    clear(spread, m->interval);
    mean[m->interval] = 0;
  }
  return next - moments;
}

template <class T>
void piecewise_linear_readout(const PiecewiseLinearChunk<T>& branch, double* sums, int32_t* interval, T* weight,
                              int64_t begin, int64_t end) {
  const Layer<T>& last = branch.mlp.layers[branch.mlp.depth - 1];
  const int64_t entries = branch.ptr[begin];
  const T* const slopes = branch.z + branch.intervals * last.stride;
  // beta is at least 0, so without subtracting the largest one first nothing is lost unless it overflows.
  constexpr T high = 60;
  const bool overflows = locate(branch, entries, branch.ptr[end], interval, weight) > high;
  if (!overflows) weigh<T>(branch, entries, branch.ptr[end] - entries, 0, weight);
  __builtin_memset(sums, 0, 7 * padded_to(column_multiple, branch.intervals) * sizeof(double));
  for (int64_t g = begin; g < end; ++g) {
    const int64_t first = branch.ptr[g], n = branch.ptr[g + 1] - first;
    T* const weights = weight + first - entries;
    if (overflows) {
      T top = 0;
      for (int64_t e = 0; e < n; ++e) top = weights[e] > top ? weights[e] : top;
      weigh(branch, first, n, top, weights);
    }
    const Moments<T>* const moments = branch.moments + first;
    const int64_t used = write_moments(branch, first, n, interval + first - entries, weights, sums);
    branch.used[g] = static_cast<int32_t>(used);
    for (int64_t j = 0; j < last.out; j += lanes<T>) {
      Vector<T> readout = {};
      for (const Moments<T>* m = moments; m < moments + used; ++m) {
        const int64_t at = m->interval * last.stride + j;
        readout += m->mass * (load(branch.z + at) + m->mean * load(slopes + at));
      }
      store_first(branch.readout + g * branch.readout_stride + j, readout, last.out - j);
    }
  }
}

template <class T>
void piecewise_linear_backward(const PiecewiseLinearChunk<T>& branch, const T* grad, T* dz, T* dlogit, T* dw) {
  constexpr int L = lanes<T>;
  const Layer<T>& last = branch.mlp.layers[branch.mlp.depth - 1];
  const int64_t size = branch.intervals * last.stride;
  __builtin_memset(dz, 0, 2 * size * sizeof(T));
  __builtin_memset(dlogit, 0, 2 * size * sizeof(T));
  for (int64_t g = 0; g < branch.graphs; ++g)
    for (int64_t j = 0; j < last.out; j += L) {
      const int64_t from = g * branch.readout_stride + j;
      const Vector<T> ds = load_first(grad + from, last.out - j), s = load_first(branch.readout + from, last.out - j);
      const Moments<T>* m = branch.moments + branch.ptr[g];
      for (const Moments<T>* const end = m + branch.used[g]; m < end; ++m) {
        const int64_t at = m->interval * last.stride + j;
        const auto add = [&](T* to, Vector<T> value) { store(to + at, load(to + at) + value); };
        const Vector<T> part = m->mass * ds;
        add(dz, part);
        add(dz + size, m->mean * part);
        if (!branch.w) continue;
        const Vector<T> slope = load(branch.z + size + at), z = load(branch.z + at) + m->mean * slope;
        const Vector<T> of_offset = part * (z - s);
        add(dlogit, of_offset);
        add(dlogit + size, m->mean * of_offset + m->spread * (ds * slope));
      }
    }
  for (int64_t k = 0; k < branch.intervals; ++k) {
    const int64_t row = k * last.stride;
    T logit[2] = {};
    const bool open = branch.w && (branch.beta[k].offset != 0 || branch.beta[k].slope != 0);
    for (int i = 0; open && i < 2; ++i) {
      Vector<T> sum = {};
      for (int64_t j = 0; j < last.out; j += L) sum += load(dlogit + i * size + row + j);
      logit[i] = sum_of<T>(sum);
    }
    for (int64_t j = 0; j < last.stride; j += L) {
      const auto passes = load(branch.gate + row + j) > 0;
      const Vector<T> w = branch.w ? load(branch.w + j) : Vector<T>{};
      Vector<T> of_w = {};
      for (int i = 0; i < 2; ++i) {
        T* const to = dz + i * size + row + j;
        const Vector<T> value = load(to) + logit[i] * w;
        store(to, passes ? value : last.slope * value);
        of_w += logit[i] * load(branch.z + i * size + row + j);
      }
      if (branch.w) store(dw + j, load(dw + j) + of_w);
    }
  }
}

// Adds up the rows [intervals, stride] of each interval below, in place: it never has a higher number than its parts.
template <class T>
void add_up_intervals(const BentUnits<T>& units, int64_t stride, T* rows) {
  for (int64_t i = 1; i < units.intervals; ++i) {
    const bool begins = units.below[i] > units.below[i - 1];
    for (int64_t j = 0; j < stride; j += lanes<T>) {
      T* const to = rows + units.below[i] * stride + j;
      const Vector<T> row = load(rows + i * stride + j);
      store(to, begins ? row : load(to) + row);
    }
  }
}

template <class T>
void bent_backward(const Mlp<T>& mlp, const BentUnits<T>* units, bool logit, T* dz, T* spare, int64_t tile,
                   T* const* gradient) {
  const int64_t stride = mlp.layers[mlp.depth - 1].stride;
  T *from = dz, *to = spare;
  int64_t step =
      padded_to(row_multiple, units[mlp.depth + logit].intervals) * stride;  // from the offsets to the slopes
  for (int side = 0; logit && side < 2; ++side) add_up_intervals(units[mlp.depth + 1], stride, from + side * step);
  for (int64_t l = mlp.depth - 1; l >= 0; --l) {
    const Layer<T>& layer = mlp.layers[l];
    const BentUnits<T>& below = units[l];
    for (const int side : {1, 0}) {
      T* const rows = from + side * step;
      add_up_intervals(units[l + 1], layer.stride, rows);
      layer_backward<T>(layer, side ? below.slope : below.offset, below.stride, below.intervals, rows, gradient[l],
                        l ? below.middle : nullptr, l ? mlp.layers[l - 1].slope : 1, l ? to + side * tile : nullptr);
      if (side)  // a slope has no bias
        __builtin_memset(gradient[l] + padded_to(row_multiple, layer.in) * layer.stride, 0, layer.stride * sizeof(T));
    }
    std::swap(from, to);
    step = tile;
  }
}
