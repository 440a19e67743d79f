// What a program cannot beat on this machine: loops that do nothing but move the bytes, or fetch the rows.
//
// Sums are returned only so that no load is optimised away. Compiled for one type of indices and one width of rows:
//   -DINDEX=int32_t or int64_t, -DWIDTH=floats in a row
// and without the compiler's own vectors, which are slower here than those that are written out.

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { line_bytes = 64, lines_at_once = 8 };

typedef uint64_t Line __attribute__((vector_size(line_bytes), aligned(1), may_alias));

#define ALWAYS_INLINE static inline __attribute__((always_inline))

// ---- Memory ----

// Whether stores that bypass the caches are among what this machine, and this compiler, can do.
int has_streaming(void) {
#if defined(__x86_64__)
  return 1;
#elif defined(__has_builtin)
  return __has_builtin(__builtin_nontemporal_store);
#else
  return 0;
#endif
}

// `at` is aligned to a line.
ALWAYS_INLINE void stream(Line* at, Line value) {
#if defined(__AVX512F__)
  _mm512_stream_si512((__m512i*)at, (__m512i)value);
#elif defined(__x86_64__)
  __m128i part[4];
  memcpy(part, &value, sizeof part);
  for (int i = 0; i < 4; ++i) _mm_stream_si128((__m128i*)at + i, part[i]);
#elif defined(__has_builtin) && __has_builtin(__builtin_nontemporal_store)
  typedef uint64_t Aligned __attribute__((vector_size(line_bytes)));
  __builtin_nontemporal_store((Aligned)value, (Aligned*)at);
#else
  *at = value;
#endif
}

