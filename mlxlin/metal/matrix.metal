// 8x8 float32 matrices of a SIMD-group, and the 16x16 lower triangles of a chunk as three of them: 00, 10, 11.
typedef simdgroup_matrix<float, 8, 8> Matrix;

// Of an 8x8 matrix a lane holds (row, column) and (row, column + 1).
struct Position {
  int row, column;
};
inline Position position_of(uint lane) {
  const int quad = lane / 4;
  Position p;
  p.row = (quad & 4) + (lane / 2) % 4;
  p.column = (quad & 2) * 2 + (lane % 2) * 2;
  return p;
}
// The lane that holds (row, column).
inline constexpr ushort lane_of(int row, int column) {
  return ((row & 4) << 2) | ((column & 4) << 1) | ((row & 3) << 1) | ((column & 2) >> 1);
}

inline Matrix matrix_of(float first, float second) {
  Matrix m;
  m.thread_elements()[0] = first;
  m.thread_elements()[1] = second;
  return m;
}
inline Matrix zero() { return matrix_of(0.0f, 0.0f); }
inline float first(Matrix m) { return m.thread_elements()[0]; }
inline float second(Matrix m) { return m.thread_elements()[1]; }
inline Matrix decayed(Matrix m, float by) { return matrix_of(decayed(first(m), by), decayed(second(m), by)); }
inline Matrix scaled(Matrix m, float x) { return matrix_of(first(m) * x, second(m) * x); }

inline Matrix plus(Matrix a, Matrix b) { return matrix_of(first(a) + first(b), second(a) + second(b)); }
inline void multiply_add(thread Matrix& sum, Matrix a, Matrix b) { simdgroup_multiply_accumulate(sum, a, b, sum); }

// Element (0, 0) is at p, element (i, j) at p[i ld + j], or at p[j ld + i] of a transposed matrix.
template <typename P> inline Matrix tile(P p, int ld) {
  Matrix m;
  simdgroup_load(m, p, ulong(ld));
  return m;
}
template <typename P> inline Matrix transposed_tile(P p, int ld) {
  Matrix m;
  simdgroup_load(m, p, ulong(ld), ulong2(0, 0), true);
  return m;
}
inline void store(Matrix m, device float* p) { simdgroup_store(m, p, 8ul); }
inline void store(Matrix, Absent) {}
inline Matrix tile(Absent, int) { return zero(); }

// Elements i and i + 1 of a vector
template <typename P> inline Matrix pair_of(Row<P> x, int i) {
  if (x.step == 1) return matrix_of(float(x.data[i]), float(x.data[i + 1]));
  return matrix_of(load(x, i), load(x, i + 1));
}

struct Triangle {
  Matrix m[3];
};
inline Triangle zero_triangle() {
  Triangle x;
#pragma unroll
  for (int i = 0; i < 3; ++i) x.m[i] = zero();
  return x;
}
template <typename P> inline Triangle triangle(P p) {
  Triangle x;
#pragma unroll
  for (int i = 0; i < 3; ++i) x.m[i] = tile(p + 64 * i, 8);
  return x;
}
inline Triangle triangle(Absent) { return zero_triangle(); }

inline void store(Triangle x, device float* p) {
#pragma unroll
  for (int i = 0; i < 3; ++i) store(x.m[i], p + 64 * i);
}
inline void store(Triangle, Absent) {}

inline Triangle negative(Triangle x) {
#pragma unroll
  for (int i = 0; i < 3; ++i) x.m[i] = scaled(x.m[i], -1.0f);
  return x;
}

// Element (i, j), j <= i, on every lane.
inline float element(Triangle x, int i, int j) {
  const Matrix m = x.m[(i >> 3) + (j >> 3)];
  return simd_broadcast((j & 1) ? second(m) : first(m), lane_of(i & 7, j & 7));
}

// sum[0 .. 1] += x [16 x 16] times y[0 .. 1], all matrices of 8 rows
inline void multiply_add(thread Matrix& sum0, thread Matrix& sum1, Triangle x, Matrix y0, Matrix y1) {
  multiply_add(sum0, x.m[0], y0);
  multiply_add(sum1, x.m[1], y0);
  multiply_add(sum1, x.m[2], y1);
}
