// The recurrence of a mixer over tokens in threadgroup memory, and what ends it; see stage.metal.

// A row in threadgroup memory
inline Row<const threadgroup float*> staged(const threadgroup float* data) {
  Row<const threadgroup float*> r;
  r.data = data;
  r.step = 1;
  r.next = 0;
  return r;
}

template <int DECAY, int M, int L> inline Part<M> staged_decay(const threadgroup float* w, int part, int r) {
  if (DECAY == CHANNEL_DECAY) return part_of<M, L>(staged(w), part);
  return filled<M>(w[DECAY == VALUE_DECAY ? r : 0]);
}

// The sum of the keys, for normalised outputs; without one nothing is divided.
template <typename ZP, typename Z_OUT> struct Normaliser {
  View<ZP> Z;  // [1, B, HV, K]
  Z_OUT out;
  float eps;
};
template <typename ZP, typename Z_OUT> inline Normaliser<ZP, Z_OUT> normaliser(View<ZP> Z, Z_OUT out, float eps) {
  Normaliser<ZP, Z_OUT> x;
  x.Z = Z;
  x.out = out;
  x.eps = eps;
  return x;
}
template <int L, int M, typename ZP, typename Z_OUT>
inline float divisor(const thread Normaliser<ZP, Z_OUT>& x, Part<M> z, Part<M> q) {
  return read<L>(z, q) + x.eps;
}
template <int L, int M, typename Z_OUT>
inline float divisor(const thread Normaliser<Absent, Z_OUT>&, Part<M>, Part<M>) {
  return 1.0f;
}

// 2: the rows v0 .. v0 + VT. The offsets say where a record holds what; y replaces the v of the last sub-token.
// Only the first lane of a row touches its v, so that no other can read it late. A step (STEP >= 0) multiplies what is
// written of v, not what skips the recurrence. With a bonus (BONUS >= 0) the state is read before the token, of which
// the bonus says how much is read.
template <int K, int VT, int L, int SIZE, int DECAY, int WRITE, int N, int KEYS, int VALUES, int DECAYS, int A, int B,
          int BETAS, int STEP, int BONUS = -1, typename SP, typename DP, typename NORMALISER, typename S_OUT,
          typename U_OUT, typename Z_OUT>
inline void recur(threadgroup float* records, View<SP> S, View<DP> skip, NORMALISER sums, S_OUT S_out, U_OUT tape_u,
                  Z_OUT tape_z, int T, int HV, int V, Place p) {
  constexpr int M = K / (4 * L), ROWS = 32 / L;
  const int part = p.lane % L;
  for (int r = p.group * ROWS + p.lane / L; r < VT; r += p.groups * ROWS) {
    Part<M> s = part_of<M, L>(row(S, p.batch, p.hv, p.v0 + r), part);
    Part<M> z = part_of<M, L>(row(sums.Z, 0, p.batch, p.hv), part);
    for (int t = 0; t < p.n; ++t) {
      threadgroup float* x = records + t * SIZE;
      const int64_t at = ((int64_t(p.batch) * T + t) * N * HV + p.hv) * V + p.v0 + r;
      float answer = 0.0f, before = 0.0f;  // of the state before the decay
      if (BONUS >= 0) before = read<L>(s, part_of<M, L>(staged(x), part));
      if (WRITE == LOW_RANK || WRITE == READER_DELTA) answer = read<L>(s, part_of<M, L>(staged(x + A), part));
      if (DECAY != NO_DECAY) apply_decay(s, staged_decay<DECAY, M, L>(x + DECAYS, part, r));
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const Part<M> k = part_of<M, L>(staged(x + KEYS + j * K), part);
        float u = simd_shuffle(part == 0 ? x[VALUES + j * VT + r] : 0.0f, ushort(p.lane - part));
        if (STEP >= 0) u *= x[STEP >= 0 ? STEP : 0];
        if (WRITE == DELTA) u = x[BETAS + j] * (u - read<L>(s, k));
        if (WRITE == READER_DELTA) u = x[BETAS + j] * (u - answer);
        write(s, u, k);
        write(z, 1.0f, k);
        if (part == 0) put(tape_u, at + j * int64_t(HV) * V, u);
      }
      if (WRITE == LOW_RANK) {
        write(s, answer, part_of<M, L>(staged(x + B), part));
        if (part == 0) put(tape_z, at, answer);
      }
      const Part<M> q = part_of<M, L>(staged(x), part);
      const float y = BONUS >= 0 ? before : read<L>(s, q) / divisor<L>(sums, z, q);
      threadgroup float* out = x + (VALUES + (N - 1) * VT + r);
      if (part == 0)
        *out = BONUS >= 0 ? y + x[BONUS >= 0 ? BONUS : 0] * *out : with_skip(row(skip, 0, 0, p.hv), y, *out, p.v0 + r);
    }
    for (int t = p.n; t < T; ++t) {
      const int64_t at = ((int64_t(p.batch) * T + t) * N * HV + p.hv) * V + p.v0 + r;
      if (part == 0) put(tape_z, at, 0.0f);
      for (int j = 0; j < N; ++j)
        if (part == 0) put(tape_u, at + j * int64_t(HV) * V, 0.0f);
    }
    put<L>(S_out, ((int64_t(p.batch) * HV + p.hv) * V + p.v0 + r) * K, part, s);
    if (p.first_of_head && r == 0) put<L>(sums.out, (int64_t(p.batch) * HV + p.hv) * K, part, z);
  }
}