ALWAYS_INLINE void settle(void) {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Two streams of loads and one of stores, a few lines of each at a time, so that all are under way together.
ALWAYS_INLINE Line sweep_both(const Line* from, size_t reads, Line* to, size_t writes, int streaming, Line seed) {
  const Line value = {0};  // one that no load has to bring first
  const size_t half = reads / 2, steps = (half > writes ? half : writes) / lines_at_once + 1;
  const size_t least_read = half / steps, least_written = writes / steps;
  size_t read = 0, written = 0, rest_read = 0, rest_written = 0;
  Line first = seed, second = {0};
  for (size_t step = 0; step < steps; ++step) {
    size_t until = read + least_read;
    if ((rest_read += half % steps) >= steps) rest_read -= steps, ++until;
    for (; read < until; ++read) {
      first ^= from[read];
      second ^= from[half + read];
    }
    until = written + least_written;
    if ((rest_written += writes % steps) >= steps) rest_written -= steps, ++until;
    for (; written < until; ++written)
      if (streaming)
        stream(to + written, value);
      else
        to[written] = value;
  }
  if (reads % 2) first ^= from[reads - 1];
  return first ^ second;
}

ALWAYS_INLINE uint64_t sweep_by(size_t count, const char* const* from, const size_t* bytes, char* to, size_t to_bytes,
                                int streaming) {
  size_t reads = 0, read = 0, writes = to_bytes / line_bytes, written = 0;
  for (size_t k = 0; k < count; ++k) reads += bytes[k] / line_bytes;
  Line sum = {0};
  for (size_t k = 0; k < count; ++k) {
    read += bytes[k] / line_bytes;
    const size_t until = reads ? (size_t)((double)writes * read / reads) : 0;
    sum = sweep_both((const Line*)from[k], bytes[k] / line_bytes, (Line*)to + written, until - written, streaming, sum);
    written = until;
  }
  if (!reads) sweep_both(NULL, 0, (Line*)to, writes, streaming, sum);
  if (streaming) settle();
  uint64_t all = 0;
  for (int i = 0; i < 8; ++i) all ^= sum[i];
  return all;
}

// Reads each of `from` once and writes `to` once, whole lines of them: the floor of whatever must read and write so
// much.
uint64_t sweep(size_t count, const char* const* from, const size_t* bytes, char* to, size_t to_bytes, int streaming) {
  return streaming ? sweep_by(count, from, bytes, to, to_bytes, 1) : sweep_by(count, from, bytes, to, to_bytes, 0);
}

// STREAM's triad, a = b + 3 c: what others call the bandwidth of a machine.
void triad(int streaming, double* a, const double* b, const double* c, size_t bytes) {
  typedef double Doubles __attribute__((vector_size(line_bytes), aligned(8), may_alias));
  for (size_t i = 0; i < bytes / line_bytes; ++i) {
    const Doubles value = ((const Doubles*)b)[i] + 3.0 * ((const Doubles*)c)[i];
    if (streaming)
      stream((Line*)a + i, (Line)value);
    else
      ((Doubles*)a)[i] = value;
  }
  if (streaming) settle();
}

void copy(char* to, const char* from, size_t bytes) { memcpy(to, from, bytes); }

// What two threads run to hand a cache line to each other, each for so many times: it waits for its turn, and gives it.
void hand_over(int* turn, int mine, size_t times) {
  for (size_t i = 0; i < times; ++i) {
    while (__atomic_load_n(turn, __ATOMIC_ACQUIRE) != mine) {
#if defined(__x86_64__)
      _mm_pause();
#endif
    }
    __atomic_store_n(turn, 1 - mine, __ATOMIC_RELEASE);
  }
}

// ---- Rows by number ----

// As few loads as cover a row; the last one may overlap the one before it.
#if WIDTH >= 16
enum { lanes = 16 };
#elif WIDTH >= 8
enum { lanes = 8 };
#elif WIDTH >= 4
enum { lanes = 4 };
#elif WIDTH >= 2
enum { lanes = 2 };
#else
enum { lanes = 1 };
#endif
#if WIDTH >= 2
typedef float Part __attribute__((vector_size(lanes * sizeof(float)), aligned(sizeof(float)), may_alias));
typedef uint32_t Bits __attribute__((vector_size(lanes * sizeof(float)), aligned(sizeof(float)), may_alias));
#else
typedef float Part;
typedef uint32_t Bits;
#endif

// Enough sums that do not wait for each other. Unlike rows and columns run into one: no result is wanted.
enum { unroll = 8 };

ALWAYS_INLINE void add_rows(Part sum[unroll], const INDEX number[unroll], const float* y) {
  for (int k = 0; k < unroll; ++k) {
    const float* row = y + (size_t)number[k] * WIDTH;
    for (int j = 0; j + lanes <= WIDTH; j += lanes) sum[k] += *(const Part*)(row + j);
    if (WIDTH % lanes) sum[k] += *(const Part*)(row + WIDTH - lanes);
  }
}

ALWAYS_INLINE void prefetch_rows(const INDEX* number, const float* y) {
  for (int k = 0; k < unroll; ++k) {
    const char* row = (const char*)(y + (size_t)number[k] * WIDTH);
    for (size_t byte = 0; byte < WIDTH * sizeof(float); byte += line_bytes) __builtin_prefetch(row + byte);
    __builtin_prefetch(row + WIDTH * sizeof(float) - 1);
  }
}

// Fetches the row of each arc, `hops` times over the arcs bounds[k] .. bounds[k + 1] before the next k: the graphs of a
// batch stay in the cache from hop to hop. Rows are asked for `ahead` arcs before they are read, or not at all (0).
ALWAYS_INLINE float gather_by(const INDEX* indices, const int64_t* bounds, size_t blocks, int hops, const float* y,
                              int64_t ahead) {
  Part sum[unroll] = {0};
  INDEX number[unroll] = {0};
  for (size_t block = 0; block < blocks; ++block)
    for (int hop = 0; hop < hops; ++hop) {
      int64_t e = bounds[block];
      for (; e + unroll <= bounds[block + 1]; e += unroll) {
        if (ahead && e + ahead + unroll <= bounds[block + 1]) prefetch_rows(indices + e + ahead, y);
        memcpy(number, indices + e, sizeof number);
        add_rows(sum, number, y);
      }
      for (int k = 0; e + k < bounds[block + 1]; ++k) number[k] = indices[e + k];
      if (e < bounds[block + 1]) add_rows(sum, number, y);
    }
  for (int k = 1; k < unroll; ++k) sum[0] += sum[k];
  float first;
  memcpy(&first, sum, sizeof first);
  return first;
}

float gather(const INDEX* indices, const int64_t* bounds, size_t blocks, int hops, const float* y, int ahead) {
  return ahead ? gather_by(indices, bounds, blocks, hops, y, ahead) : gather_by(indices, bounds, blocks, hops, y, 0);
}

// ---- Rows that are equal ----

ALWAYS_INLINE void meet(Bits* hash, Bits* differ, const uint32_t* row, const uint32_t* other) {
  *hash = (*hash ^ *(const Bits*)row) * 0x9e3779b1u;
  *differ |= *(const Bits*)row ^ *(const Bits*)other;
}

// What is left to a search for distinct rows that is told every answer: to read each of n rows for its hash, to compare
// it with the one that it equals, to keep it if it is new, and to write its number. `like`: the first row of the same
// graph that equals it, maybe itself; numbers go by first appearance, and `kept` are known. With `slots`, that of each
// row, which `place` tells, holds its number: a search that knows rows by hashes reads it, and compares no rows of one
// word, of which no other has the hash. Returns how many rows then are known, or -1 if an answer is wrong.
int64_t number_rows(const uint32_t* rows, size_t n, const int32_t* like, const int32_t* number, uint32_t* known,
                    int64_t kept, int32_t* number_of_row, uint64_t* slots, const int32_t* place) {
  const size_t ahead = 8, slots_ahead = 32;
  const uint64_t taken = (uint64_t)1 << 63;
  const int compares = WIDTH > 1 || !slots;
  Bits hash = {0}, differ = {0};
  uint64_t other_slot = 0;
  for (size_t v = 0; v < n; ++v) {
    if (slots && v + slots_ahead < n) __builtin_prefetch(slots + place[v + slots_ahead]);
    if (compares && v + ahead < n) {
      const char* next = (const char*)(known + (size_t)number[v + ahead] * WIDTH);
      for (size_t byte = 0; byte < WIDTH * sizeof(float); byte += line_bytes) __builtin_prefetch(next + byte);
    }
    const uint32_t* row = rows + v * WIDTH;
    if (number[v] == kept) {
      if (slots) slots[place[v]] = taken | (uint64_t)kept;
      memcpy(known + (size_t)kept++ * WIDTH, row, WIDTH * sizeof(float));
    }
    if (slots) other_slot |= slots[place[v]] ^ (taken | (uint64_t)number[v]);
    const size_t before = like[v];
    const uint32_t* other = !compares || before < v ? rows + (compares ? before : v) * WIDTH
                                                    : known + (size_t)number[v] * WIDTH;
    for (int j = 0; j + lanes <= WIDTH; j += lanes) meet(&hash, &differ, row + j, other + j);
    if (WIDTH % lanes) meet(&hash, &differ, row + WIDTH - lanes, other + WIDTH - lanes);
    number_of_row[v] = number[v];
  }
  volatile Bits used = hash;
  (void)used;
  uint32_t wrong[lanes];
  memcpy(wrong, &differ, sizeof wrong);
  for (int i = 0; i < lanes; ++i)
    if (wrong[i]) return -1;
  return other_slot ? -1 : kept;
}
