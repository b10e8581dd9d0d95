// What a chunk of C = 16 tokens needs besides its state, computed for all chunks at once; one SIMD-group per chunk.
//
// With E_tj the decay after token j up to token t, and S0 the state before the chunk (rows are values):
//   add       y = Qd S0^T + P V                                              P = tril(Q K^T o E)
//   delta     (I + beta A) U = beta (V - Kd S0^T), y = Qd S0^T + P U         A = tril(K K^T o E, -1)
//   low_rank  (I - Ab) U = Ad S0^T + Ak V, y = Qd S0^T + P V + Pb U
// The systems are solved in two halves of 8 tokens, which is as exact as token by token, unlike an inverse of all 16.
// Decays are exponentials of sums over the very tokens they span, or products of single decays, never differences of
// sums from the start: those lose small decays behind large ones, and -inf - (-inf) is not a number.
constant constexpr int C = 16;
constant constexpr int SLAB = 32, LD = SLAB + 4;  // channels staged at a time, one per lane

// m[i] of a triangle is the block of rows 8 (i > 0) .. and columns 8 (i > 1) ..
inline int block_row(int i) { return i > 0 ? 8 : 0; }
inline int block_column(int i) { return i > 1 ? 8 : 0; }

// What solves (I + diag(rate) A) x = diag(rate) r, A the strict part of the triangle, by halves:
//   x0 = X0 r0, x1 = X1 (r1 + M x0)      X = (I + diag(rate) A)^-1 diag(rate) of each half alone, M = -A between them
// as the triangle X0, M, X1. Lane t < 16 brings rate_t and finds column t by forward substitution in its half.
template <typename OUT> inline void store_solver(Triangle A, float rate, OUT out, uint lane) {
  const int j = lane % 8, lower = lane / 8 % 2;
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float scale = simd_shuffle(rate, ushort(8 * lower + i));
    x[i] = i == j ? scale : 0.0f;
#pragma unroll
    for (int m = 0; m < i; ++m) {
      const float a0 = element(A, i, m), a1 = element(A, 8 + i, 8 + m);
      x[i] -= scale * (lower ? a1 : a0) * x[m];
    }
  }
  if (lane < C) {
#pragma unroll
    for (int i = 0; i < 8; ++i) put(out, 128 * lower + 8 * i + j, x[i]);
  }
  store(scaled(A.m[1], -1.0f), offset_by(out, 64));
}

// gram += tril(rows columns^T), 16 tokens each, SLAB channels. Every eight channels are summed apart, then the sums: an
// error of the last bit in A is multiplied by the condition of I + A.
inline void gram_slab(thread Triangle& gram, threadgroup float* rows, threadgroup float* columns) {
#pragma unroll
  for (int d = 0; d < SLAB; d += 8) {
    const Matrix r0 = tile(rows + d, LD), r1 = tile(rows + 8 * LD + d, LD);
    const Matrix c0 = transposed_tile(columns + d, LD), c1 = transposed_tile(columns + 8 * LD + d, LD);
    Triangle product = zero_triangle();
    multiply_add(product.m[0], r0, c0);
    multiply_add(product.m[1], r1, c0);
    multiply_add(product.m[2], r1, c1);
#pragma unroll
    for (int i = 0; i < 3; ++i) gram.m[i] = plus(gram.m[i], product.m[i]);
  }
}

// The decays of g over (j, t] for the kept elements j <= t; lane t < 16 brings g_t
inline Triangle segment_decays(float g, uint lane) {
  const Position at = position_of(lane);
  float sums[6] = {0.0f};
#pragma unroll
  for (int s = 1; s < C; ++s) {
    const float gs = simd_broadcast(g, ushort(s));
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const int t = at.row + block_row(i), j = at.column + block_column(i);
      if (j < s && s <= t) sums[2 * i] += gs;
      if (j + 1 < s && s <= t) sums[2 * i + 1] += gs;
    }
  }
  Triangle decays;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const int t = at.row + block_row(i), j = at.column + block_column(i);
    decays.m[i] = matrix_of(j <= t ? decay_of(sums[2 * i]) : 0.0f, j + 1 <= t ? decay_of(sums[2 * i + 1]) : 0.0f);
  }
  return decays;
}

inline Triangle decayed(Triangle x, Triangle by) {
#pragma unroll
  for (int i = 0; i < 3; ++i)
    x.m[i] = matrix_of(decayed(first(x.m[i]), first(by.m[i])), decayed(second(x.m[i]), second(by.m[i])));
  return x;
}

// No decay or one per head: the products K K^T and Q K^T serve all G = HV / H value heads of a key head.
// G_out [.., 33]: the decays from the start of the chunk through token t, after token t to its end, and over all of it,
// each as decay_of gives it.
template <int K, int G, int WRITE, int N, typename QP, typename KP, typename GP, typename BETA, typename LENGTHS,
          typename X_OUT>
inline void prep_head(View<QP> q_, View<KP> k_, View<GP> g_, View<BETA> beta_, View<LENGTHS> lengths, int T, int H,
                      X_OUT X, device float* P, device float* G_out, threadgroup float* scratch, uint3 position,
                      uint lane) {
  const int batch = position.z / H, h = position.z % H, chunk = position.y, chunks = (T * N + C - 1) / C;
  const int start = chunk * C, n = real_tokens(lengths, batch, T) * N - start;
  threadgroup float* ks = scratch;
  threadgroup float* qs = scratch + C * LD;
  Triangle kk = zero_triangle(), qk = zero_triangle();
  for (int d = 0; d < K; d += SLAB) {
    simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (int t = 0; t < C; ++t) {
      const bool reads = t < n && (start + t) % N == N - 1;
      ks[t * LD + lane] = t < n ? load(row(k_, batch, start + t, h), d + lane) : 0.0f;
      qs[t * LD + lane] = reads ? load(row(q_, batch, (start + t) / N, h), d + lane) : 0.0f;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (WRITE == DELTA) gram_slab(kk, ks, ks);
    gram_slab(qk, qs, ks);
  }
  const int token = lane % C;
  for (int r = 0; r < G; ++r) {
    const int hv = h * G + r;
    const int64_t at = (int64_t(batch) * H * G + hv) * chunks + chunk;
    const bool decays = token < n && (start + token) % N == 0;
    const float g = decays ? load(row(g_, batch, (start + token) / N, hv), 0) : 0.0f;
    const Triangle E = segment_decays(g, lane);
    store(decayed(qk, E), P + at * 192);
    if (WRITE == DELTA) {
      const float beta = token < n ? load(row(beta_, batch, start + token, hv), 0) : 0.0f;
      store_solver(decayed(kk, E), beta, offset_by(X, at * 192), lane);
    }
    float sum = 0.0f;
#pragma unroll
    for (int s = 0; s < C; ++s) {
      const float gs = simd_broadcast(g, ushort(s));
      if (lane < C ? s <= token : s > token) sum += gs;
    }
    const float decay = decay_of(sum);
    G_out[at * 33 + lane] = decay;
    if (lane == C - 1) G_out[at * 33 + 32] = decay;
  }
}
