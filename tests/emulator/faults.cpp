// Kernels with the faults that the emulator must detect, for tests/cuda/test_emulator.py.

#include "cuda_runtime.h"

namespace spin_fast {
extern unsigned char dynamic_shared[];
}

namespace {

constexpr int threads = 64;

unsigned char* shared_of_block() { return spin_fast::dynamic_shared; }

// Every thread reads what its neighbour writes, with no barrier between them.
void race(int* out) {
  int* memory = reinterpret_cast<int*>(shared_of_block());
  const int i = threadIdx.x;
  memory[i] = i;
  out[i] = memory[(i + 1) % threads];
}

void no_race(int* out) {
  int* memory = reinterpret_cast<int*>(shared_of_block());
  const int i = threadIdx.x;
  memory[i] = i;
  __syncthreads();
  out[i] = memory[(i + 1) % threads];
}

void shuffle_of_half_a_warp(int* out) {
  if (threadIdx.x % 2 == 0) out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1, 2);
}

void shuffle_from_outside_the_mask(int* out) {
  if (threadIdx.x % 32 < 16) out[threadIdx.x] = __shfl_xor_sync(0x0000ffffu, 1, 16);
}

void barrier_in_a_branch(int* out) {
  out[threadIdx.x] = 0;
  if (threadIdx.x < 32)
    __syncwarp();
  else if (threadIdx.x == 32)
    __syncwarp(0xffffffffu);
}

void too_much_shared_memory(int* out) { out[threadIdx.x] = reinterpret_cast<int*>(shared_of_block())[threadIdx.x] = 1; }

void load_between_two_vectors(int* out) {
  int* memory = reinterpret_cast<int*>(shared_of_block());
  memory[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = reinterpret_cast<int2*>(memory + threadIdx.x % 2)->x;
}

}  // namespace

// Runs one of them with so many bytes of shared memory; `message` gets what the emulator says, or nothing.
extern "C" __attribute__((visibility("default"))) void emulator_run_fault(int which, int bytes, int* out,
                                                                          char* message) {
  void (*const kernels[])(int*) = {race,
                                   no_race,
                                   shuffle_of_half_a_warp,
                                   shuffle_from_outside_the_mask,
                                   barrier_in_a_branch,
                                   too_much_shared_memory,
                                   load_between_two_vectors};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = bytes;
  message[0] = 0;
  try {
    if (cudaLaunchKernelEx(&config, kernels[which], out) != cudaSuccess) std::strcpy(message, "refused");
  } catch (const std::exception& error) {
    std::strncpy(message, error.what(), 255);
  }
}
