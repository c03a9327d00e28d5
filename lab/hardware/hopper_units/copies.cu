// The bulk copy engine: latency idle and under load, rates from L2 and device memory, stores, sums.
#include "boxes.cuh"
#include "common.cuh"

constexpr int KIB = 1024, BOX_BYTES = 8 * KIB;
constexpr long L2_BYTES = 16L << 20, HBM_BYTES = 4L << 30;

// Boxes in a ring of stages: one warp issues a box every `pace` cycles if a stage is free, another
// waits for each and notes how long it was under way.
__global__ void loads(long n, Stamp* out, const __grid_constant__ CUtensorMap map, int box_rows,
                      int stages, int pace, int boxes, int first, double* latency) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ uint64_t full[32], empty[32];
  __shared__ volatile long long issued[32];
  const int bytes = box_rows * ROW_BYTES;
  const uint32_t data = (smem(memory) + 1023) / 1024 * 1024;
  if (threadIdx.x == 0)
    for (int s = 0; s < stages; ++s) init_barrier(smem(&full[s]), 1), init_barrier(smem(&empty[s]), 1);
  publish_barriers();
  const long long start = now();
  if (threadIdx.x == 0) {
    const uint32_t fulls = smem(full), empties = smem(empty);
    long long next = start + static_cast<long long>(pace) * blockIdx.x / gridDim.x;  // not in step
    int stage = 0, parity = 1, box = (first + blockIdx.x) % boxes;
    for (int i = 0; i < n; ++i) {
      wait_barrier(empties + 8 * stage, parity);
      if (pace) {
        while (now() < next) {
        }
        next = max(next + pace, now());
      }
      expect_bytes(fulls + 8 * stage, bytes);
      issued[stage] = now();
      load_box(data + stage * bytes, &map, box * box_rows, fulls + 8 * stage);
      if ((box += gridDim.x) >= boxes) box -= boxes;
      if (++stage == stages) stage = 0, parity ^= 1;
    }
  } else if (threadIdx.x == WARP) {
    long long sum = 0;
    int stage = 0, parity = 0;
    for (long i = 0; i < n; ++i) {
      wait_barrier(smem(&full[stage]), parity);
      sum += now() - issued[stage];
      arrive(smem(&empty[stage]));
      if (++stage == stages) stage = 0, parity ^= 1;
    }
    mark(out, start);
    latency[blockIdx.x] = static_cast<double>(sum) / n;
  }
}
// What it costs one thread to issue: `count` boxes without a wait between them.
__global__ void issues(long n, Stamp* out, const __grid_constant__ CUtensorMap map, int box_rows,
                       int count) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ uint64_t full;
  const int bytes = box_rows * ROW_BYTES;
  const uint32_t data = (smem(memory) + 1023) / 1024 * 1024;
  init_barrier(smem(&full), 1);
  publish_barriers();
  long long sum = 0;
  for (long i = 0; i < n; ++i) {
    expect_bytes(smem(&full), count * bytes);
    const long long start = now();
    for (int k = 0; k < count; ++k) load_box(data + k * bytes, &map, k * box_rows, smem(&full));
    sum += now() - start;
    wait_barrier(smem(&full), i & 1);
  }
  out[0] = {0, sum};
}
enum Wait { COMPLETE, READ, READ_LATER };
// Boxes stored one after the other; READ_LATER: two may still be reading shared memory.
__global__ void stores(long n, Stamp* out, const __grid_constant__ CUtensorMap map, int box_rows,
                       Wait wait, long boxes, long first) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t data = (smem(memory) + 1023) / 1024 * 1024;
  const long long start = now();
  long box = (first + blockIdx.x) % boxes;
  for (long i = 0; i < n; ++i) {
    const int row = static_cast<int>(box) * box_rows;
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
                 "r"(0), "r"(row), "r"(data + static_cast<int>(i & 3) * box_rows * ROW_BYTES)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    if (wait == COMPLETE) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    if (wait == READ) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    if (wait == READ_LATER) asm volatile("cp.async.bulk.wait_group.read 2;" ::: "memory");
    if ((box += gridDim.x) >= boxes) box -= boxes;
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  mark(out, start);
}
// The same with sums of float32 in memory: pieces of consecutive bytes, or boxes of a tensor map.
template <bool TENSOR>
__global__ void sums(long n, Stamp* out, const __grid_constant__ CUtensorMap map, float* to, int bytes, Wait wait,
                     long pieces, long first, float value) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t data = (smem(memory) + 1023) / 1024 * 1024;
  for (int i = threadIdx.x; i < bytes; i += WARP)
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(data + 4 * i), "f"(value) : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  const long long start = now();
  long piece = (first + blockIdx.x) % pieces;
  for (long i = 0; i < n && threadIdx.x == 0; ++i) {
    const uint32_t from = data + static_cast<int>(i & 3) * bytes;
    if (TENSOR)
      asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
                   "r"(0), "r"(static_cast<int>(piece) * (bytes / ROW_BYTES)), "r"(from)
                   : "memory");
    else
      asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                       reinterpret_cast<char*>(to) + piece * bytes),
                   "r"(from), "r"(bytes)
                   : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    if (wait == COMPLETE) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    if (wait == READ) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    if (wait == READ_LATER) asm volatile("cp.async.bulk.wait_group.read 2;" ::: "memory");
    if ((piece += gridDim.x) >= pieces) piece -= pieces;
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  mark(out, start);
}

