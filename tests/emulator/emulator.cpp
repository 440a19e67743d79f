// The fibers of cuda_runtime.h, guarded memory, and the functions that only a torch with CUDA has.

#include <dlfcn.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <csetjmp>
#include <csignal>
#include <memory>
#include <new>
#include <numeric>
#include <random>
#include <vector>

#include "cuda_runtime.h"

namespace spin_fast {
// The most that a block may ask for, and memory behind it that must not change.
constexpr size_t most_shared = 227 << 10, watched = 4096;
alignas(1024) unsigned char dynamic_shared[most_shared + watched];
}  // namespace spin_fast

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

int order = 0;
constexpr unsigned char poison = 0xff;

namespace {

constexpr size_t stack_bytes = 256 << 10;
constexpr unsigned char canary = 0xa5;

enum class State { ready, at_block, at_warp, done };

struct Fiber {
  std::unique_ptr<char[]> stack{new char[stack_bytes]};
  ucontext_t start;
  jmp_buf saved;
  bool started = false;
  State state;
  dim3 index;     // in its block
  unsigned mask;  // of the barrier it waits at
  uint64_t given, taken;
  int from;             // the lane that `taken` comes from
  unsigned a[4], b[2];  // its fragments of the factors of a matrix product
};

std::vector<Fiber> fibers;
size_t running, number;
jmp_buf scheduler;
const std::function<void()>* body;
std::string failure;
bool busy = false;

[[noreturn]] void leave() { _longjmp(scheduler, 1); }

void wait_in(State state) {
  Fiber& self = fibers[running];
  self.state = state;
  if (_setjmp(self.saved) == 0) leave();
}

// Ends the kernel: its fibers are never resumed.
[[noreturn]] void fail(const std::string& what) {
  if (failure.empty())
    failure = what + " (thread " + std::to_string(running) + " of block " + std::to_string(blockIdx.x) + ", " +
              std::to_string(blockIdx.y) + ", " + std::to_string(blockIdx.z) + ")";
  leave();
}

// A fiber is reused for the threads of successive blocks: starting one takes longer than most threads run.
void entry() {
  for (;;) {
    try {
      (*body)();
    } catch (const std::exception& error) {
      fail(error.what());
    }
    wait_in(State::done);
  }
}

size_t first_of_warp() { return running / 32 * 32; }
bool exists(size_t i) { return i < number && fibers[i].state != State::done; }

void resume(size_t i) {
  running = i;
  Fiber& fiber = fibers[i];
  threadIdx = fiber.index;
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.saved, 1);
  fiber.started = true;
  getcontext(&fiber.start);
  fiber.start.uc_stack.ss_sp = fiber.stack.get();
  fiber.start.uc_stack.ss_size = stack_bytes;
  fiber.start.uc_link = nullptr;
  makecontext(&fiber.start, &entry, 0);
  setcontext(&fiber.start);
}

std::vector<size_t> in_order(size_t n, uint64_t salt) {
  std::vector<size_t> items(n);
  std::iota(items.begin(), items.end(), size_t{0});
  if (order == 1) std::reverse(items.begin(), items.end());
  if (order > 1) std::shuffle(items.begin(), items.end(), std::mt19937_64(order * 0x9e3779b97f4a7c15 + salt));
  return items;
}

void run_block(size_t shared_bytes) {
  using spin_fast::dynamic_shared, spin_fast::watched;
  std::memset(dynamic_shared, poison, shared_bytes);
  std::memset(dynamic_shared + shared_bytes, canary, watched);
  number = size_t{blockDim.x} * blockDim.y * blockDim.z;
  if (fibers.size() < number) fibers.resize(number);
  for (size_t i = 0; i < number; ++i) {
    fibers[i].state = State::ready;
    fibers[i].index = dim3(i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y);
  }
  for (uint64_t round = 0;; ++round) {
    bool moved = false;
    for (const size_t i : in_order(number, round))
      if (fibers[i].state == State::ready) {
        moved = true;
        resume(i);
        if (!failure.empty()) return;
      }
    if (moved) continue;
    bool any = false;
    for (size_t i = 0; i < number; ++i) {
      if (fibers[i].state == State::at_warp) {
        running = i;
        failure = "a warp waits for lanes that do not arrive (thread " + std::to_string(i) + ")";
        return;
      }
      any = any || fibers[i].state == State::at_block;
    }
    if (!any) break;
    for (size_t i = 0; i < number; ++i)
      if (fibers[i].state == State::at_block) fibers[i].state = State::ready;
  }
  for (size_t i = 0; i < watched; ++i)
    if (dynamic_shared[shared_bytes + i] != canary) {
      failure = "the kernel writes behind its shared memory";
      return;
    }
}

}  // namespace

