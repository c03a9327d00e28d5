// Minimal kernels whose accesses to shared memory are ordered by mbarriers, or are not: what does
// compute-sanitizer's racecheck say of each? `sanitized_order.py` compiles and runs them.
//
// One CTA: warp 0 writes a row of numbers, warps 1 to 4 read it, many times over the same place.

#include <cstdint>
#include <cstdio>
#include <cstdlib>

constexpr int ROW = 128, TURNS = 16, WARPS = 6;

enum Case {
  BULK,              // written by cp.async.bulk; readers' mbarrier gives the place back
  BULK_STAGES,       // the same with two places
  BULK_SYNC,         // given back by bar.sync of the CTA
  BULK_UNORDERED,    // given back before it is read: a race
  STORES,            // written by st.shared; mbarriers both ways
  STORES_THIRD,      // the same, but a third warp hands the readers' word on
  STORES_UNORDERED,  // given back before it is read: a race
};

__device__ uint32_t address(const void *place) { return (uint32_t)__cvta_generic_to_shared(place); }

__device__ void init(uint64_t *barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address(barrier)), "r"(count));
}

__device__ void arrive(uint64_t *barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}

__device__ void wait(uint64_t *barrier, int parity) {
  asm volatile(
      "{\n .reg .pred done;\n AGAIN:\n"
      " mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n @!done bra AGAIN;\n}" ::"r"(
          address(barrier)),
      "r"(parity)
      : "memory");
}

__device__ void load_row(float *row, const float *from, uint64_t *full) {
  constexpr int bytes = ROW * sizeof(float);
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address(full)), "r"(bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          address(row)),
      "l"(from), "r"(bytes), "r"(address(full))
      : "memory");
}

template <Case which>
__global__ void kernel(const float *from, float *to) {
  constexpr bool bulk = which <= BULK_UNORDERED;
  constexpr bool ordered = which != BULK_UNORDERED && which != STORES_UNORDERED;
  constexpr int stages = which == BULK_STAGES ? 2 : 1;
  __shared__ alignas(128) float rows[stages][ROW];
  __shared__ uint64_t full[stages], empty[stages], handed;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; i++) {
      init(&full[i], bulk ? 1 : 32);
      init(&empty[i], 4);
    }
    init(&handed, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  float sum = 0.0f;
  for (int turn = 0; turn < TURNS; turn++) {
    int stage = turn % stages, round = turn / stages;
    if (warp == 0) {
      if (which != BULK_SYNC && round > 0)
        wait(which == STORES_THIRD ? &handed : &empty[stage], (round - 1) & 1);
      if (bulk) {
        if (lane == 0) load_row(rows[stage], from + turn * ROW, &full[stage]);
        __syncwarp();
      } else {
        for (int i = lane; i < ROW; i += 32) rows[stage][i] = from[turn * ROW + i];
        arrive(&full[stage]);
      }
    } else if (warp <= 4) {
      wait(&full[stage], round & 1);
      if (!ordered && lane == 0) arrive(&empty[stage]);
      sum += rows[stage][threadIdx.x - 32];
      __syncwarp();
      if (ordered && lane == 0) arrive(&empty[stage]);
    } else if (which == STORES_THIRD) {
      wait(&empty[stage], round & 1);
      if (lane == 0) arrive(&handed);
      __syncwarp();
    }
    if (which == BULK_SYNC) __syncthreads();
  }
  if (warp >= 1 && warp <= 4) to[threadIdx.x - 32] = sum;
}

int main(int count, char **words) {
  int which = count > 1 ? atoi(words[1]) : 0;
  float *from, *to, host[TURNS * ROW], found[ROW];
  for (int i = 0; i < TURNS * ROW; i++) host[i] = (float)(i % 97);
  cudaMalloc(&from, sizeof host);
  cudaMalloc(&to, sizeof found);
  cudaMemcpy(from, host, sizeof host, cudaMemcpyHostToDevice);
  void (*kernels[])(const float *, float *) = {
      kernel<BULK>,   kernel<BULK_STAGES>,  kernel<BULK_SYNC>,       kernel<BULK_UNORDERED>,
      kernel<STORES>, kernel<STORES_THIRD>, kernel<STORES_UNORDERED>};
  kernels[which]<<<1, 32 * WARPS>>>(from, to);
  cudaError_t error = cudaMemcpy(found, to, sizeof found, cudaMemcpyDeviceToHost);
  bool right = error == cudaSuccess;
  for (int i = 0; i < ROW; i++) {
    float sum = 0.0f;
    for (int turn = 0; turn < TURNS; turn++) sum += host[turn * ROW + i];
    right = right && sum == found[i];
  }
  printf("%s %s\n", right ? "right" : "wrong", cudaGetErrorString(error));
  return 0;
}