char* buffer = nullptr;
int sms = 0;
double* latencies = nullptr;

// Boxes of a buffer that a series of launches walks through, so that none of HBM is read twice soon.
struct Walk {
  long box;
  static inline long at = HBM_BYTES / 4;  // of all series together
  long advance(long boxes, long total) {
    const long here = at / box % total;
    at = (at + boxes * box) % HBM_BYTES;
    return here;
  }
};

struct Loaded {
  std::vector<double> cycles, latency;
};
Loaded measure_loads(int ctas, int box_rows, int stages, int pace, long bytes, long less, long more) {
  const CUtensorMap map = rows_map(buffer, bytes, box_rows);
  const long boxes = bytes / (box_rows * ROW_BYTES);
  Walk walk{box_rows * ROW_BYTES};
  Loaded found;
  const auto once = [&](long n) {
    const int first = walk.advance(n * ctas, boxes);
    return launcher(loads, ctas, 64, stages * box_rows * ROW_BYTES + KIB, map, box_rows, stages, pace, (int)boxes,
                    first, latencies)(n);
  };
  if (bytes <= L2_BYTES)  // all of it, twice
    launcher(loads, sms, 64, BOX_BYTES + KIB, rows_map(buffer, bytes, 64), 64, 1, 0, (int)(bytes / BOX_BYTES), 0,
             latencies)(2 * bytes / BOX_BYTES / sms + 1);
  once(less), once(more);
  for (int i = 0; i < repeats(); ++i) {
    const double cycles = once(less);
    found.cycles.push_back((once(more) - cycles) / (more - less));
    double sum = 0;
    for (int cta = 0; cta < ctas; ++cta) sum += latencies[cta];
    found.latency.push_back(sum / ctas);
  }
  return found;
}
std::string of_sms(int ctas) { return ctas == 1 ? "1 SM" : std::to_string(ctas) + " SMs"; }