// The compiler inserts traps for misaligned addresses.
void misaligned(int signal, siginfo_t*, void*) {
  if (busy) fail("the kernel accesses a misaligned address");
  std::signal(signal, SIG_DFL);
}

bool watch_alignment() {
  struct sigaction action = {};
  action.sa_sigaction = &misaligned;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  return sigaction(SIGILL, &action, nullptr) == 0;
}

int lane() { return static_cast<int>(running % 32); }

void launch(dim3 grid, dim3 size, size_t shared_bytes, const std::function<void()>& kernel) {
  static const bool watched = watch_alignment();
  if (!watched) throw std::runtime_error("emulator: cannot watch alignment");
  if (busy) throw std::runtime_error("emulator: launched from two threads at once");
  busy = true;
  failure.clear();
  body = &kernel;
  gridDim = grid;
  blockDim = size;
  for (const size_t i : in_order(size_t{grid.x} * grid.y * grid.z, 0)) {
    blockIdx = dim3(i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y);
    run_block(shared_bytes);
    if (!failure.empty()) break;
  }
  busy = false;
  if (failure.empty()) return;
  for (Fiber& fiber : fibers) fiber.started = false;
  throw std::runtime_error("emulator: " + failure);
}

void wait_for_block() { wait_in(State::at_block); }

bool any_in_block(bool value) {
  fibers[running].given = value;
  wait_for_block();
  bool any = false;
  for (size_t i = 0; i < number; ++i) any |= exists(i) && fibers[i].given != 0;
  wait_for_block();
  return any;
}

namespace {

template <class F>
void for_lanes(unsigned mask, F f) {
  for (size_t i = 0; i < 32; ++i)
    if ((mask >> i & 1) && exists(first_of_warp() + i)) f(i, fibers[first_of_warp() + i]);
}

// Waits for the lanes in the mask; the last one to arrive calls `complete`.
template <class F>
void meet(unsigned mask, F complete) {
  const size_t first = first_of_warp();
  if (!(mask >> lane() & 1)) fail("a lane waits at a barrier whose mask does not contain it");
  fibers[running].mask = mask;
  fibers[running].state = State::at_warp;
  bool all = true;
  for (size_t next = 1; next < 32 && all; ++next) {
    const size_t i = (lane() + next) % 32;
    if (!(mask >> i & 1) || !exists(first + i)) continue;
    const Fiber& other = fibers[first + i];
    all = other.state == State::at_warp;
    if (all && other.mask != mask) fail("lanes of a warp wait with different masks");
  }
  if (all) {
    complete();
    for_lanes(mask, [](size_t, Fiber& fiber) { fiber.state = State::ready; });
  }
  // The others run first, even if this one is ready.
  if (_setjmp(fibers[running].saved) == 0) leave();
}

}  // namespace

void wait_for_warp(unsigned mask) {
  meet(mask, [] {});
}

uint64_t exchange(unsigned mask, uint64_t value, int from) {
  fibers[running].given = value;
  fibers[running].from = from;
  meet(mask, [mask] {
    for_lanes(mask, [mask](size_t, Fiber& fiber) {
      const size_t other = first_of_warp() + fiber.from;
      if (!(mask >> fiber.from & 1) || !exists(other)) fail("a shuffle reads a lane that does not participate");
      fiber.taken = fibers[other].given;
    });
  });
  return fibers[running].taken;
}

unsigned ballot(unsigned mask, bool value) {
  fibers[running].given = value;
  meet(mask, [mask] {
    uint64_t votes = 0;
    for_lanes(mask, [&](size_t i, Fiber& fiber) { votes |= fiber.given << i; });
    for_lanes(mask, [&](size_t, Fiber& fiber) { fiber.taken = votes; });
  });
  return static_cast<unsigned>(fibers[running].taken);
}

unsigned tf32(float value) {
  const unsigned bits = std::bit_cast<unsigned>(value);
  if ((bits & 0x7f800000u) == 0x7f800000u) return bits;
  return (bits + 0x1000u) & ~0x1fffu;  // halves away from zero
}

