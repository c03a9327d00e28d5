// What it costs a pair of CTAs to hand each other 16 KiB of dS per query tile, in two ways.
//
// As in the backward kernel of a pair: 256 threads hold 64 values of 16 bits each; half of them stay
// in this CTA's shared memory, half go to the other's. A relay warp in each CTA waits for what comes,
// a consumer in the first CTA for both relays; then it lets both CTAs write again. The clock counts
// whole rounds, so that a round is the latency of everything between two tiles of dS.
//
//   direct   st.async: each thread stores into the other CTA, whose barrier counts the bytes
//   staged   each thread stores into a buffer of its own CTA, all meet, one thread copies 16 KiB
#include <cstdint>
#include <cstdio>
#include <cuda_runtime.h>

constexpr int THREADS = 256, RELAY = 8, ROUNDS = 2000, HALF_BYTES = 16384;

__device__ uint32_t smem(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
__device__ uint32_t in_cta(uint32_t address, int rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}
__device__ void wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier), "r"(parity) : "memory");
}
__device__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
__device__ void store(uint32_t at, uint32_t value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(value) : "memory");
}

template <bool DIRECT>
__global__ void __cluster_dims__(2, 1, 1) exchange(long long* cycles, int* wrong) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ __align__(8) uint64_t barriers[3];  // peer's part is here, both relays, free again
  const int thread = threadIdx.x, warp = thread / 32;
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const uint32_t own = smem(memory) + rank * HALF_BYTES, staging = smem(memory) + 2 * HALF_BYTES;
  const uint32_t peer = in_cta(own, rank ^ 1);
  const uint32_t full = smem(&barriers[0]), relayed = smem(&barriers[1]), empty = smem(&barriers[2]);
  if (thread == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full));
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 2;" ::"r"(relayed));
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(empty));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  meet_cluster();
  const long long start = clock64();
  int bad = 0;
  for (int round = 0; round < ROUNDS; ++round) {
    const int parity = round & 1;
    if (warp < RELAY) {
      const uint32_t value = round * 2 + rank, peers_full = in_cta(full, rank ^ 1);
      for (int i = 0; i < 4; ++i) {
        const uint32_t offset = (i * THREADS + thread) * 16;
        store(own + offset, value);
        if (DIRECT) {
          asm volatile(
              "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
              "[%0], {%1, %1, %1, %1}, [%2];" ::"r"(peer + offset), "r"(value), "r"(peers_full)
              : "memory");
        } else {
          store(staging + offset, value);
        }
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      if (!DIRECT) {
        asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
        if (thread == 0)
          asm volatile(
              "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
              "[%0], [%1], %2, [%3];" ::"r"(peer), "r"(staging), "n"(HALF_BYTES), "r"(peers_full)
              : "memory");
      }
      wait(empty, parity);
    } else if (warp == RELAY) {
      if (thread % 32 == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full),
                     "n"(HALF_BYTES) : "memory");
      wait(full, parity);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      const uint32_t got = *reinterpret_cast<volatile uint32_t*>(
          memory + (rank ^ 1) * HALF_BYTES + (thread % 32) * 512);
      bad += got != static_cast<uint32_t>(round * 2 + (rank ^ 1));
      __syncwarp();
      if (thread % 32 == 0) arrive(in_cta(relayed, 0));
      wait(empty, parity);
    } else if (rank == 0) {
      wait(relayed, parity);
      if (thread % 32 == 0)
        for (int cta = 0; cta < 2; ++cta) arrive(in_cta(empty, cta));
      __syncwarp();
    }
  }
  meet_cluster();
  if (thread == 0) cycles[blockIdx.x] = (clock64() - start) / ROUNDS;
  if (bad) atomicAdd(wrong, bad);
}

template <bool DIRECT>
void measure(const char* name, int clusters, bool last) {
  long long *cycles, host[512];
  int *wrong, host_wrong = 0;
  cudaMalloc(&cycles, sizeof host);
  cudaMalloc(&wrong, sizeof(int));
  cudaMemset(wrong, 0, sizeof(int));
  const int bytes = 3 * HALF_BYTES;
  cudaFuncSetAttribute(exchange<DIRECT>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  long long least = 1 << 30, most = 0;
  for (int again = 0; again < 5; ++again) {
    exchange<DIRECT><<<2 * clusters, THREADS + 64, bytes>>>(cycles, wrong);
    const cudaError_t status = cudaDeviceSynchronize();
    if (status != cudaSuccess) {
      fprintf(stderr, "%s: %s\n", name, cudaGetErrorString(status));
      exit(1);
    }
    cudaMemcpy(host, cycles, 2 * clusters * sizeof(long long), cudaMemcpyDeviceToHost);
    for (int i = 0; i < 2 * clusters; ++i) {
      least = host[i] < least ? host[i] : least;
      most = host[i] > most ? host[i] : most;
    }
  }
  cudaMemcpy(&host_wrong, wrong, sizeof(int), cudaMemcpyDeviceToHost);
  printf("{\"way\": \"%s\", \"clusters\": %d, \"least_cycles\": %lld, \"most_cycles\": %lld, "
         "\"wrong\": %d}%s\n", name, clusters, least, most, host_wrong, last ? "" : ",");
}

int main() {
  cudaDeviceProp device;
  cudaGetDeviceProperties(&device, 0);
  printf("{\"device\": \"%s\", \"rounds\": %d, \"bytes\": %d, \"ways\": [\n", device.name, ROUNDS,
         HALF_BYTES);
  for (int clusters : {1, 60}) {
    measure<true>("direct", clusters, false);
    measure<false>("staged", clusters, clusters == 60);
  }
  printf("]}\n");
}
