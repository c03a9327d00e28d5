// What every program here shares: stamps of the SM clock, slopes over repetitions, one line of JSON
// per figure.
//
// A kernel repeats something n times between two stamps of each warp; its time is the mean over CTAs
// of the last end less the first start. A figure is the slope between two values of n, so that what
// a launch costs once drops out; it is taken REPEATS times.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

constexpr int WARP = 32, MOST_WARPS = 32, MOST_CTAS = 4096;

struct Stamp {
  long long start, end;
};

#define CHECK(call) check((call), #call)
inline void check(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(code));
  std::exit(1);
}

__device__ __forceinline__ long long now() {
  long long cycles;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles)::"memory");
  return cycles;
}
__device__ __forceinline__ long long nanoseconds() {
  long long ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
  return ns;
}
__device__ __forceinline__ void mark(Stamp* out, long long start) {
  const long long end = now();
  if (threadIdx.x % WARP == 0) out[blockIdx.x * MOST_WARPS + threadIdx.x / WARP] = {start, end};
}
__device__ __forceinline__ uint32_t smem(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void init_barrier(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
}
__device__ __forceinline__ void wait_barrier(uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap* map, int row,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(map), "r"(0), "r"(row), "r"(barrier)
      : "memory");
}

inline int repeats() {
  const char* given = std::getenv("REPEATS");
  return given ? std::atoi(given) : 9;
}
inline Stamp* stamps() {
  static Stamp* memory = nullptr;
  if (!memory) CHECK(cudaMalloc(&memory, MOST_CTAS * MOST_WARPS * sizeof(Stamp)));
  return memory;
}
// Mean over the CTAs of last end - first start; warps and CTAs without stamps are left out.
inline double span(int ctas) {
  static std::vector<Stamp> host(MOST_CTAS * MOST_WARPS);
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaMemcpy(host.data(), stamps(), ctas * MOST_WARPS * sizeof(Stamp), cudaMemcpyDefault));
  double sum = 0;
  int stamped = 0;
  for (int cta = 0; cta < ctas; ++cta) {
    long long first = INT64_MAX, last = 0;
    for (int warp = 0; warp < MOST_WARPS; ++warp) {
      const Stamp& stamp = host[cta * MOST_WARPS + warp];
      if (stamp.end == 0) continue;
      first = std::min(first, stamp.start), last = std::max(last, stamp.end);
    }
    if (last) sum += static_cast<double>(last - first), ++stamped;
  }
  return sum / stamped;
}

using Run = std::function<double(long)>;  // repetitions -> cycles

template <class... Parameters, class... Arguments>
Run launcher(void (*kernel)(long, Stamp*, Parameters...), int ctas, int threads, int bytes,
             Arguments... arguments) {
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  return [=](long n) {
    CHECK(cudaMemset(stamps(), 0, ctas * MOST_WARPS * sizeof(Stamp)));
    kernel<<<ctas, threads, bytes>>>(n, stamps(), arguments...);
    CHECK(cudaGetLastError());
    return span(ctas);
  };
}
inline std::vector<double> slopes(const Run& run, long less, long more) {
  std::vector<double> found;
  run(less), run(more);
  for (int i = 0; i < repeats(); ++i) {
    const double short_run = run(less);
    found.push_back((run(more) - short_run) / static_cast<double>(more - less));
  }
  return found;
}
inline std::vector<double> scaled(std::vector<double> values, double factor) {
  for (double& value : values) value *= factor;
  return values;
}
inline std::vector<double> rate(std::vector<double> values, double amount) {
  for (double& value : values) value = amount / value;
  return values;
}
inline void report(const std::string& name, const std::string& unit, const std::string& method,
                   const std::vector<double>& values) {
  std::printf("{\"name\": \"%s\", \"unit\": \"%s\", \"method\": \"%s\", \"values\": [", name.c_str(),
              unit.c_str(), method.c_str());
  for (size_t i = 0; i < values.size(); ++i) std::printf("%s%.6g", i ? ", " : "", values[i]);
  std::printf("]}\n");
  std::fflush(stdout);
}

static __global__ void clock_rate(long, Stamp*, double* mhz) {
  const long long ns = nanoseconds(), start = now();
  while (nanoseconds() - ns < 20000000) {
  }
  *mhz = 1e3 * static_cast<double>(now() - start) / static_cast<double>(nanoseconds() - ns);
}
// The SM clock at this moment, of one spinning thread.
inline void report_clock(const std::string& when) {
  static double* mhz = nullptr;
  if (!mhz) CHECK(cudaMallocHost(&mhz, sizeof(double)));
  clock_rate<<<1, 1>>>(0, nullptr, mhz);
  CHECK(cudaDeviceSynchronize());
  report("clock/" + when, "MHz", "clock64 over globaltimer, 20 ms of one thread", {*mhz});
}
