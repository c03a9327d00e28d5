// What warpgroups of an attention forward kernel do to each other. Vector instructions beside products
// of another warpgroup, kind by kind; and whole steps of one, two or three consumers: products,
// softmax and barriers as in the kernel, without loads.
#include "common.cuh"
#include "products.cuh"

constexpr int KIB = 1024, SMEM = 160 * KIB + KIB, Q_BYTES = 16 * KIB, K_AT = 48 * KIB, V_AT = 112 * KIB;
constexpr int MARKS = 6, TRACED = 8;  // stamps of a step; last steps that have some

// K-major operand swizzled by 128 bytes: 8 rows are 1,024 bytes, 64 columns a slab.
__device__ __forceinline__ uint64_t operand(uint32_t at) {
  return (at & 0x3ffff) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
__device__ uint32_t fill(unsigned char* memory) {
  const uint32_t data = (smem(memory) + 1023) / 1024 * 1024;
  unsigned char* bytes = memory + (data - smem(memory));
  for (int i = threadIdx.x; i < 160 * KIB / 4; i += blockDim.x)  // bf16 near 1, either sign
    reinterpret_cast<uint32_t*>(bytes)[i] = (i * 2654435761u & 0x807f807f) | 0x3f003f00;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  return data;
}

// Products of which each instruction is waited for before the next one, as where registers spill.
template <int WIDTH, bool REGISTERS>
__global__ void __launch_bounds__(384, 1) one_by_one(long n, Stamp* out, float* sink) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t data = fill(memory);
  __syncthreads();
  float d[WIDTH / 2];
#pragma unroll
  for (int i = 0; i < WIDTH / 2; ++i) d[i] = 0;
  const uint32_t from_registers[4] = {0x3f803f00u ^ threadIdx.x << 31, 0x3f003f80u, 0xbf803f00u, 0x3f80bf00u};
  const long long start = now();
#pragma unroll 1
  for (long i = 0; i < n; ++i) {
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      const uint64_t right = operand(data + K_AT + k % 4 * 32);
      products_begin();
      if constexpr (REGISTERS) {
        Product<WIDTH, true>::issue(d, from_registers, right);
      } else {
        Product<WIDTH, false>::issue(d, operand(data + threadIdx.x / 128 * Q_BYTES + k % 4 * 32), right);
      }
      products_commit();
      products_wait<0>();
    }
  }
  mark(out, start);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < WIDTH / 2; ++i) sum += d[i];
  if (sum == 12345.678f) *sink = sum;
}
template <int WIDTH, bool REGISTERS>
void waited_case() {
  for (int groups : {1, 3})
    report("one by one/m64n" + std::to_string(WIDTH) + "k16, A from " + (REGISTERS ? "registers" : "shared memory") +
               ", warpgroups " + std::to_string(groups),
           "cycles", "of a warpgroup per wgmma, each waited for, 16 in a row",
           scaled(slopes(launcher(one_by_one<WIDTH, REGISTERS>, 1, 128 * groups, SMEM, (float*)nullptr), 20, 100), 1.0 / 16));
}

using Word = uint32_t;
#define OPERATION(NAME, TEXT)                                                               \
  struct op_##NAME {                                                                        \
    static constexpr const char* name = #NAME;                                              \
    static __device__ __forceinline__ void apply(Word& x, Word a, Word b) {                 \
      asm volatile(TEXT : "+r"(x) : "r"(a), "r"(b));                                        \
    }                                                                                       \
  }
OPERATION(ffma, "fma.rn.f32 %0, %0, %1, %2;");
OPERATION(fadd, "add.rn.f32 %0, %0, %1;");
OPERATION(fmul, "mul.rn.f32 %0, %0, %1;");
OPERATION(fmnmx, "max.f32 %0, %0, %1;");
OPERATION(ex2, "ex2.approx.ftz.f32 %0, %0;");
OPERATION(cvt_bf16x2, "cvt.rn.bf16x2.f32 %0, %0, %1;");
enum Beside { NOTHING, SHARED, REGISTERS };  // where the products' A is