void load_cases(const char* from, long bytes) {
  for (int ctas : {1, sms})
    for (int rows : {64, 128, 256}) {
      const int box = rows * ROW_BYTES;
      const std::string name = std::string("load ") + from + "/" + std::to_string(box / KIB) + " KiB, " +
                               of_sms(ctas);
      const Loaded one = measure_loads(ctas, rows, 1, 0, bytes, 64, 192);
      report(name + ", one in flight, latency", "cycles", "issue to seen by the waiter, mean", one.latency);
      report(name + ", one in flight, turn", "cycles", "issue, wait, free, issue again", one.cycles);
      const int stages = 192 * KIB / box;
      const Loaded many = measure_loads(ctas, rows, stages, 0, bytes, 64, 320);
      report(name + ", 192 KiB in flight, rate", "bytes/clk/SM", "ring of stages", rate(many.cycles, box));
      report(name + ", 192 KiB in flight, latency", "cycles", "issue to seen, mean", many.latency);
    }
}
// Latency against what the SMs ask for: boxes of 16 KiB, at most `stages` in flight.
void load_curve(const char* from, long bytes, int ctas, const std::vector<int>& paces) {
  constexpr int ROWS = 128, BOX = ROWS * ROW_BYTES, STAGES = 12;
  for (int pace : paces) {
    const Loaded found = measure_loads(ctas, ROWS, STAGES, pace, bytes, 64, 320);
    const std::string name = std::string("curve ") + from + "/" + of_sms(ctas) + ", a box of 16 KiB per " +
                             std::to_string(pace) + " cycles";
    report(name + ", rate", "bytes/clk/SM", "asked for at a fixed pace", rate(found.cycles, BOX));
    report(name + ", latency", "cycles", "issue to seen, mean", found.latency);
  }
  for (int stages : {1, 2, 3, 4, 6, 8, 12}) {
    const Loaded found = measure_loads(ctas, ROWS, stages, 0, bytes, 64, 320);
    const std::string name = std::string("curve ") + from + "/" + of_sms(ctas) + ", " +
                             std::to_string(stages * 16) + " KiB in flight";
    report(name + ", rate", "bytes/clk/SM", "asked for as stages come free", rate(found.cycles, BOX));
    report(name + ", latency", "cycles", "issue to seen, mean", found.latency);
  }
}
void issue_cost() {
  for (int rows : {8, 64, 128}) {
    const CUtensorMap map = rows_map(buffer, L2_BYTES, rows);
    const auto run = [&](int count) {
      return launcher(issues, 1, 1, 8 * rows * ROW_BYTES + KIB, map, rows, count)(256) / 256;
    };
    run(8);
    std::vector<double> values;
    for (int i = 0; i < repeats(); ++i) values.push_back((run(8) - run(2)) / 6);
    report("issue/load of " + std::to_string(rows * ROW_BYTES / KIB) + " KiB", "cycles",
           "one thread, 8 less 2 in a row", values);
  }
}
void store_cases(const char* to, long bytes) {
  for (int ctas : {1, sms})
    for (int rows : {64, 128, 256}) {
      const CUtensorMap map = rows_map(buffer, bytes, rows);
      const int box = rows * ROW_BYTES;
      const long boxes = bytes / box;
      Walk walk{box};
      const auto run = [&](Wait wait) {
        return [&, wait](long n) {
          return launcher(stores, ctas, 32, 4 * box + KIB, map, rows, wait, boxes,
                          walk.advance(n * ctas, boxes))(n);
        };
      };
      const std::string name = std::string("store ") + to + "/" + std::to_string(box / KIB) + " KiB, " +
                               of_sms(ctas);
      report(name + ", until written", "cycles", "wait_group 0", slopes(run(COMPLETE), 64, 192));
      report(name + ", until read", "cycles", "wait_group.read 0", slopes(run(READ), 64, 192));
      report(name + ", rate", "bytes/clk/SM", "three groups under way",
             rate(slopes(run(READ_LATER), 64, 320), box));
    }
}
template <bool TENSOR>
void sum_cases(const char* to, long bytes, float value) {
  for (int ctas : {1, sms / 4, sms})
    for (int piece : {4 * KIB, 16 * KIB, 32 * KIB}) {
      const long pieces = bytes / piece;
      const CUtensorMap map = rows_map(buffer, bytes, piece / ROW_BYTES, true);
      Walk walk{piece};
      const auto run = [&](Wait wait) {
        return [&, wait](long n) {
          return launcher(sums<TENSOR>, ctas, 32, 4 * piece + KIB, map, (float*)buffer, piece, wait, pieces,
                          walk.advance(n * ctas, pieces), value)(n);
        };
      };
      const std::string name = std::string("sum ") + (TENSOR ? "by map " : "") + "of " + (value ? "ones" : "zeros") + " in " +
                               to + "/" + std::to_string(piece / KIB) + " KiB, " + of_sms(ctas);
      report(name + ", until written", "cycles", "wait_group 0", slopes(run(COMPLETE), 64, 128));
      report(name + ", rate", "bytes/clk/SM", "three groups under way",
             rate(slopes(run(READ_LATER), 64, 192), piece));
    }
}
// All SMs read 4 GiB once, by events.
void stream() {
  constexpr int ROWS = 128, BOX = ROWS * ROW_BYTES, STAGES = 12;
  const CUtensorMap map = rows_map(buffer, HBM_BYTES, ROWS);
  const long boxes = HBM_BYTES / BOX, n = boxes / sms;
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin)), CHECK(cudaEventCreate(&end));
  std::vector<double> values;
  for (int i = 0; i <= repeats(); ++i) {
    CHECK(cudaEventRecord(begin));
    loads<<<sms, 64, STAGES * BOX + KIB>>>(n, stamps(), map, ROWS, STAGES, 0, (int)boxes, 0, latencies);
    CHECK(cudaEventRecord(end));
    CHECK(cudaEventSynchronize(end));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (i) values.push_back(static_cast<double>(n) * sms * BOX / ms / 1e9);
  }
  report("stream/read of device memory", "TB/s", "4 GiB once, 192 KiB per SM in flight, by events", values);
}

int main() {
  report_clock("copies before");
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  CHECK(cudaMalloc(&buffer, HBM_BYTES));
  CHECK(cudaMemset(buffer, 0, HBM_BYTES));
  CHECK(cudaMallocHost(&latencies, MOST_CTAS * sizeof(double)));
  load_cases("L2", L2_BYTES), load_cases("HBM", HBM_BYTES);
  load_curve("L2", L2_BYTES, sms, {2048, 1024, 768, 640, 512, 448, 384, 352, 320, 288, 256});
  load_curve("HBM", HBM_BYTES, sms, {8192, 4096, 2048, 1536, 1280, 1152, 1024, 960, 896, 832, 768});
  load_curve("L2", L2_BYTES, 1, {2048, 512, 320, 256, 192, 160});
  load_curve("L2", L2_BYTES, sms / 2, {2048, 512, 384, 320, 288, 256, 224});
  issue_cost();
  store_cases("L2", L2_BYTES), store_cases("HBM", HBM_BYTES);
  sum_cases<false>("L2", L2_BYTES, 1), sum_cases<true>("L2", L2_BYTES, 1), sum_cases<false>("HBM", HBM_BYTES, 1);
  sum_cases<false>("L2", L2_BYTES, 0);
  stream();
  report_clock("copies after");
}
