// What a chunk of C = 16 tokens needs besides its state, computed for all chunks at once; one SIMD-group per chunk.
//
// With E_tj the decay after token j up to token t, and S0 the state before the chunk (rows are values):
//   add       y = Qd S0^T + P V                                              P = tril(Q K^T o E)
//   delta     U = X (V - Kd S0^T), y = Qd S0^T + P U                         X = (I + tril(beta K K^T o E, -1))^-1 beta
//   low_rank  U = X (Ad S0^T) + W V, y = Qd S0^T + P V + Pb U                X = (I - Aab)^-1, W = X Aak
// Decays are exponentials of sums over the very tokens they span, or products of single decays, never differences of
// sums from the start: those lose small decays behind large ones, and -inf - (-inf) is not a number.
constant constexpr int C = 16;
constant constexpr int SLAB = 32, LD = SLAB + 4;  // channels staged at a time, one per lane

// (I + A) x = x, A the strict part of the triangle, one right-hand side per lane: forward substitution.
inline void solve(Triangle A, thread float* x) {
#pragma unroll
  for (int i = 1; i < C; ++i) {
#pragma unroll
    for (int j = 0; j < i; ++j) x[i] -= element(A, i, j) * x[j];
  }
}

// Lane j < 16 holds column j of a lower triangle.
inline void store_columns(const thread float* x, device float* p, int lane) {
  if (lane >= C) return;
#pragma unroll
  for (int i = 0; i < C; ++i) {
    if (lane < 8 || i >= 8) p[((i >> 3) + (lane >> 3)) * 64 + (i & 7) * 8 + (lane & 7)] = x[i];
  }
}
inline void store_columns(const thread float*, Absent, int) {}

// m[i] of a triangle is the block of rows 8 (i > 0) .. and columns 8 (i > 1) ..
inline int block_row(int i) { return i > 0 ? 8 : 0; }
inline int block_column(int i) { return i > 1 ? 8 : 0; }

// (I + A)^-1 diag(beta) for A = tril(diag(beta) gram, -1); lane t < 16 brings beta_t.
template <typename OUT> inline void store_inverse(Triangle gram, float beta, OUT out, uint lane) {
  const Position at = position_of(lane);
#pragma unroll
  for (int i = 0; i < 3; ++i) gram.m[i] = scaled(gram.m[i], simd_shuffle(beta, ushort(at.row + block_row(i))));
  float x[C];
#pragma unroll
  for (int i = 0; i < C; ++i) x[i] = i == int(lane % C) ? beta : 0.0f;
  solve(gram, x);
  store_columns(x, out, lane);
}

// gram += tril(rows columns^T), 16 tokens each, SLAB channels
inline void gram_slab(thread Triangle& gram, threadgroup float* rows, threadgroup float* columns) {
#pragma unroll
  for (int d = 0; d < SLAB; d += 8) {
    const Matrix r0 = tile(rows + d, LD), r1 = tile(rows + 8 * LD + d, LD);
    const Matrix c0 = transposed_tile(columns + d, LD), c1 = transposed_tile(columns + 8 * LD + d, LD);
    multiply_add(gram.m[0], r0, c0);
    multiply_add(gram.m[1], r1, c0);
    multiply_add(gram.m[2], r1, c1);
  }
}

// exp of the sums of g over (j, t] for the kept elements j <= t; lane t < 16 brings g_t
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
    decays.m[i] = matrix_of(j <= t ? exp(sums[2 * i]) : 0.0f, j + 1 <= t ? exp(sums[2 * i + 1]) : 0.0f);
  }
  return decays;
}

inline Triangle elementwise(Triangle a, Triangle b) {
#pragma unroll
  for (int i = 0; i < 3; ++i) a.m[i] = matrix_of(first(a.m[i]) * first(b.m[i]), second(a.m[i]) * second(b.m[i]));
  return a;
}

// No decay or one per head: the products K K^T and Q K^T serve all G = HV / H value heads of a key head.
// G_out [.., 33]: the decays from the start of the chunk through token t, after token t to its end, and over all of it.
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
    store(elementwise(qk, E), P + at * 192);
    if (WRITE == DELTA) {
      const float beta = token < n ? load(row(beta_, batch, start + token, hv), 0) : 0.0f;
      store_inverse(elementwise(kk, E), beta, offset_by(X, at * 192), lane);
    }
    float sum = 0.0f;
#pragma unroll
    for (int s = 0; s < C; ++s) {
      const float gs = simd_broadcast(g, ushort(s));
      if (lane < C ? s <= token : s > token) sum += gs;
    }
    G_out[at * 33 + lane] = exp(sum);
    if (lane == C - 1) G_out[at * 33 + 32] = decay_of(sum);
  }
}