template <Beside BESIDE, int WIDTH>
__device__ __forceinline__ void multiply(uint32_t data, volatile int* done, void* sink) {
  float d[WIDTH / 2];
#pragma unroll
  for (int i = 0; i < WIDTH / 2; ++i) d[i] = 0;
  const uint32_t from_registers[4] = {0x3f803f00u ^ threadIdx.x << 31, 0x3f003f80u, 0xbf803f00u, 0x3f80bf00u};
  while (*done == 0) {
    products_begin();
#pragma unroll
    for (int k = 0; k < 32; ++k) {
      const uint64_t right = operand(data + K_AT + k % 4 * 32);
      if constexpr (BESIDE == REGISTERS) {
        Product<WIDTH, true>::issue(d, from_registers, right);
      } else {
        Product<WIDTH, false>::issue(d, operand(data + k % 4 * 32), right);
      }
    }
    products_commit();
    products_wait<0>();
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < WIDTH / 2; ++i) sum += d[i];
  if (sum == 12345.678f) *static_cast<float*>(sink) = sum;
}

// The first warpgroup multiplies for as long as the others compute; their span is what is stamped.
template <class Operation, Beside BESIDE, int WIDTH>
__global__ void __launch_bounds__(384, 1) beside(long n, Stamp* out, Word a, Word b, Word* sink) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ int done;
  const uint32_t data = fill(memory);
  if (threadIdx.x == 0) done = 0;
  __syncthreads();
  if (threadIdx.x < 128) {
    if constexpr (BESIDE != NOTHING) multiply<BESIDE, WIDTH>(data, &done, sink);
    return;
  }
  constexpr int CHAINS = 16;
  Word x[CHAINS];
#pragma unroll
  for (int c = 0; c < CHAINS; ++c) x[c] = a + c * threadIdx.x;
  const long long start = now();
#pragma unroll 1
  for (long i = 0; i < n; ++i) {
#pragma unroll
    for (int k = 0; k < 128; ++k) Operation::apply(x[k % CHAINS], a, b);
  }
  mark(out, start);
  if (threadIdx.x % 128 == 0) atomicAdd(&done, 1);
  Word sum = 0;
#pragma unroll
  for (int c = 0; c < CHAINS; ++c) sum ^= x[c];
  if (sum == 0x12345678) *sink = sum;
}

template <class Operation, Beside BESIDE, int WIDTH>
void vector_case() {
  for (int groups : {1, 2}) {
    const char* what[] = {"nothing", "products from shared memory", "products from registers"};
    const std::string name = std::string("beside/") + Operation::name + ", " + std::to_string(groups) +
                             (groups == 1 ? " warpgroup" : " warpgroups") + ", " + what[BESIDE] +
                             (BESIDE == NOTHING ? "" : " n" + std::to_string(WIDTH));
    report(name, "cycles", "of a sub-core per instruction of one warp, 16 chains",
           scaled(slopes(launcher(beside<Operation, BESIDE, WIDTH>, 1, 128 + 128 * groups, SMEM, 0x3f000001u, 0x3e800000u,
                                  (Word*)nullptr), 20, 100), 1.0 / 128));
  }
}
template <class Operation>
void vector_cases() {
  vector_case<Operation, NOTHING, 64>();
  vector_case<Operation, SHARED, 128>();
  vector_case<Operation, SHARED, 64>();
  vector_case<Operation, REGISTERS, 128>();
  vector_case<Operation, REGISTERS, 64>();
}

__device__ __forceinline__ float exp2_mufu(float x) {
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ uint32_t packed(float low, float high) {
  uint32_t both;
  asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ __forceinline__ void turn_take(int group) {
  asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory");
}
__device__ __forceinline__ void turn_give(int group, int groups) {
  asm volatile("bar.arrive %0, 256;" ::"r"(1 + (group + 1) % groups) : "memory");
}

template <int D, int N>
__device__ __forceinline__ void issue_scores(float (&s)[N / 2], uint32_t q, uint32_t k) {
  products_begin();
#pragma unroll
  for (int i = 0; i < D / 16; ++i)
    Product<N, false>::issue(s, operand(q + i / 4 * 8 * KIB + i % 4 * 32), operand(k + i / 4 * N * 128 + i % 4 * 32));
  products_commit();
}
template <int D, int N>
__device__ __forceinline__ void issue_values(float (&o)[D / 2], const uint32_t (&p)[N / 4], uint32_t v) {
  products_begin();
#pragma unroll
  for (int i = 0; i < N / 16; ++i) {
    const uint32_t a[4] = {p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]};
    Product<D, true>::issue(o, a, operand(v + i / 4 * D * 128 + i % 4 * 32));
  }
  products_commit();
}
template <int N>
__device__ __forceinline__ void softmax(float (&s)[N / 2], float (&top)[2], float (&sum)[2], float scale, long long* marks) {
  float shift[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float most = s[2 * r], more = s[2 * r + 1];
#pragma unroll
    for (int i = 4; i < N / 2; i += 4) most = fmaxf(most, s[i + 2 * r]), more = fmaxf(more, s[i + 2 * r + 1]);
    const float highest = fmaxf(most, more);
    if (__any_sync(~0u, highest > top[r] + 1e6f)) {  // never
      const float all = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
      sum[r] *= exp2_mufu(top[r] - all), top[r] = all;
    }
    shift[r] = top[r] * scale;
  }
  if (marks) marks[2] = now();
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const int r = i / 2 % 2;
    s[i] = exp2_mufu(fmaf(s[i], scale, -shift[r]));
    sum[r] += s[i];
  }
}

