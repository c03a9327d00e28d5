// Arithmetic pipes of one SM: rate and latency of each instruction, which of them share a pipe or an
// issue slot, and the mix of a softmax step.
#include "common.cuh"

using Word = uint32_t;

// An instruction on a 32-bit state x with two constants. Kept as text, so that nothing is simplified.
#define OPERATION(NAME, TEXT, ...)                                \
  struct op_##NAME {                                              \
    static constexpr const char* name = #NAME;                    \
    static __device__ __forceinline__ void apply(Word& x, Word a, Word b) { \
      asm volatile(TEXT : "+r"(x) : "r"(a), "r"(b));              \
    }                                                             \
  }
OPERATION(ffma, "fma.rn.f32 %0, %0, %1, %2;");
OPERATION(fadd, "add.rn.f32 %0, %0, %1;");
OPERATION(fmul, "mul.rn.f32 %0, %0, %1;");
OPERATION(fmnmx, "max.f32 %0, %0, %1;");
OPERATION(iadd3, "{.reg .b32 t; add.s32 t, %0, %1; add.s32 %0, t, %2;}");
OPERATION(lop3, "lop3.b32 %0, %0, %1, %2, 0x96;");
OPERATION(shf, "shf.l.wrap.b32 %0, %0, %1, %2;");
OPERATION(imad, "mad.lo.s32 %0, %0, %1, %2;");
OPERATION(vimnmx3, "{.reg .b32 t; max.s32 t, %0, %1; max.s32 %0, t, %2;}");
OPERATION(prmt, "prmt.b32 %0, %0, %1, %2;");
OPERATION(setp_sel, "{.reg .pred p; setp.lt.f32 p, %0, %1; selp.b32 %0, %1, %2, p;}");
OPERATION(ex2, "ex2.approx.ftz.f32 %0, %0;");
OPERATION(lg2, "lg2.approx.ftz.f32 %0, %0;");
OPERATION(tanh_approx, "tanh.approx.f32 %0, %0;");
OPERATION(cvt_bf16x2, "cvt.rn.bf16x2.f32 %0, %0, %1;");
OPERATION(cvt_f16x2, "cvt.rn.f16x2.f32 %0, %0, %1;");
OPERATION(f2i, "cvt.rni.s32.f32 %0, %0;");
OPERATION(hfma2_bf16, "fma.rn.bf16x2 %0, %0, %1, %2;");
OPERATION(hfma2_f16, "fma.rn.f16x2 %0, %0, %1, %2;");

template <class Operation, int CHAINS, int UNROLL>
__global__ void alone(long n, Stamp* out, Word a, Word b, Word* sink) {
  Word x[CHAINS];
#pragma unroll
  for (int c = 0; c < CHAINS; ++c) x[c] = a + c * threadIdx.x;
  __syncthreads();
  const long long start = now();
#pragma unroll 1
  for (long i = 0; i < n; ++i) {
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) Operation::apply(x[k % CHAINS], a, b);
  }
  mark(out, start);
  Word sum = 0;
