// What racecheck makes of shared memory that mbarriers order: each kernel is right, or lacks a wait.
//   orders NAME     NAME: bulk, bulk-unordered, chain, chain-unordered
// bulk: a bulk copy fills a place that threads read, in turns. chain: threads read a place and give
// a second one back; another warp waits for that and hands a third on, whose waiters write the first.
#include <cstdint>
#include <cstdio>
#include <cstring>

constexpr int ROUNDS = 8, WORDS = 64;

__device__ uint32_t address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ void init(uint64_t *bar, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address(bar)), "r"(count) : "memory");
}

__device__ void arrive(uint64_t *bar) {
  asm volatile("{.reg .b64 t; mbarrier.arrive.shared.b64 t, [%0];}" ::"r"(address(bar)) : "memory");
}

__device__ void expect(uint64_t *bar, int bytes) {
  asm volatile("{.reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1;}" ::"r"(address(bar)),
               "r"(bytes) : "memory");
}

__device__ void wait(uint64_t *bar, int parity) {
  asm volatile("{.reg .pred p;\n"
               "again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
               "@!p bra again;}" ::"r"(address(bar)), "r"(parity) : "memory");
}

// Warp 0 copies, warp 1 reads: as the numbers of queries go to the consumers.
template <bool ORDERED> __global__ void bulk(const float *from, float *to) {
  __shared__ alignas(128) float place[WORDS];
  __shared__ uint64_t full, empty;
  if (threadIdx.x == 0) { init(&full, 1); init(&empty, 1); }
  __syncthreads();
  float sum = 0;
  for (int round = 0; round < ROUNDS; ++round) {
    if (threadIdx.x == 0) {
      if (round) wait(ORDERED ? &empty : &full, (round - 1) & 1);
      expect(&full, sizeof(place));
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                   ::"r"(address(place)), "l"(from + round * WORDS), "r"((int)sizeof(place)),
                   "r"(address(&full)) : "memory");
    }
    if (threadIdx.x >= 32) {
      wait(&full, round & 1);
      sum += place[threadIdx.x - 32] + place[threadIdx.x];
      __syncwarp();
      if (threadIdx.x == 32) arrive(&empty);
    }
  }
  to[threadIdx.x] = sum;
}

// Warp 1 writes, warp 2 reads; warp 0 stands between the reads and the next writes.
template <bool ORDERED> __global__ void chain(float *to) {
  __shared__ alignas(128) float place[32];
  __shared__ uint64_t given, handed, filled;
  if (threadIdx.x == 0) { init(&given, 1); init(&handed, 1); init(&filled, 1); }
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float sum = 0;
  for (int round = 0; round < ROUNDS; ++round) {
    if (warp == 0 && lane == 0) {
      if (round) wait(ORDERED ? &given : &filled, (round - 1) & 1);
      arrive(&handed);
    }
    if (warp == 1) {
      wait(&handed, round & 1);
      place[lane] = round;
      __syncwarp();
      if (lane == 0) arrive(&filled);
    }
    if (warp == 2) {
      wait(&filled, round & 1);
      sum += place[lane];
      __syncwarp();
      if (lane == 0) arrive(&given);
    }
  }
  to[threadIdx.x] = sum;
}

int main(int argc, char **argv) {
  float *from, *to;
  cudaMalloc(&from, ROUNDS * WORDS * sizeof(float));
  cudaMalloc(&to, 128 * sizeof(float));
  cudaMemset(from, 0, ROUNDS * WORDS * sizeof(float));
  const char *name = argc > 1 ? argv[1] : "";
  if (!strcmp(name, "bulk")) bulk<true><<<1, 64>>>(from, to);
  else if (!strcmp(name, "bulk-unordered")) bulk<false><<<1, 64>>>(from, to);
  else if (!strcmp(name, "chain")) chain<true><<<1, 96>>>(to);
  else if (!strcmp(name, "chain-unordered")) chain<false><<<1, 96>>>(to);
  else { printf("bulk, bulk-unordered, chain or chain-unordered; got '%s'\n", name); return 2; }
  const cudaError_t error = cudaDeviceSynchronize();
  puts(error == cudaSuccess ? "launched" : cudaGetErrorString(error));
  return error != cudaSuccess;
}