// Softmax as compiled for N keys, beside products of the first warpgroup.
template <int N, Beside BESIDE, int WIDTH>
__global__ void __launch_bounds__(384, 1) softmax_beside(long n, Stamp* out, float scale, float* sink) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ int done;
  const uint32_t data = fill(memory);
  if (threadIdx.x == 0) done = 0;
  __syncthreads();
  if (threadIdx.x < 128) {
    if constexpr (BESIDE != NOTHING) multiply<BESIDE, WIDTH>(data, &done, sink);
    return;
  }
  float s[N / 2], top[2] = {4, 4}, sum[2] = {0, 0};
  uint32_t p[N / 4], mixed = 0;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) s[i] = scale * (i * 37 % 64 + threadIdx.x % 7);
  const long long start = now();
#pragma unroll 1
  for (long step = 0; step < n; ++step) {
    softmax<N>(s, top, sum, scale, nullptr);
#pragma unroll
    for (int i = 0; i < N / 2; i += 2) p[i / 2] = packed(s[i], s[i + 1]);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) asm volatile("" : "+f"(s[i]));
#pragma unroll
    for (int i = 0; i < N / 4; ++i) asm volatile("" : "+r"(p[i]));
  }
  mark(out, start);
  if (threadIdx.x % 128 == 0) atomicAdd(&done, 1);
  float all = sum[0] + sum[1];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) all += s[i];
#pragma unroll
  for (int i = 0; i < N / 4; ++i) mixed ^= p[i];
  if (all == 12345.678f || mixed == 12345) *sink = all;
}
template <int N, Beside BESIDE, int WIDTH>
void softmax_case() {
  for (int groups : {1, 2}) {
    const char* what[] = {"nothing", "products from shared memory", "products from registers"};
    const std::string name = "beside/softmax of 64 x " + std::to_string(N) + ", " + std::to_string(groups) +
                             (groups == 1 ? " warpgroup" : " warpgroups") + ", " + what[BESIDE] +
                             (BESIDE == NOTHING ? "" : " n" + std::to_string(WIDTH));
    report(name, "cycles", "of all warpgroups together, one step of each",
           slopes(launcher(softmax_beside<N, BESIDE, WIDTH>, 1, 128 + 128 * groups, SMEM, 0.01f, (float*)nullptr), 40, 200));
  }
}
template <int N>
void softmax_cases() {
  softmax_case<N, NOTHING, 64>(), softmax_case<N, SHARED, 128>(), softmax_case<N, SHARED, 64>();
  softmax_case<N, REGISTERS, 128>(), softmax_case<N, REGISTERS, 64>();
}

// trace: (group, step, mark) of the last steps: turn taken, S there, maxima, P V there, P, next turn.
template <int D, int N, int GROUPS, bool OVERLAP, bool TURNS>
__global__ void __launch_bounds__(GROUPS * 128, 1) attention(long n, Stamp* out, float scale, long long* trace, float* sink) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ uint64_t ready;
  const uint32_t data = fill(memory);
  if (threadIdx.x == 0) init_barrier(smem(&ready), 1);
  publish_barriers();
  const int group = threadIdx.x / 128;
  const uint32_t q = data + group * Q_BYTES;
  float s[N / 2], o[D / 2], top[2] = {4, 4}, sum[2] = {0, 0};
  uint32_t p[N / 4];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) s[i] = 0;
#pragma unroll
  for (int i = 0; i < D / 2; ++i) o[i] = 0;
#pragma unroll
  for (int i = 0; i < N / 4; ++i) p[i] = 0x3f003f00u;
  if (TURNS && group == GROUPS - 1) turn_give(group, GROUPS);
  const long long start = now();
  if (TURNS && !OVERLAP) turn_take(group);