void multiply_add(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  Fiber& self = fibers[running];
  std::copy(std::begin(a), std::end(a), self.a);
  std::copy(std::begin(b), std::end(b), self.b);
  wait_for_warp(0xffffffffu);
  const size_t first = first_of_warp();
  for (size_t i = 0; i < 32; ++i)
    if (!exists(first + i)) fail("a matrix product needs the whole warp");
  const auto value = [](unsigned bits) { return std::bit_cast<float>(bits & ~0x1fffu); };  // what the cores read
  const auto a_at = [&](int row, int k) { return value(fibers[first + row % 8 * 4 + k % 4].a[row / 8 + k / 4 * 2]); };
  const auto b_at = [&](int k, int column) { return value(fibers[first + column * 4 + k % 4].b[k / 4]); };
  for (int i = 0; i < 4; ++i) {
    const int row = lane() / 4 + i / 2 * 8, column = lane() % 4 * 2 + i % 2;
    for (int k = 0; k < 8; ++k) d[i] += a_at(row, k) * b_at(k, column);
  }
  wait_for_warp(0xffffffffu);
}

}  // namespace emulator

// Memory between two inaccessible pages, so that an access outside a tensor is an error. It ends at the second page, up
// to its alignment, and is never freed.
namespace guarded {

bool on = false;

constexpr uintptr_t page = 4096, alignment = 16;

void* allocate(size_t bytes) {
  const size_t room = (bytes + page - 1) / page * page;
  char* all =
      static_cast<char*>(mmap(nullptr, room + 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (all == MAP_FAILED) throw std::bad_alloc();
  mprotect(all, page, PROT_NONE);
  mprotect(all + page + room, page, PROT_NONE);
  std::memset(all + page, emulator::poison, room);
  return all + page + (room - bytes) / alignment * alignment;
}

void caught(int signal, siginfo_t* info, void*) {
  if (!emulator::busy) {  // not in a kernel
    std::signal(signal, SIG_DFL);
    return;
  }
  (void)info;
  emulator::fail("the kernel accesses memory outside its tensors");
}

// The handler has a stack of its own, since that of a kernel may be the fault.
void watch() {
  static char stack[64 << 10];
  stack_t on_stack = {};
  on_stack.ss_sp = stack;
  on_stack.ss_size = sizeof(stack);
  sigaltstack(&on_stack, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = &caught;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &action, nullptr);
}

}  // namespace guarded

// The data of the tensor that is on another device than all others.
static const void* elsewhere = nullptr;

extern "C" {

#define EXPORTED __attribute__((visibility("default")))
EXPORTED void emulator_set_order(int order) { emulator::order = order; }
EXPORTED void emulator_set_guarded(bool on) {
  guarded::on = on;
  if (on) guarded::watch();
}
EXPORTED void emulator_set_elsewhere(const void* data) { elsewhere = data; }
EXPORTED void* emulator_allocate(size_t bytes) { return guarded::allocate(bytes); }

struct AtenTensorOpaque;
int32_t aoti_torch_create_tensor_from_blob(void* data, int64_t ndim, const int64_t* sizes, const int64_t* strides,
                                           int64_t offset, int32_t dtype, int32_t device_type, int32_t device_index,
                                           AtenTensorOpaque** tensor);
size_t aoti_torch_dtype_element_size(int32_t dtype);
int32_t aoti_torch_get_data_ptr(AtenTensorOpaque* tensor, void** data);

// Replaces torch's own function, which it calls unless memory is guarded.
int32_t aoti_torch_empty_strided(int64_t ndim, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                 int32_t device_type, int32_t device_index, AtenTensorOpaque** tensor) {
  using Function = decltype(&aoti_torch_empty_strided);
  static const auto original = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "aoti_torch_empty_strided"));
  if (!guarded::on) return original(ndim, sizes, strides, dtype, device_type, device_index, tensor);
  size_t bytes = aoti_torch_dtype_element_size(dtype);
  for (int64_t axis = 0; axis < ndim; ++axis) bytes *= sizes[axis];
  return aoti_torch_create_tensor_from_blob(guarded::allocate(bytes), ndim, sizes, strides, 0, dtype, device_type,
                                            device_index, tensor);
}

// Replaces torch's own function, which returns the same index for all tensors of the CPU.
int32_t aoti_torch_get_device_index(AtenTensorOpaque* tensor, int32_t* index) {
  void* data = nullptr;
  const int32_t error = aoti_torch_get_data_ptr(tensor, &data);
  *index = elsewhere && data == elsewhere ? 0 : -1;
  return error;
}

int32_t aoti_torch_create_cuda_guard(int32_t, void** guard) {
  *guard = nullptr;
  return 0;
}
int32_t aoti_torch_delete_cuda_guard(void*) { return 0; }
int32_t aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}
}
