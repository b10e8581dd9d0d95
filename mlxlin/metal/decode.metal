// One to sixteen tokens of a whole mixer in one dispatch, from its projections to its normed and gated output. The body
// of a kernel calls these functions one after the other:
//
//   1  all threads: convolution, activation, feature map, norm, rotation and gates of all tokens, into threadgroup memory
//   2  L lanes per row of the state, K / L channels each in registers: the recurrence over all tokens
//   3  one SIMD-group per token: norm over the head and output gate
//
// A threadgroup runs one value head, or one of several parts of its rows (then the norm is a dispatch of its own).
// The record of one token in threadgroup memory, SIZE floats:
// q | k of each sub-token | v of each sub-token | decays | a | b | betas | time step | bonus

// What a threadgroup works on, and which of its SIMD-groups and lanes this thread is
struct Place {
  int batch, hv, h, v0;  // value head, query head
  int kh, vh;            // the projected heads of its keys, of its values and decays
  int n;                // real tokens
  bool first_of_head;   // of the parts of a value head
  bool first_of_query;  // of all threadgroups that read one query head: it writes what belongs to the query head
  bool first_of_key;    // and so for the projected heads of keys and of values, of these each part for its own rows
  bool first_of_value;
  int group, groups, lane;
};
inline int thread_of(Place p) { return p.group * 32 + p.lane; }
template <typename P>
inline Place place_of(uint3 threadgroup_, int VT, int H, int HV, int repeats, View<P> lengths, int T, uint group,
                      int groups, uint lane) {
  Place p;
  p.batch = threadgroup_.z;
  p.hv = threadgroup_.y;
  p.h = p.hv / (HV / H);
  p.kh = p.h / repeats;
  p.vh = p.hv / repeats;
  p.v0 = threadgroup_.x * VT;
  p.n = real_tokens(lengths, p.batch, T);
  p.first_of_head = threadgroup_.x == 0;
  p.first_of_query = p.first_of_head && p.hv % (HV / H) == 0;
  p.first_of_key = p.first_of_head && p.hv % (HV / H * repeats) == 0;
  p.first_of_value = p.hv % repeats == 0;
  p.group = group;
  p.groups = groups;
  p.lane = lane;
  return p;
}

// 1: a vector of K features of the channels from c0 on; one SIMD-group per token
template <int K, int SIZE, int ACTIVATION, int NORM, int MAP = IDENTITY, typename CHANNELS>
inline void stage_vectors(threadgroup float* record, CHANNELS x, int c0, float scale, Place p, float eps = 1e-6f) {
  for (int t = p.group; t < p.n; t += p.groups) {
    const Lanes<K> v = vector_of<K, ACTIVATION, NORM, MAP>(x, p.batch, t, c0, scale, p.lane, eps);
#pragma unroll
    for (int i = 0; i < K / 32; ++i) record[t * SIZE + p.lane + 32 * i] = v.x[i];
  }
}

// 1: staged vectors times a learned factor per channel; the same lanes have staged them
template <int K, int SIZE, typename P> inline void stage_gains(threadgroup float* record, View<P> gains, Place p) {
  for (int t = p.group; t < p.n; t += p.groups) {
#pragma unroll
    for (int i = p.lane; i < K; i += 32) record[t * SIZE + i] *= gain(row(gains, 0, 0, 0), i);
  }
}

// 1: what reads the state of a delta rule with a reader, a fraction p of k, and q corrected by p; q, k and p of unit
// length. The same lanes have staged q and k. `reader` [1, 2, H, 1] holds the fractions and the corrections.
template <int K, int SIZE, int KEYS, int A, typename P>
inline void stage_reader(threadgroup float* record, View<P> reader, float scale, Place p) {
  const float fraction = load(row(reader, 0, 0, p.h), 0), correction = load(row(reader, 0, 1, p.h), 0) * fraction;
  for (int t = p.group; t < p.n; t += p.groups) {
    threadgroup float* x = record + t * SIZE + p.lane;
    float q_squares = 0.0f, k_squares = 0.0f;
#pragma unroll
    for (int i = 0; i < K; i += 32) {
      const float k = x[KEYS + i], q = x[i] - correction * k;
      x[i] = q;
      q_squares += q * q;
      k_squares += k * k;
    }
    k_squares = simd_sum(k_squares);
    const float q_scale = scale * rsqrt(simd_sum(q_squares) + 1e-6f), k_scale = rsqrt(k_squares + 1e-6f);
    const float p_scale = fraction * rsqrt(fraction * fraction * k_squares + 1e-6f);
#pragma unroll
    for (int i = 0; i < K; i += 32) {
      x[i] *= q_scale;
      x[A + i] = x[KEYS + i] * p_scale;
      x[KEYS + i] *= k_scale;
    }
  }
}

