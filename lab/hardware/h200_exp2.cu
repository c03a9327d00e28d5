// 2^x on the GPU, for ranges of float32 bit patterns: the software exp2 of the softmax warps, with
// the PTX instructions that fa4.reference.exp2 models, and MUFU's ex2.approx.ftz.f32.
// Built, called and compared bit for bit by h200_exp2.py.

#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kThreads = 256;
constexpr int kMaxDegree = 5;

struct Coefficients {
  float c[kMaxDegree];  // c[k] multiplies f^(k+1); the constant term is 1
};

__device__ float max_f32(float a, float b) {
  float d;
  asm("max.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

__device__ float add_rm_ftz(float a, float b) {
  float d;
  asm("add.rm.ftz.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

// kFlush: with .ftz. The reference has none here and says that it makes no difference.
template <bool kFlush>
__device__ float sub(float a, float b) {
  float d;
  if constexpr (kFlush) {
    asm("sub.rn.ftz.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  } else {
    asm("sub.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  }
  return d;
}

template <bool kFlush>
__device__ float fma_rn(float a, float b, float c) {
  float d;
  if constexpr (kFlush) {
    asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  } else {
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  }
  return d;
}

// (r << 23) + p: floor(x) from the low bits of r goes into the exponent of p.
__device__ uint32_t add_exponent(float r, float p) {
  uint32_t shifted, d;
  asm("shl.b32 %0, %1, 23;" : "=r"(shifted) : "r"(__float_as_uint(r)));
  asm("add.s32 %0, %1, %2;" : "=r"(d) : "r"(shifted), "r"(__float_as_uint(p)));
  return d;
}

template <int kDegree, bool kFlush>
__global__ void polynomial(Coefficients coefficients, uint64_t first, uint64_t count, uint32_t step,
                           uint32_t* out) {
  const uint64_t i = uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const float magic = 12582912.0f;  // 2^23 + 2^22
  const float x = max_f32(__uint_as_float(static_cast<uint32_t>(first + i) * step), -127.0f);
  const float r = add_rm_ftz(x, magic);
  const float f = sub<kFlush>(x, sub<kFlush>(r, magic));
  float p = coefficients.c[kDegree - 1];
#pragma unroll
  for (int k = kDegree - 2; k >= 0; --k) p = fma_rn<kFlush>(p, f, coefficients.c[k]);
  p = fma_rn<kFlush>(p, f, 1.0f);
  out[i] = add_exponent(r, p);
}

__global__ void mufu(uint64_t first, uint64_t count, uint32_t step, uint32_t* out) {
  const uint64_t i = uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  float d;
  const float x = __uint_as_float(static_cast<uint32_t>(first + i) * step);
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
  out[i] = __float_as_uint(d);
}

template <int kDegree>
void launch(bool flush, unsigned blocks, const Coefficients& c, uint64_t first, uint64_t count,
            uint32_t step, uint32_t* out) {
  if (flush) {
    polynomial<kDegree, true><<<blocks, kThreads>>>(c, first, count, step, out);
  } else {
    polynomial<kDegree, false><<<blocks, kThreads>>>(c, first, count, step, out);
  }
}

}  // namespace

extern "C" const char* fa4_error(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}

// host_out[i] = bits of 2^x for the float x with bits (first + i) * step mod 2^32, i < count.
// degree 1-5: the polynomial with these coefficients, its subtractions and FMAs with .ftz if
// flush is not 0; degree 0: MUFU. Returns a CUDA error code, 0 for success.
extern "C" int fa4_exp2(int degree, int flush, const float* coefficients, uint64_t first,
                        uint64_t count, uint32_t step, uint32_t* host_out) {
  static uint32_t* device_out = nullptr;
  static uint64_t capacity = 0;
  if (degree < 0 || degree > kMaxDegree || count == 0) return cudaErrorInvalidValue;
  if (count > capacity) {
    cudaFree(device_out);
    capacity = 0;
    if (cudaError_t error = cudaMalloc(&device_out, count * sizeof(uint32_t))) return error;
    capacity = count;
  }
  Coefficients c = {};
  for (int k = 0; k < degree; ++k) c.c[k] = coefficients[k];
  const unsigned blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
  switch (degree) {
    case 0: mufu<<<blocks, kThreads>>>(first, count, step, device_out); break;
    case 1: launch<1>(flush, blocks, c, first, count, step, device_out); break;
    case 2: launch<2>(flush, blocks, c, first, count, step, device_out); break;
    case 3: launch<3>(flush, blocks, c, first, count, step, device_out); break;
    case 4: launch<4>(flush, blocks, c, first, count, step, device_out); break;
    case 5: launch<5>(flush, blocks, c, first, count, step, device_out); break;
  }
  if (cudaError_t error = cudaGetLastError()) return error;
  return cudaMemcpy(host_out, device_out, count * sizeof(uint32_t), cudaMemcpyDeviceToHost);
}
