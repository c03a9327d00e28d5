// What a launch, a CTA and a cluster cost before their first instruction, and what follows a CTA that
// ends.
#include "common.cuh"

#include <map>

constexpr int KIB = 1024;

struct Life {
  long long start, end, ns;
  unsigned sm;
};
__device__ unsigned this_sm() {
  unsigned sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  return sm;
}
__global__ void empty() {}
__global__ void lives(Life* out, long long cycles) {
  const long long ns = nanoseconds(), start = now();
  if (threadIdx.x == 0) {
    while (now() - start < cycles) {
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) out[blockIdx.x] = {start, now(), ns, this_sm()};
}
__global__ void first_stamps(Stamp* out) {
  const long long start = now();
  mark(out, start);
}
// What a kernel does before its roles begin: eight barriers, the fence, all threads meet.
__global__ void prologue(long n, Stamp* out) {
  __shared__ uint64_t barriers[8];
  const long long start = now();
  for (long i = 0; i < n; ++i) {
    if (threadIdx.x == 0)
      for (auto& barrier : barriers) init_barrier(smem(&barrier), 1);
    publish_barriers();
  }
  mark(out, start);
}
__global__ void cluster_sync(long n, Stamp* out) {
  const long long start = now();
  for (long i = 0; i < n; ++i)
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  mark(out, start);
}

void launches() {
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin)), CHECK(cudaEventCreate(&end));
  const auto time = [&](const std::function<void()>& work) {
    CHECK(cudaEventRecord(begin));
    work();
    CHECK(cudaEventRecord(end));
    CHECK(cudaEventSynchronize(end));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    return 1e6 * ms;
  };
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  for (int ctas : {1, 132, 1320}) {
    std::map<int, cudaGraphExec_t> graphs;
    for (int count : {100, 400}) {
      cudaGraph_t graph;
      CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
      for (int i = 0; i < count; ++i) empty<<<ctas, 384, 0, stream>>>();
      CHECK(cudaStreamEndCapture(stream, &graph));
      CHECK(cudaGraphInstantiate(&graphs[count], graph, 0));
    }
    const auto some = [&](int count) {
      return time([&] { CHECK(cudaGraphLaunch(graphs[count], 0)); });
    };
    some(400), some(100);
    std::vector<double> values;
    for (int i = 0; i < repeats(); ++i) {
      const double few = some(100);
      values.push_back((some(400) - few) / 300);
    }
    report("launch/empty kernels in a graph, CTAs " + std::to_string(ctas), "ns", "by events, 400 less 100", values);
  }
}
// What events around one kernel show, queued behind a long one so that the host has no part in it.
void between_events() {
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin)), CHECK(cudaEventCreate(&end));
  Life* out;
  CHECK(cudaMallocHost(&out, sizeof(Life)));
  for (int kernels : {0, 1, 2}) {
    std::vector<double> values;
    for (int i = 0; i <= repeats(); ++i) {
      lives<<<1, 32>>>(out, 600000);
      CHECK(cudaEventRecord(begin));
      for (int k = 0; k < kernels; ++k) empty<<<132, 384>>>();
      CHECK(cudaEventRecord(end));
      CHECK(cudaEventSynchronize(end));
      float ms;
      CHECK(cudaEventElapsedTime(&ms, begin, end));
      if (i) values.push_back(1e6 * ms);
    }
    report("launch/between events, empty kernels " + std::to_string(kernels), "ns", "132 CTAs, behind a long kernel", values);
  }
  CHECK(cudaFreeHost(out));
}
// Two waves and a half: what lies between the end of a CTA and the start of the next on its SM.
void waves(int threads, int bytes, int cluster, int sms) {
  Life* out;
  const int ctas = sms * 3;
  CHECK(cudaMallocHost(&out, ctas * sizeof(Life)));
  CHECK(cudaFuncSetAttribute(lives, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(ctas), config.blockDim = dim3(threads), config.dynamicSmemBytes = bytes;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {(unsigned)cluster, 1, 1};
  config.attrs = &attribute, config.numAttrs = cluster > 1;
  std::vector<double> gaps, spread, worst;
  for (int i = 0; i <= repeats(); ++i) {
    CHECK(cudaLaunchKernelEx(&config, lives, out, 20000ll));
    CHECK(cudaDeviceSynchronize());
    std::map<unsigned, std::vector<Life>> by_sm;
    for (int cta = 0; cta < ctas; ++cta) by_sm[out[cta].sm].push_back(out[cta]);
    std::vector<double> found;
    long long first = INT64_MAX, last = 0;
    for (auto& [sm, all] : by_sm) {
      std::sort(all.begin(), all.end(), [](const Life& a, const Life& b) { return a.start < b.start; });
      for (size_t k = 1; k < all.size(); ++k) found.push_back(all[k].start - all[k - 1].end);
      first = std::min(first, all[0].ns), last = std::max(last, all[0].ns);
    }
    if (i == 0) continue;
    std::sort(found.begin(), found.end());
    gaps.push_back(found[found.size() / 2]), worst.push_back(found.back());
    spread.push_back(last - first);
  }
  const std::string name = "CTA/" + std::to_string(threads) + " threads, " + std::to_string(bytes / KIB) + " KiB" +
                           (cluster > 1 ? ", clusters of " + std::to_string(cluster) : "");
  report(name + ", replaced", "cycles", "end of a CTA to start of the next on its SM, median of all", gaps);
  report(name + ", replaced, slowest", "cycles", "the same, largest", worst);
  report(name + ", first wave", "ns", "globaltimer of the last CTA to start less that of the first", spread);
  CHECK(cudaFreeHost(out));
}

int main() {
  report_clock("launch before");
  int sms = 0;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  launches(), between_events();
  for (int threads : {128, 384}) waves(threads, 200 * KIB, 1, sms);
  waves(384, 120 * KIB, 1, sms), waves(384, 200 * KIB, 2, sms);
  for (int threads : {384, 1024}) {
    std::vector<double> values;
    for (int i = 0; i <= repeats(); ++i) {
      CHECK(cudaMemset(stamps(), 0, MOST_CTAS * sizeof(Stamp)));
      first_stamps<<<1, threads>>>(stamps());
      CHECK(cudaDeviceSynchronize());
      std::vector<Stamp> host(threads / WARP);
      CHECK(cudaMemcpy(host.data(), stamps(), host.size() * sizeof(Stamp), cudaMemcpyDefault));
      long long first = INT64_MAX, last = 0;
      for (const Stamp& stamp : host) first = std::min(first, stamp.start), last = std::max(last, stamp.start);
      if (i) values.push_back(last - first);
    }
    report("CTA/" + std::to_string(threads) + " threads, first to last warp", "cycles", "first stamps of the warps", values);
  }
  report("CTA/8 barriers, fence, __syncthreads", "cycles", "384 threads", slopes(launcher(prologue, 1, 384, 0), 50, 250));
  report_clock("launch after");
}