// 1: how much of the token's own v is read where the state is read before the write: q . (u k), u the bonus [1, 1, H, K].
// The same lanes have staged q and k.
template <int K, int SIZE, int KEYS, int BONUS, typename P>
inline void stage_bonuses(threadgroup float* record, View<P> bonus, Place p) {
  const Row<P> u = row(bonus, 0, 0, p.h);
  for (int t = p.group; t < p.n; t += p.groups) {
    threadgroup float* x = record + t * SIZE;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < K; i += 32) sum += x[p.lane + i] * x[KEYS + p.lane + i] * load(u, p.lane + i);
    sum = simd_sum(sum);
    if (p.lane == 0) x[BONUS] = sum;
  }
}

template <int VT, int SIZE, int ACTIVATION, typename CHANNELS>
inline void stage_values(threadgroup float* record, CHANNELS x, int c0, Place p) {
  for (int e = thread_of(p); e < p.n * VT; e += p.groups * 32)
    record[e / VT * SIZE + e % VT] = channel<ACTIVATION>(x, p.batch, e / VT, c0 + p.v0 + e % VT);
}

// 1: the first DIMS channels of staged vectors turned by the angles of their token; pairs are neighbours or two halves
template <int DIMS, bool INTERLEAVED, int SIZE, typename CP, typename SP>
inline void turn(threadgroup float* record, View<CP> cos_, View<SP> sin_, Place p) {
  constexpr int PAIRS = DIMS / 2;
  for (int e = thread_of(p); e < p.n * PAIRS; e += p.groups * 32)
    turn_pair<DIMS, INTERLEAVED>(record + e / PAIRS * SIZE, e % PAIRS, cos_, sin_, p.batch, e / PAIRS);
}

// 1: the decays of D channels (1: of the head), and their logarithms to the tape
template <int D, int SIZE, typename GATES, typename OUT>
inline void stage_decays(threadgroup float* record, GATES g, int head, OUT tape, int T, int HV, Place p) {
  for (int e = thread_of(p); e < T * D; e += p.groups * 32) {
    const int t = e / D, d = e % D;
    const float x = t < p.n ? log_decay(g, p.batch, t, head, d) : 0.0f;
    if (t < p.n) record[t * SIZE + d] = decay_of(x);
    if (p.first_of_head) put(tape, ((int64_t(p.batch) * T + t) * HV + p.hv) * D + d, x);
  }
}

// 1: what a step multiplies v with
template <int SIZE, typename GATES> inline void stage_steps(threadgroup float* record, GATES g, Place p) {
  for (int t = thread_of(p); t < p.n; t += p.groups * 32) record[t * SIZE] = time_step(g, p.batch, t, p.vh, 0);
}

// 1: keys that are what the decay lets go of
template <int K, int SIZE, typename GATES> inline void stage_forgotten(threadgroup float* record, GATES g, Place p) {
  for (int e = thread_of(p); e < p.n * K; e += p.groups * 32)
    record[e / K * SIZE + e % K] = forgotten(g, p.batch, e / K, p.vh, e % K);
}

// 1: beta of sub-token j, channel `c` of its projection
template <int SIZE, int ACTIVATION, typename P>
inline void stage_betas(threadgroup float* record, View<P> beta, int c, float factor, Place p) {
  for (int t = thread_of(p); t < p.n; t += p.groups * 32)
    record[t * SIZE] = factor * activated<ACTIVATION>(load(row(beta, p.batch, t, 0), c));
}

// A row in threadgroup memory
inline Row<const threadgroup float*> staged(const threadgroup float* data) {
  Row<const threadgroup float*> r;
  r.data = data;
  r.step = 1;
  r.next = 0;
  return r;
}

template <int DECAY, int M, int L> inline Part<M> staged_decay(const threadgroup float* w, int part) {
  return DECAY == HEAD_DECAY ? filled<M>(w[0]) : part_of<M, L>(staged(w), part);
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
          int BETAS, int STEP, int BONUS = -1, typename SP, typename DP, typename NORMALISER, typename U_OUT, typename Z_OUT>
inline void recur(threadgroup float* records, View<SP> S, View<DP> skip, NORMALISER sums, device float* S_out,
                  U_OUT tape_u, Z_OUT tape_z, int T, int HV, int V, Place p) {
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
      if (DECAY != NO_DECAY) apply_decay(s, staged_decay<DECAY, M, L>(x + DECAYS, part));
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

// 3: norm over the head's V outputs times `weight`, where CENTERED a layer norm plus `bias`, then the gate's activation;
// zeros past the last real token
template <int VT, int SIZE, bool NORMED, bool CENTERED, int ACTIVATION, typename WP, typename BP, typename GP, typename Y>
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
