// The arithmetic of one softmax step of a warpgroup on registers, without products: the row maximum,
// the scaled exponentials, their sum, P in bf16, and O rescaled. One, two or three warpgroups share
// the SM, as the consumers of a forward kernel do.
#include "common.cuh"

constexpr int ROWS = 2;  // of a thread, in the accumulators of wgmma

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
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// COLS columns of S, DEPTH columns of O (0: no rescaling). The scores of a step are the last step's
// exponentials and words of P, so that nothing can be left out and nothing is added.
template <int COLS, int DEPTH>
__global__ void __launch_bounds__(384, 1) steps(long n, Stamp* out, float scale, float* sink) {
  constexpr int SCORES = COLS / 2, OUTPUTS = DEPTH / 2;
  float s[SCORES], o[OUTPUTS + 1];
  float top[ROWS], sum[ROWS];
#pragma unroll
  for (int i = 0; i < SCORES; ++i) s[i] = scale * (i * 37 % 64 + threadIdx.x % 7);
#pragma unroll
  for (int i = 0; i <= OUTPUTS; ++i) o[i] = scale * i;
  for (int r = 0; r < ROWS; ++r) top[r] = -1e30f, sum[r] = 0;
  __syncthreads();
  const long long start = now();
#pragma unroll 1
  for (long step = 0; step < n; ++step) {
    float factor[ROWS], shift[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float most = s[2 * r], more = s[2 * r + 1];
#pragma unroll
      for (int i = 4; i < SCORES; i += 4)
        most = fmaxf(most, s[i + 2 * r]), more = fmaxf(more, s[i + 2 * r + 1]);
      const float new_top = fmaxf(top[r], quad_max(fmaxf(most, more)));
      factor[r] = exp2_mufu((top[r] - new_top) * scale);
      shift[r] = new_top * scale;
      top[r] = new_top;
      sum[r] *= factor[r];
    }
#pragma unroll
    for (int i = 0; i < SCORES; i += 2) {
      const int r = i / 2 % ROWS;
      const float low = exp2_mufu(fmaf(s[i], scale, -shift[r]));
      const float high = exp2_mufu(fmaf(s[i + 1], scale, -shift[r]));
      sum[r] += low;
      sum[r] += high;
      s[i] = low;
      s[i + 1] = __uint_as_float(packed(low, high));
    }
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i) o[i] *= factor[i / 2 % ROWS];
  }
  mark(out, start);
  float all = sum[0] + sum[1];
#pragma unroll
  for (int i = 0; i <= OUTPUTS; ++i) all += o[i];
#pragma unroll
  for (int i = 0; i < SCORES; ++i) all += s[i];
  if (all == 12345.678f) *sink = all;
}

template <int COLS, int DEPTH>
void cases() {
  for (int groups : {1, 2, 3}) {
    const std::string name = "softmax step/64 x " + std::to_string(COLS) + ", O of " +
                             std::to_string(DEPTH) + " columns, " + std::to_string(groups) +
                             (groups == 1 ? " warpgroup" : " warpgroups");
    report(name, "cycles", "of all warpgroups together, one step of each",
           slopes(launcher(steps<COLS, DEPTH>, 1, 128 * groups, 0, 0.01f, (float*)nullptr), 200, 1000));
  }
}

int main() {
  report_clock("softmax before");
  cases<64, 0>(), cases<64, 128>(), cases<80, 128>(), cases<128, 0>(), cases<128, 64>(), cases<128, 128>();
  report_clock("softmax after");
}