#pragma unroll
  for (int c = 0; c < CHAINS; ++c) sum ^= x[c];
  if (sum == 0x12345678) *sink = sum;
}
// COUNT_1 of one and COUNT_2 of another, spread evenly.
template <class First, int COUNT_1, class Second, int COUNT_2>
__global__ void pair(long n, Stamp* out, Word a, Word b, Word* sink) {
  constexpr int CHAINS = 8, SUM = COUNT_1 + COUNT_2, GROUPS = 96 / SUM;
  Word x[CHAINS], y[CHAINS];
#pragma unroll
  for (int c = 0; c < CHAINS; ++c) x[c] = y[c] = a + c * threadIdx.x;
  __syncthreads();
  const long long start = now();
#pragma unroll 1
  for (long i = 0; i < n; ++i) {
#pragma unroll
    for (int k = 0; k < GROUPS * SUM; ++k) {
      if ((k + 1) * COUNT_2 / SUM > k * COUNT_2 / SUM)
        Second::apply(y[(k * COUNT_2 / SUM) % CHAINS], a, b);
      else
        First::apply(x[(k - k * COUNT_2 / SUM) % CHAINS], a, b);
    }
  }
  mark(out, start);
  Word sum = 0;
#pragma unroll
  for (int c = 0; c < CHAINS; ++c) sum ^= x[c] ^ y[c];
  if (sum == 0x12345678) *sink = sum;
}
// F FMAs, A integer or comparison instructions and one exponential: the ratio of a softmax step.
template <int F, int A>
__global__ void mix(long n, Stamp* out, Word a, Word b, Word* sink) {
  constexpr int CHAINS = 8, GROUPS = 16;
  Word x[CHAINS], y[CHAINS], z[CHAINS];
#pragma unroll
  for (int c = 0; c < CHAINS; ++c) x[c] = y[c] = z[c] = a + c * threadIdx.x;
  __syncthreads();
  const long long start = now();
#pragma unroll 1
  for (long i = 0; i < n; ++i) {
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      op_ex2::apply(z[g % CHAINS], a, b);
#pragma unroll
      for (int k = 0; k < (F > A ? F : A); ++k) {
        if (k < F) op_ffma::apply(x[(g * F + k) % CHAINS], a, b);
        if (k < A) op_fmnmx::apply(y[(g * A + k) % CHAINS], a, b);
      }
    }
  }
  mark(out, start);
  Word sum = 0;
#pragma unroll
  for (int c = 0; c < CHAINS; ++c) sum ^= x[c] ^ y[c] ^ z[c];
  if (sum == 0x12345678) *sink = sum;
}
// FMAs by how many of their operands no earlier instruction has just read.
// 1: x = x * a + b. 2: x = x * y[.] + b. 3: x = y[.] * z[.] + x.
template <int FRESH>
__global__ void operands(long n, Stamp* out, Word a, Word b, Word* sink) {
  constexpr int CHAINS = 16, UNROLL = 128;
  Word x[CHAINS], y[CHAINS], z[CHAINS];
#pragma unroll
  for (int c = 0; c < CHAINS; ++c) x[c] = a + c, y[c] = b + c * threadIdx.x, z[c] = a * c + threadIdx.x;
  __syncthreads();
  const long long start = now();
#pragma unroll 1
  for (long i = 0; i < n; ++i) {
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
      const int c = k % CHAINS, other = (k * 5 + 3) % CHAINS;
      if (FRESH == 1) asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+r"(x[c]) : "r"(a), "r"(b));
      if (FRESH == 2) asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+r"(x[c]) : "r"(y[other]), "r"(b));
      if (FRESH == 3)
        asm volatile("fma.rn.f32 %0, %1, %2, %0;" : "+r"(x[c]) : "r"(y[other]), "r"(z[c]));
    }
  }
  mark(out, start);
  Word sum = 0;
#pragma unroll
  for (int c = 0; c < CHAINS; ++c) sum ^= x[c] ^ y[c] ^ z[c];
  if (sum == 0x12345678) *sink = sum;
}

constexpr Word A = 0x3f7ff000, B = 0x3a83126f;  // near 1 and 0.001, as floats
Word* const NOWHERE = nullptr;
const char* const RATE = "16 warps, 8 chains each";

