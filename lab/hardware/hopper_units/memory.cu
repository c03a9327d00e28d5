// Shared memory of this CTA and of another, and counters in L2.
#include "common.cuh"

constexpr int KIB = 1024, UNROLL = 8;

template <class Step>
__device__ __forceinline__ void repeat(long n, Stamp* out, Step step) {
  const long long start = now();
#pragma unroll 1
  for (long i = 0; i < n; ++i) {
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) step(k);
  }
  mark(out, start);
}
__device__ __forceinline__ uint32_t in_cta(uint32_t address, int rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}
__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// A chain of loads: each word holds its own address.
__global__ void load_chain(long n, Stamp* out, uint32_t* sink) {
  __shared__ uint32_t words[256];
  uint32_t at = smem(&words[threadIdx.x]);
  words[threadIdx.x] = at;
  __syncthreads();
  repeat(n, out, [&](int) { asm volatile("ld.shared.b32 %0, [%0];" : "+r"(at)::"memory"); });
  if (at == 1) *sink = at;
}
__global__ void load_chain_wide(long n, Stamp* out, uint32_t* sink) {
  __shared__ uint4 words[256];
  uint32_t at = smem(&words[threadIdx.x]), b = 0, c = 0, d = 0;
  words[threadIdx.x] = {at, at, at, at};
  __syncthreads();
  repeat(n, out, [&](int) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%0];" : "+r"(at), "=r"(b), "=r"(c), "=r"(d)::"memory");
  });
  if ((at ^ b ^ c ^ d) == 1) *sink = at;
}
// A store and the load of what another lane of the warp stored.
__global__ void store_load(long n, Stamp* out, uint32_t* sink) {
  __shared__ uint32_t words[256];
  const uint32_t to = smem(&words[threadIdx.x]), from = smem(&words[threadIdx.x ^ 1]);
  uint32_t value = threadIdx.x;
  repeat(n, out, [&](int) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
  });
  if (value == 12345) *sink = value;
}
enum Access { LOAD4, LOAD16, STORE4, STORE16, STMATRIX, LDMATRIX };
// `flip` moves to other words after every UNROLL accesses: none can be left out as known.
template <Access ACCESS>
__global__ void accesses(long n, Stamp* out, int flip, uint32_t* sink) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const int width = ACCESS == LOAD4 || ACCESS == STORE4 ? 4 : 16;
  uint32_t at = smem(memory) + threadIdx.x * width, sum = 0;
  repeat(n, out, [&](int k) {
    uint32_t a = 0, b = 0, c = 0, d = 0;
    const uint32_t word = at + 8 * KIB * k;
    if (k == UNROLL - 1) at ^= flip;
    if (ACCESS == LOAD4) asm volatile("ld.volatile.shared.b32 %0, [%1];" : "=r"(a) : "r"(word) : "memory");
    if (ACCESS == LOAD16)
      asm volatile("ld.volatile.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(word) : "memory");
    if (ACCESS == LDMATRIX)
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(word) : "memory");
    if (ACCESS == STORE4) asm volatile("st.shared.b32 [%0], %1;" ::"r"(word), "r"(k) : "memory");
    if (ACCESS == STORE16)
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(word), "r"(k) : "memory");
    if (ACCESS == STMATRIX)
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %1, %1, %1};" ::"r"(word), "r"(k)
                   : "memory");
    sum ^= a ^ b ^ c ^ d;
  });
  if (sum == 12345) *sink = sum;
}

