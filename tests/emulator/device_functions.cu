// Functions that are not inlined, as nvcc passes them: structs, recursion, a table of addresses.
struct Sum { float a; double b; int c[3]; };

__device__ __noinline__ Sum make(float x, int n) {
  Sum s;
  s.a = x;
  s.b = x * 2.0;
  for (int i = 0; i < 3; i++) s.c[i] = n + i;
  return s;
}

__device__ __noinline__ float take(Sum s, int k) { return s.a + (float)s.b + s.c[k]; }

__device__ __noinline__ int factorial(int n, int* depth) {
  int here = n;
  *depth += 1;
  if (n < 2) return 1;
  int rest = factorial(n - 1, &here);
  return n * rest + here;
}

typedef float (*Function)(float);
__device__ __noinline__ float up(float x) { return x + 1; }
__device__ __noinline__ float square(float x) { return x * x; }
__device__ Function table[2] = {square, up};

extern "C" __global__ void functions(float* o, int* d) {
  int t = threadIdx.x, depth = 0;
  Sum s = make(t, t & 3);
  d[t] = factorial(t % 7, &depth) * 100 + depth;
  o[t] = take(s, t % 3) + table[t & 1]((float)t);
}