template <class Operation>
void single() {
  constexpr int UNROLL = 128;
  const std::string name = Operation::name;
  report("rate/" + name, "lanes/clk", RATE,
         rate(slopes(launcher(alone<Operation, 8, UNROLL>, 1, 512, 0, A, B, NOWHERE), 50, 250),
              512.0 * UNROLL));
  report("latency/" + name, "cycles", "one warp, each depends on the last",
         scaled(slopes(launcher(alone<Operation, 1, UNROLL>, 1, 32, 0, A, B, NOWHERE), 50, 250),
                1.0 / UNROLL));
}
// Cycles of a sub-core per warp instruction of the first kind, with those of the second between.
template <class First, int COUNT_1, class Second, int COUNT_2>
void together(int threads = 512) {
  constexpr int SUM = COUNT_1 + COUNT_2, GROUPS = 96 / SUM;
  const double warps = threads / 128.0;
  const std::string name = std::to_string(COUNT_1) + " " + First::name + " + " +
                           std::to_string(COUNT_2) + " " + Second::name;
  report("pair/" + name, "cycles", "of a sub-core per group, " + std::to_string(threads / 32) + " warps",
         scaled(slopes(launcher(pair<First, COUNT_1, Second, COUNT_2>, 1, threads, 0, A, B, NOWHERE), 50, 250),
                1.0 / GROUPS / warps));
}
template <int F, int N>
void softmax_mix() {
  for (int threads : {128, 256, 384, 512}) {
    report("mix/" + std::to_string(F) + " ffma + " + std::to_string(N) + " fmnmx + 1 ex2, " +
               std::to_string(threads / 32) + " warps",
           "cycles", "of a sub-core per group, 8 chains of each kind",
           scaled(slopes(launcher(mix<F, N>, 1, threads, 0, A, B, NOWHERE), 50, 250), 128.0 / 16 / threads));
  }
}
template <int FRESH>
void by_operands() {
  const std::string name = "operands/ffma, " + std::to_string(FRESH) + " of 3 fresh";
  for (int threads : {128, 512})
    report(name + ", " + std::to_string(threads / 32) + " warps", "lanes/clk", "16 chains",
           rate(slopes(launcher(operands<FRESH>, 1, threads, 0, A, B, NOWHERE), 50, 250), 128.0 * threads));
}

int main() {
  report_clock("pipes before");
  single<op_ffma>(), single<op_fadd>(), single<op_fmul>(), single<op_fmnmx>(), single<op_iadd3>(), single<op_lop3>();
  single<op_shf>(), single<op_imad>(), single<op_vimnmx3>(), single<op_prmt>();
  single<op_setp_sel>(), single<op_ex2>(), single<op_lg2>(), single<op_tanh_approx>();
  single<op_cvt_bf16x2>(), single<op_cvt_f16x2>(), single<op_f2i>();
  single<op_hfma2_bf16>(), single<op_hfma2_f16>();
  together<op_ffma, 1, op_ffma, 1>(), together<op_ffma, 1, op_fadd, 1>(), together<op_ffma, 1, op_fmul, 1>();
  together<op_ffma, 1, op_fmnmx, 1>(), together<op_ffma, 1, op_iadd3, 1>(), together<op_ffma, 1, op_imad, 1>();
  together<op_fadd, 1, op_fadd, 1>(), together<op_fadd, 1, op_fmnmx, 1>(), together<op_fmnmx, 1, op_lop3, 1>();
  together<op_fmnmx, 1, op_cvt_bf16x2, 1>(), together<op_ffma, 1, op_cvt_bf16x2, 1>(), together<op_ffma, 2, op_cvt_bf16x2, 1>();
  together<op_ex2, 1, op_cvt_bf16x2, 1>(), together<op_cvt_bf16x2, 2, op_ex2, 1>(), together<op_ex2, 1, op_f2i, 1>();
  together<op_ffma, 4, op_ex2, 1>(), together<op_ffma, 7, op_ex2, 1>();
  together<op_ffma, 8, op_ex2, 1>(), together<op_fmnmx, 3, op_ex2, 1>(), together<op_fmnmx, 4, op_ex2, 1>();
  together<op_ffma, 2, op_ex2, 1>(), together<op_ffma, 3, op_ex2, 1>(), together<op_ffma, 5, op_ex2, 1>();
  together<op_ffma, 6, op_ex2, 1>(), together<op_fmnmx, 2, op_ex2, 1>(), together<op_imad, 4, op_ex2, 1>();
  together<op_ffma, 2, op_fmnmx, 1>(), together<op_ffma, 1, op_hfma2_bf16, 1>();
  softmax_mix<3, 2>(), softmax_mix<4, 2>(), softmax_mix<5, 2>(), softmax_mix<3, 3>(), softmax_mix<1, 1>();
  by_operands<1>(), by_operands<2>(), by_operands<3>();
  report_clock("pipes after");
}