// A pair of CTAs: loads from the other's memory, each word holding its own address there.
__global__ void __cluster_dims__(2, 1, 1) remote_chain(long n, Stamp* out, uint32_t* sink) {
  __shared__ uint32_t words[256];
  const uint32_t peer = in_cta(smem(&words[threadIdx.x]), blockIdx.x % 2 ^ 1);
  words[threadIdx.x] = in_cta(smem(&words[threadIdx.x]), blockIdx.x % 2);
  meet_cluster();
  uint32_t at = peer;
  if (blockIdx.x % 2 == 0)
    repeat(n, out, [&](int) { asm volatile("ld.shared::cluster.b32 %0, [%0];" : "+r"(at)::"memory"); });
  if (at == 1) *sink = at;
  meet_cluster();
}
enum Way { LOADS, STORES };
template <Way WAY>
__global__ void __cluster_dims__(2, 1, 1) remote(long n, Stamp* out, bool both, uint32_t* sink) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t peer = in_cta(smem(memory) + threadIdx.x * 16, blockIdx.x % 2 ^ 1);
  uint32_t sum = 0;
  meet_cluster();
  if (both || blockIdx.x % 2 == 0) {
    repeat(n, out, [&](int k) {
      uint32_t a = 0, b = 0, c = 0, d = 0;
      const uint32_t at = peer + 16 * KIB * (k & 3);
      if (WAY == LOADS)
        asm volatile("ld.volatile.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(at) : "memory");
      if (WAY == STORES)
        asm volatile("st.volatile.shared::cluster.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(k) : "memory");
      sum ^= a ^ b ^ c ^ d;
    });
  }
  if (sum == 12345) *sink = sum;
  meet_cluster();
}
// A turn between two CTAs of a cluster: each arrives at the other's barrier. FENCED: what was written
// before is seen by the whole cluster, as for data in memory; without, as for data that a copy brings.
template <bool FENCED>
__global__ void __cluster_dims__(2, 1, 1) remote_turns(long n, Stamp* out) {
  __shared__ uint64_t barrier;
  if (threadIdx.x == 0) init_barrier(smem(&barrier), 1);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  meet_cluster();
  const int rank = blockIdx.x % 2;
  const uint32_t own = smem(&barrier), peer = in_cta(own, rank ^ 1);
  const auto wait = [&](int parity) {
    if (!FENCED) return wait_barrier(own, parity);
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(own), "r"(parity) : "memory");
  };
  const auto signal = [&] {
    if (FENCED) asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(peer) : "memory");
    else asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(peer) : "memory");
  };
  repeat(n, out, [&](int k) {
    if (rank == 0) signal(), wait(k & 1);
    else wait(k & 1), signal();
  });
  meet_cluster();
}
// Bulk copies into the other CTA's memory: one after the other, or four under way.
__global__ void __cluster_dims__(2, 1, 1) remote_copies(long n, Stamp* out, int bytes, int under_way) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ uint64_t full[4];
  if (threadIdx.x == 0)
    for (auto& barrier : full) init_barrier(smem(&barrier), 1);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  meet_cluster();
  if (threadIdx.x == 0) {  // each sends the next when the peer's of `under_way` ago is there
    const int peer = blockIdx.x % 2 ^ 1;
    const long long start = now();
    for (long i = 0; i < n + under_way; ++i) {
      const int s = i % under_way;
      if (i >= under_way) wait_barrier(smem(&full[s]), (i / under_way - 1) & 1);
      if (i >= n) continue;
      expect_bytes(smem(&full[s]), bytes);
      asm volatile(
          "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
              in_cta(smem(memory), peer) + s * bytes),
          "r"(smem(memory) + (4 + s) * bytes), "r"(bytes), "r"(in_cta(smem(&full[s]), peer))
          : "memory");
    }
    mark(out, start);
  }
  meet_cluster();
}

// Counters in L2.
__global__ void atomic_chain(long n, Stamp* out, uint32_t* counter) {
  uint32_t value = 0;
  repeat(n, out, [&](int) { value = atomicAdd(counter, value & 1); });
}
__global__ void poll_chain(long n, Stamp* out, uint32_t* counter) {
  uint32_t value = 0;
  repeat(n, out, [&](int) {
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(counter + (value & 1)) : "memory");
  });
}
__global__ void fence_gpu(long n, Stamp* out) {
  repeat(n, out, [&](int) { asm volatile("fence.acq_rel.gpu;" ::: "memory"); });
}
// A turn between two CTAs by counters: release, seen by acquire.
__global__ void counter_turns(long n, Stamp* out, uint32_t* counters, int other) {
  if (blockIdx.x != 0 && static_cast<int>(blockIdx.x) != other) return;
  uint32_t *mine = counters + (blockIdx.x ? 64 : 0), *theirs = counters + (blockIdx.x ? 0 : 64);
  uint32_t turn = 0;
  const auto wait = [&] {
    uint32_t value;
    do asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(mine) : "memory");
    while (value < turn);
  };
  const auto signal = [&] { asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(theirs) : "memory"); };
  repeat(n, out, [&](int) {
    ++turn;
    if (blockIdx.x == 0) signal(), wait();
    else wait(), signal();
  });
}

