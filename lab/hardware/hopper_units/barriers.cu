// Barriers, warp-wide exchanges and fences: what one costs, and how long a message takes.
#include "common.cuh"

constexpr int UNROLL = 8;

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

__global__ void wait_ready(long n, Stamp* out) {
  __shared__ uint64_t barrier;
  if (threadIdx.x == 0) init_barrier(smem(&barrier), 1), arrive(smem(&barrier));
  publish_barriers();
  repeat(n, out, [&](int) { wait_barrier(smem(&barrier), 0); });
}
__global__ void arrive_only(long n, Stamp* out) {
  __shared__ uint64_t barrier;
  if (threadIdx.x == 0) init_barrier(smem(&barrier), blockDim.x);
  publish_barriers();
  repeat(n, out, [&](int) { arrive(smem(&barrier)); });
}
__global__ void expect_only(long n, Stamp* out) {
  __shared__ uint64_t barrier;
  if (threadIdx.x == 0) init_barrier(smem(&barrier), 1);
  publish_barriers();
  repeat(n, out, [&](int) { expect_bytes(smem(&barrier), 0); });
}
__global__ void arrive_and_wait(long n, Stamp* out) {
  __shared__ uint64_t barrier;
  if (threadIdx.x == 0) init_barrier(smem(&barrier), 1);
  publish_barriers();
  repeat(n, out, [&](int k) { arrive(smem(&barrier)), wait_barrier(smem(&barrier), k & 1); });
}
// Two groups of warps hand a turn back and forth by mbarriers: one thread of each warp arrives, all
// threads wait. `first` and `second` are the first warps of the groups of `size` warps.
__global__ void mbarrier_turns(long n, Stamp* out, int first, int second, int size) {
  __shared__ uint64_t barriers[2];
  if (threadIdx.x == 0) init_barrier(smem(&barriers[0]), size), init_barrier(smem(&barriers[1]), size);
  publish_barriers();
  const int warp = threadIdx.x / WARP;
  const uint32_t go = smem(&barriers[0]), back = smem(&barriers[1]);
  const bool leader = threadIdx.x % WARP == 0;
  if (warp >= first && warp < first + size) {
    repeat(n, out, [&](int k) {
      if (leader) arrive(go);
      wait_barrier(back, k & 1);
    });
  } else if (warp >= second && warp < second + size) {
    repeat(n, out, [&](int k) {
      wait_barrier(go, k & 1);
      if (leader) arrive(back);
    });
  }
}
// One producer thread and one warpgroup: the producer arrives, 128 threads wait, one thread of each
// warp answers: a stage of a pipeline without a copy.
__global__ void producer_turns(long n, Stamp* out) {
  __shared__ uint64_t barriers[2];
  if (threadIdx.x == 0) init_barrier(smem(&barriers[0]), 1), init_barrier(smem(&barriers[1]), 4);
  publish_barriers();
  const uint32_t full = smem(&barriers[0]), empty = smem(&barriers[1]);
  if (threadIdx.x == 128) {
    repeat(n, out, [&](int k) { arrive(full), wait_barrier(empty, k & 1); });
  } else if (threadIdx.x < 128) {
    repeat(n, out, [&](int k) {
      wait_barrier(full, k & 1);
      if (threadIdx.x % WARP == 0) arrive(empty);
    });
  }
}
__global__ void bar_sync(long n, Stamp* out, int threads) {
  repeat(n, out, [&](int) { asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory"); });
}
__global__ void syncthreads_only(long n, Stamp* out) {
  repeat(n, out, [&](int) { __syncthreads(); });
}
// Two groups of threads hand a turn back and forth by named barriers, as warpgroups do at the tensor
// core.
__global__ void named_turns(long n, Stamp* out, int group, int groups) {
  const int mine = threadIdx.x / group, threads = 2 * group;
  if (mine == 0) {  // barriers 1, 2, ...: the turn of each; the last hands back to the first
    repeat(n, out, [&](int) {
      asm volatile("bar.arrive %0, %1;" ::"r"(2), "r"(threads) : "memory");
      asm volatile("bar.sync %0, %1;" ::"r"(1), "r"(threads) : "memory");
    });
  } else {
    const int next = mine + 1 == groups ? 1 : mine + 2;
    repeat(n, out, [&](int) {
      asm volatile("bar.sync %0, %1;" ::"r"(mine + 1), "r"(threads) : "memory");
      asm volatile("bar.arrive %0, %1;" ::"r"(next), "r"(threads) : "memory");
    });
  }
}
__global__ void syncwarp_only(long n, Stamp* out) {
  repeat(n, out, [&](int) { __syncwarp(); });
}
__global__ void wgmma_fence(long n, Stamp* out) {
  repeat(n, out, [&](int) { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); });
}
__global__ void proxy_fence(long n, Stamp* out) {
  repeat(n, out, [&](int) { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); });
}
// P through shared memory: a store of each thread, the fence, a barrier of the warpgroup.
__global__ void store_fence_sync(long n, Stamp* out, bool fenced) {
  __shared__ uint4 memory[256];
  const uint32_t at = smem(&memory[threadIdx.x]);
  repeat(n, out, [&](int) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(at) : "memory");
    if (fenced) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync 1, %0;" ::"r"(blockDim.x) : "memory");
  });
}
__global__ void shuffle_chain(long n, Stamp* out, int* sink) {
  int value = threadIdx.x;
  repeat(n, out, [&](int) { value = __shfl_sync(~0u, value, value); });
  if (value == -1) *sink = value;
}
// setmaxnreg: a warpgroup gives registers away and takes them again.
__global__ void __launch_bounds__(128, 1) register_turns(long n, Stamp* out) {
  repeat(n, out, [&](int) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;" ::: "memory");
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;" ::: "memory");
  });
}
// Of three warpgroups with 168 registers per thread the first two take turns with 240: the second
// gets them only when the first has given them away.
__global__ void __launch_bounds__(384, 1) register_handover(long n, Stamp* out) {
  __shared__ uint64_t barriers[2];
  if (threadIdx.x == 0) init_barrier(smem(&barriers[0]), 1), init_barrier(smem(&barriers[1]), 1);
  publish_barriers();
  const bool leader = threadIdx.x % 128 == 0;
  const uint32_t go = smem(&barriers[0]), back = smem(&barriers[1]);
  const long long start = now();
  if (threadIdx.x < 128) {
#pragma unroll 1
    for (long i = 0; i < n; ++i) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 24;" ::: "memory");
      if (leader) arrive(go);
      wait_barrier(back, i & 1);
      asm volatile("setmaxnreg.inc.sync.aligned.u32 240;" ::: "memory");
    }
    mark(out, start);
  } else if (threadIdx.x < 256) {
#pragma unroll 1
    for (long i = 0; i < n; ++i) {
      wait_barrier(go, i & 1);
      asm volatile("setmaxnreg.inc.sync.aligned.u32 240;" ::: "memory");
      asm volatile("setmaxnreg.dec.sync.aligned.u32 24;" ::: "memory");
      if (leader) arrive(back);
    }
  }
  __syncthreads();
}