#pragma unroll 1
  for (long step = 0; step < n; ++step) {
    const uint32_t k = data + K_AT + (step & 1) * 32 * KIB, v = data + V_AT + (step & 1) * 16 * KIB;
    long long marks[MARKS];
    wait_barrier(smem(&ready), 1);
    if constexpr (OVERLAP) {
      wait_barrier(smem(&ready), 1);
      if (TURNS) turn_take(group);
      marks[0] = now();
      issue_scores<D, N>(s, q, k);
      issue_values<D, N>(o, p, v);
      if (TURNS) turn_give(group, GROUPS);
      products_wait<1>();
    } else {
      marks[0] = now();
      issue_scores<D, N>(s, q, k);
      if (TURNS) turn_give(group, GROUPS);
      products_wait<0>();
    }
    marks[1] = now();
    softmax<N>(s, top, sum, scale, marks);
    marks[3] = now();
    if constexpr (OVERLAP) products_wait<0>();
    marks[4] = now();
#pragma unroll
    for (int i = 0; i < N / 2; i += 2) p[i / 2] = packed(s[i], s[i + 1]);
    if constexpr (!OVERLAP) {
      wait_barrier(smem(&ready), 1);
      if (TURNS) turn_take(group);
      issue_values<D, N>(o, p, v);
      products_wait<0>();
    }
    marks[5] = now();
    if (trace && step >= n - TRACED && threadIdx.x % 128 == 0)
      for (int m = 0; m < MARKS; ++m) trace[(group * TRACED + step - (n - TRACED)) * MARKS + m] = marks[m];
  }
  if (TURNS && !OVERLAP) turn_give(group, GROUPS);
  mark(out, start);
  float all = sum[0] + sum[1];
#pragma unroll
  for (int i = 0; i < D / 2; ++i) all += o[i];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) all += s[i];
  if (all == 12345.678f) *sink = all;
  if (TURNS && group == 0) turn_take(0);  // what the last one handed on
}

template <int D, int N, int GROUPS, bool OVERLAP, bool TURNS>
void step_case() {
  const std::string name = "step/d " + std::to_string(D) + ", " + std::to_string(64 * GROUPS) + " x " + std::to_string(N) +
                           (OVERLAP ? ", overlap" : ", serial") + (TURNS ? ", turns" : "");
  report(name, "cycles", "of all warpgroups together, one step of each, without loads",
         slopes(launcher(attention<D, N, GROUPS, OVERLAP, TURNS>, 1, 128 * GROUPS, SMEM, 0.01f, (long long*)nullptr,
                         (float*)nullptr), 100, 400));
  static long long* trace = nullptr;
  if (!trace) CHECK(cudaMallocHost(&trace, 3 * TRACED * MARKS * sizeof(long long)));
  launcher(attention<D, N, GROUPS, OVERLAP, TURNS>, 1, 128 * GROUPS, SMEM, 0.01f, trace, (float*)nullptr)(200);
  if (std::getenv("TRACE"))
    for (int group = 0; group < GROUPS; ++group)
      for (int step = 2; step < 6; ++step) {
        std::fprintf(stderr, "%s | group %d step %d:", name.c_str(), group, step);
        for (int m = 0; m < MARKS; ++m) std::fprintf(stderr, " %lld", trace[(group * TRACED + step) * MARKS + m] - trace[2 * MARKS]);
        std::fprintf(stderr, "\n");
      }
}
template <int D, int N, int GROUPS>
void step_cases() {
  step_case<D, N, GROUPS, true, false>(), step_case<D, N, GROUPS, false, false>();
  if constexpr (GROUPS > 1) step_case<D, N, GROUPS, true, true>(), step_case<D, N, GROUPS, false, true>();
}

int main() {
  report_clock("steps before");
  waited_case<64, false>(), waited_case<96, false>(), waited_case<128, false>(), waited_case<176, false>();
  waited_case<64, true>(), waited_case<96, true>(), waited_case<128, true>();
  softmax_cases<128>(), softmax_cases<64>();
  vector_cases<op_ffma>(), vector_cases<op_fadd>(), vector_cases<op_fmul>(), vector_cases<op_fmnmx>();
  vector_cases<op_ex2>(), vector_cases<op_cvt_bf16x2>();
  step_cases<64, 128, 1>(), step_cases<64, 128, 2>(), step_cases<64, 128, 3>(), step_cases<64, 64, 3>();
  step_cases<128, 128, 1>(), step_cases<128, 128, 2>(), step_cases<128, 64, 2>(), step_cases<128, 64, 3>();
  report_clock("steps after");
}