int main() {
  report_clock("memory before");
  uint32_t* counters;
  CHECK(cudaMalloc(&counters, 4096));
  CHECK(cudaMemset(counters, 0, 4096));
  uint32_t* const nowhere = nullptr;
  const auto cost = [](const std::string& name, const std::string& method, const Run& run, double share = 1.0) {
    report(name, "cycles", method, scaled(slopes(run, 100, 500), share / UNROLL));
  };
  cost("shared/ld 4 bytes, latency", "one warp, dependent", launcher(load_chain, 1, 32, 0, nowhere));
  cost("shared/ld 16 bytes, latency", "one warp, dependent", launcher(load_chain_wide, 1, 32, 0, nowhere));
  cost("shared/st then ld of it", "one warp, dependent", launcher(store_load, 1, 32, 0, nowhere));
  const auto rates = [&](const std::string& name, auto kernel, int width) {
    for (int threads : {128, 256, 512})
      report("shared/" + name + ", " + std::to_string(threads / WARP) + " warps, rate", "bytes/clk", "no bank conflict",
             rate(slopes(launcher(kernel, 1, threads, 128 * KIB, 64 * KIB, nowhere), 100, 500), 1.0 * threads * width * UNROLL));
  };
  rates("ld 4 bytes", accesses<LOAD4>, 4), rates("ld 16 bytes", accesses<LOAD16>, 16);
  rates("st 4 bytes", accesses<STORE4>, 4), rates("st 16 bytes", accesses<STORE16>, 16);
  rates("stmatrix.x4", accesses<STMATRIX>, 16), rates("ldmatrix.x4", accesses<LDMATRIX>, 16);
  cost("cluster/ld 4 bytes, latency", "one warp of a pair, dependent", launcher(remote_chain, 2, 32, 0, nowhere));
  const auto remote_rates = [&](const std::string& what, auto kernel) {
    const double bytes = 1024.0 * 16 * UNROLL;
    report("cluster/" + what + " 16 bytes, one way, rate", "bytes/clk/SM", "32 warps of one CTA of a pair",
           rate(slopes(launcher(kernel, 2, 1024, 64 * KIB, false, nowhere), 100, 500), bytes));
    report("cluster/" + what + " 16 bytes, both ways, rate", "bytes/clk/SM", "32 warps of each CTA of a pair",
           rate(slopes(launcher(kernel, 2, 1024, 64 * KIB, true, nowhere), 100, 500), bytes));
    report("cluster/" + what + " 16 bytes, 66 pairs, rate", "bytes/clk/SM", "32 warps of every CTA",
           rate(slopes(launcher(kernel, 132, 1024, 64 * KIB, true, nowhere), 100, 500), bytes));
  };
  remote_rates("ld", remote<LOADS>), remote_rates("st", remote<STORES>);
  cost("cluster/mbarrier one way, release.cluster", "half of a turn there and back", launcher(remote_turns<true>, 2, 1, 0), 0.5);
  cost("cluster/mbarrier one way", "half of a turn there and back, no fence", launcher(remote_turns<false>, 2, 1, 0), 0.5);
  for (int bytes : {4 * KIB, 16 * KIB}) {
    const std::string of = "cluster/bulk copy of " + std::to_string(bytes / KIB) + " KiB, ";
    report(of + "latency", "cycles", "both of a pair send, wait, send again",
           slopes(launcher(remote_copies, 2, 32, 8 * bytes, bytes, 1), 100, 500));
    report(of + "rate", "bytes/clk/SM", "both of a pair, four under way",
           rate(slopes(launcher(remote_copies, 2, 32, 8 * bytes, bytes, 4), 100, 500), bytes));
    report(of + "66 pairs, rate", "bytes/clk/SM", "four under way",
           rate(slopes(launcher(remote_copies, 132, 32, 8 * bytes, bytes, 4), 100, 500), bytes));
  }
  cost("L2/ld.acquire.gpu", "one thread, dependent", launcher(poll_chain, 1, 1, 0, counters));
  cost("L2/atom.add", "one thread, dependent", launcher(atomic_chain, 1, 1, 0, counters));
  cost("L2/fence.acq_rel.gpu", "one thread, nothing under way", launcher(fence_gpu, 1, 1, 0));
  for (int other : {1, 2, 16, 64, 131}) {
    const Run run = launcher(counter_turns, 132, 1, 0, counters, other);
    cost("L2/counter one way, CTA 0 and " + std::to_string(other), "half of a turn: red.release, seen by ld.acquire",
         [=](long n) {
           CHECK(cudaMemset(counters, 0, 4096));
           run(n);
           return span(1);
         }, 0.5);
  }
  report_clock("memory after");
}