int main() {
  report_clock("barriers before");
  const auto cost = [](const char* name, const std::string& method, const Run& run,
                       double share = 1.0) {
    report(name, "cycles", method, scaled(slopes(run, 200, 1000), share / UNROLL));
  };
  cost("mbarrier/try_wait ready", "one warp, phase complete", launcher(wait_ready, 1, 32, 0));
  cost("mbarrier/arrive", "one thread, arrivals back to back", launcher(arrive_only, 1, 1, 0));
  cost("mbarrier/arrive, warp", "32 threads, arrivals back to back", launcher(arrive_only, 1, 32, 0));
  cost("mbarrier/expect_tx", "one thread, back to back", launcher(expect_only, 1, 1, 0));
  cost("mbarrier/arrive and wait", "one thread completes the phase and sees it",
       launcher(arrive_and_wait, 1, 1, 0));
  const char* turns = "half of a turn there and back: arrive, seen by the waiter";
  cost("mbarrier/one way, warps of two sub-cores", turns, launcher(mbarrier_turns, 1, 64, 0, 0, 1, 1), 0.5);
  cost("mbarrier/one way, warps of one sub-core", turns, launcher(mbarrier_turns, 1, 160, 0, 0, 4, 1), 0.5);
  cost("mbarrier/one way, two warpgroups", turns, launcher(mbarrier_turns, 1, 256, 0, 0, 4, 4), 0.5);
  cost("mbarrier/one way, thread and warpgroup", turns, launcher(producer_turns, 1, 160, 0), 0.5);
  for (int threads : {32, 64, 128, 256, 384})
    cost(("bar.sync/" + std::to_string(threads) + " threads").c_str(), "all arrive together",
         launcher(bar_sync, 1, threads, 0, threads));
  for (int threads : {128, 384})
    cost(("bar.sync 0/" + std::to_string(threads) + " threads").c_str(), "__syncthreads",
         launcher(syncthreads_only, 1, threads, 0));
  for (int group : {32, 64, 128})
    cost(("bar.arrive to bar.sync/2 groups of " + std::to_string(group)).c_str(),
         "half of a turn there and back", launcher(named_turns, 1, 2 * group, 0, group, 2), 0.5);
  cost("bar.arrive to bar.sync/3 groups of 128", "a third of a turn through all",
       launcher(named_turns, 1, 384, 0, 128, 3), 1.0 / 3);
  cost("syncwarp/converged", "one warp", launcher(syncwarp_only, 1, 32, 0));
  cost("wgmma.fence/nothing in flight", "one warpgroup", launcher(wgmma_fence, 1, 128, 0));
  cost("fence.proxy.async/nothing in flight", "one warpgroup", launcher(proxy_fence, 1, 128, 0));
  for (int threads : {128, 256}) {
    const std::string of = std::to_string(threads) + " threads";
    cost(("st.shared, bar.sync/" + of).c_str(), "16 bytes per thread",
         launcher(store_fence_sync, 1, threads, 0, false));
    cost(("st.shared, fence.proxy.async, bar.sync/" + of).c_str(), "16 bytes per thread",
         launcher(store_fence_sync, 1, threads, 0, true));
  }
  cost("shfl/latency", "one warp, dependent", launcher(shuffle_chain, 1, 32, 0, (int*)nullptr));
  cost("setmaxnreg/dec and inc", "one warpgroup, 40 and 232", launcher(register_turns, 1, 128, 0));
  const auto handover = slopes(launcher(register_handover, 1, 384, 0), 200, 1000);
  report("setmaxnreg/handover there and back", "cycles",
         "two warpgroups, 216 registers per thread and back, with two mbarriers", handover);
  report_clock("barriers after");
}