// 3: norm over the head's V outputs times `weight`, where CENTERED a layer norm plus `bias`, then the gate's
// activation; zeros past the last real token
template <int VT, int SIZE, bool NORMED, bool CENTERED, int ACTIVATION, typename WP, typename BP, typename GP,
          typename Y>
inline void finish(const threadgroup float* outputs, View<WP> weight, View<BP> bias, View<GP> gate, float eps,
                   device Y* y, int T, int HV, int V, Place p) {
  for (int t = p.group; t < T; t += p.groups) {
    const int64_t at = ((int64_t(p.batch) * T + t) * HV + p.hv) * V + p.v0;
    const threadgroup float* out = outputs + t * SIZE;
    float mean = 0.0f, squares = 0.0f;
    if (CENTERED) {
      if (t < p.n)
        for (int d = p.lane; d < VT; d += 32) mean += out[d];
      mean = simd_sum(mean) / VT;
    }
    if (NORMED && t < p.n)
      for (int d = p.lane; d < VT; d += 32) squares += (out[d] - mean) * (out[d] - mean);
    const float norm = NORMED ? rsqrt(simd_sum(squares) / VT + eps) : 1.0f;
    for (int d = p.lane; d < VT; d += 32) {
      float x = t < p.n ? (out[d] - mean) * norm : 0.0f;
      if (NORMED) x *= gain(row(weight, 0, 0, p.hv), d);
      if (CENTERED && t < p.n) x += load(row(bias, 0, 0, p.hv), d);
      if (ACTIVATION != IDENTITY && t < p.n)
        x *= activated<ACTIVATION>(load(row(gate, p.batch, t, 0), p.hv * V + p.v0 + d));
      y[at + d] = Y(x);
    }
  }
}

// 3: one staged vector per token to the tape, zeros past the last real token; `heads` such vectors stand side by side
template <int D, int SIZE>
inline void record(const threadgroup float* vectors, device float* tape, int T, int heads, int head, Place p) {
  for (int e = thread_of(p); e < T * D; e += p.groups * 32) {
    const int t = e / D, d = e % D;
    tape[((int64_t(p.batch) * T + t) * heads + head) * D + d] = t < p.n ? vectors[t * SIZE + d] : 0.0f;
  }
}
